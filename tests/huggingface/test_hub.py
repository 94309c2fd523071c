"""to-hf --push-to-hub, against a local server that stands in for the Hub and keeps what is uploaded."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conversions import convert, refused
from huggingface_hub import constants

from megatron_tape.huggingface.export.hub import repository_of

TOKEN = "hf_of_a_test"
LARGE = (".safetensors", ".png")


class Hub(BaseHTTPRequestHandler):
    """The requests that huggingface_hub makes to create a model and to upload files to it; large ones by LFS."""

    def reply(self, value=None, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def respond(self):
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if path.startswith("/lfs/"):
            hub.objects[path.removeprefix("/lfs/")] = body
            return self.reply()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            return self.reply({"type": "user", "name": "me", "orgs": [{"name": "lab"}]})
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            name = "/".join(filter(None, (hub.created[-1].get("organization", "me"), hub.created[-1]["name"])))
            return self.reply({"url": f"{hub.url}/{name}", "id": name})
        if hub.refuses_commits and "/preupload/" in path:
            return self.reply({"error": "the disk is full"}, 507)
        if path == "/api/validate-yaml":
            hub.cards.append(json.loads(body)["content"])
            return self.reply({"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [(file["path"], "lfs" if file["path"].endswith(LARGE) else "regular") for file in files]
            found = [{"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None} for path, mode in modes]
            return self.reply({"files": found})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                item | {"actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self.reply({"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            hub.commits.append((path, [json.loads(line) for line in body.splitlines()]))
            return self.reply(
                {"commitUrl": f"{hub.url}/lab/model/commit/0", "commitOid": "0" * 40, "pullRequestUrl": None}
            )
        if "/tree/" in path:
            return self.reply([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in hub.before])
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in hub.before]
            return self.reply({"id": "me/model", "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []})
        return self.reply({"error": f"not expected: {path}"}, 404)

    do_GET = do_POST = do_PUT = respond

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.requests, server.created, server.commits, server.objects = [], [], [], {}
    server.before, server.cards, server.refuses_commits = [], [], False
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def command(exports, tmp_path):
    checkpoint = exports["tape"].directory.parent / "checkpoints" / "tape"
    return ["to-hf", "--checkpoint", checkpoint, "--output", tmp_path / "out", "--tokenizer", "none", "--push-to-hub"]


def uploaded(hub):
    """The files of the only commit, and the names that it deletes."""
    ((path, lines),) = hub.commits
    assert path == "/api/models/lab/model/commit/main"
    files = {}
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            content = hub.objects[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            files[value["path"]] = content
    return files, [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]


def test_every_file_of_the_export_is_uploaded_and_loads(hub, command, exports, tmp_path):
    from transformers import AutoModelForCausalLM

    hub.before = [".gitattributes", "notes.md", "model-00001-of-00002.safetensors", "old_tape.py", "config.json"]
    done = convert(*command, "lab/model", "--private")
    assert done.returncode == 0, done.stderr
    assert hub.requests.index("GET /api/whoami-v2") < hub.requests.index("POST /api/repos/create")
    assert [(one["name"], one["organization"]) for one in hub.created] == [("model", "lab")]
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    files, deleted = uploaded(hub)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "positions.png", "model.safetensors", "modeling_tape.py"} <= set(files)
    assert sorted(deleted) == ["model-00001-of-00002.safetensors", "old_tape.py"]
    card = files["README.md"].decode()
    assert set(hub.cards) == {card}
    assert '"lab/model"' in card and "# model\n" in card and str(tmp_path) not in card
    (tmp_path / "downloaded").mkdir()
    for name, content in files.items():
        (tmp_path / "downloaded" / name).write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "downloaded", trust_remote_code=True)
    tokens = torch.arange(24).view(1, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, exports["tape"].model(tokens).logits, atol=1e-5, rtol=0)


def test_a_name_without_an_owner_is_the_users(hub):
    assert repository_of("model") == "me/model" and hub.created == []


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
    assert hub.created == []


def test_without_a_login_nothing_is_exported(hub, command, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(tmp_path, "run: hf auth login", *command, "lab/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    hub.requests.clear()
    refused(tmp_path, "nobody is logged in; run: hf auth login", *command, "lab/model")
    assert hub.requests == []


def test_without_a_connection_nothing_is_exported(hub, command, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(tmp_path, "the Hub cannot be reached", *command, "lab/model")


def test_an_existing_output_is_refused_before_anything_is_asked(hub, command, tmp_path):
    (tmp_path / "out").mkdir()
    refused(tmp_path, "exists", *command, "lab/model")
    assert hub.requests == []


def test_a_failed_upload_leaves_the_export_and_says_how_to_go_on(hub, command, tmp_path):
    hub.refuses_commits = True
    done = convert(*command, "lab/model")
    assert done.returncode == 2 and hub.commits == []
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and f"hf upload lab/model {tmp_path / 'out'}" in error and "507" in error
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "options, part", [(["--private"], "add --push-to-hub"), (["--adapter"], "leave out --adapter")]
)
def test_options_that_do_not_go_together_are_refused(hub, command, tmp_path, options, part):
    name = [] if "--private" in options else ["--push-to-hub", "lab/model"]
    refused(tmp_path, part, *command[:-1], *name, *options)
    assert hub.requests == []
