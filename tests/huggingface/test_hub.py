"""to-hf --push-to-hub: what is asked of huggingface_hub, in which order, and what is said where it fails."""

from types import SimpleNamespace

import pytest
from conversions import convert, refused
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from megatron_tape.huggingface.export.hub import repository_of


@pytest.fixture
def hub(monkeypatch):
    """What is `asked` of the Hub, whose user `me` is in `lab`; `failing` are the errors that calls end with."""
    hub = SimpleNamespace(asked=[], failing={})

    def answer(name, value):
        def method(self, *arguments, **options):
            hub.asked.append((name, arguments, options))
            if name in hub.failing:
                raise hub.failing[name]
            return value

        monkeypatch.setattr(HfApi, name, method)

    answer("whoami", {"name": "me", "orgs": [{"name": "lab"}]})
    answer("create_repo", "https://hub/lab/model")
    answer("upload_folder", None)
    return hub


def http_error(status, message=None):
    response = SimpleNamespace(headers={}, request=None, status_code=status, reason_phrase="")
    return HfHubHTTPError("", response=response, server_message=message)


@pytest.fixture
def command(exports, tmp_path):
    checkpoint, output = exports["tape"].checkpoint, tmp_path / "out"
    return ["to-hf", "--checkpoint", checkpoint, "--output", output, "--tokenizer", "none", "--push-to-hub"]


def test_the_export_is_uploaded_in_one_commit_which_replaces_older_weights_and_code(hub, command, tmp_path):
    done = convert(*command, "lab/model", "--private")
    assert done.returncode == 0, done.stderr
    (first, *_), (second, created, options), (third, _, uploaded) = hub.asked
    assert (first, second, third) == ("whoami", "create_repo", "upload_folder")
    assert created == ("lab/model",) and options == {"private": True, "exist_ok": True}
    assert (uploaded["repo_id"], str(uploaded["folder_path"])) == ("lab/model", str(tmp_path / "out"))
    old = ["chat_template.jinja", "model-00001-of-00002.safetensors", "old_tape.py", "tokenizer.json"]
    before = [".gitattributes", "notes.md", "config.json", *old]
    deleted = filter_repo_objects(before, allow_patterns=uploaded["delete_patterns"])
    assert sorted(deleted) == old
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "positions.png", "model.safetensors", "modeling_tape.py"} <= files
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"lab/model"' in card and "# model\n" in card and str(tmp_path) not in card


def test_a_name_without_an_owner_is_the_users(hub):
    assert repository_of("model") == "me/model" and [name for name, *_ in hub.asked] == ["whoami"]


@pytest.mark.parametrize(
    "name, part",
    [
        ("other/model", "can upload to me/model, lab/model"),
        ("a//b", "cannot be a model's name"),
        ("-x", "cannot be a model's name"),
    ],
)
def test_a_name_that_cannot_be_uploaded_to_is_refused_before_the_export(hub, command, tmp_path, name, part):
    refused(tmp_path, part, *command[:-1], f"--push-to-hub={name}")
    assert "create_repo" not in [name for name, *_ in hub.asked]


def test_with_a_wrong_token_nothing_is_exported(hub, command, tmp_path):
    hub.failing["whoami"] = http_error(401)
    refused(tmp_path, "run: hf auth login", *command, "lab/model")


def test_without_a_login_or_a_connection_nothing_is_exported(command, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    refused(tmp_path, "the Hub cannot be reached", *command, "lab/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    refused(tmp_path, "nobody is logged in; run: hf auth login", *command, "lab/model")


def test_a_failed_upload_leaves_the_export_and_says_how_to_go_on(hub, command, tmp_path):
    hub.failing["upload_folder"] = http_error(507, "the disk is full")
    done = convert(*command, "lab/model")
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and error.startswith("error: ")
    assert f"hf upload lab/model {tmp_path / 'out'}" in error and "507: the disk is full" in error
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_cannot_be_done_is_refused_before_anything_is_asked(hub, command, tmp_path):
    refused(tmp_path, "add --push-to-hub", *command[:-1], "--private")
    refused(tmp_path, "leave out --adapter", *command, "lab/model", "--adapter")
    (tmp_path / "out").mkdir()
    refused(tmp_path, "exists", *command, "lab/model")
    assert hub.asked == []
