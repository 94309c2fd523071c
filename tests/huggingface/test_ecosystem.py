"""Every row of the table of what works beside Llama, with the pinned transformers, the oldest, and heavy packages."""

import json
import shutil
import sys

import ecosystem
import pytest
import torch
from ecosystem import FAILS, NOT_INSTALLED, REFUSED, WORKS, Outcome, Row, Subject, is_installed, try_row, verdict
from environments import run_in
from exported_models import NAMES, TOYS
from safetensors.torch import load_file, save_file

ROWS = ecosystem.load_rows()
LIGHT = [name for name, entry in ROWS.items() if not entry.heavy]
OF_EVERY_ENCODING = "loss saves maps_and_states packed dynamic_cache reused_cache batch embeddings".split()
OF_EVERY_ENCODING += "beam_search sampling assisted".split()
OF_SOME = "gradient_checkpointing lora_and_positions offloaded_weights".split()
OF_SOME += "sequence_classification token_classification question_answering".split()
AS_LLAMA = {"offloaded_cache": "as Llama: fails (AssertionError: Torch not compiled with CUDA enabled)"}
OLDEST_AS_LLAMA = {
    "chunked_prompt": "as Llama: fails (ValueError: Cannot use prefill chunking without a cache)",
    "early_exit": "as Llama: fails (TypeError: AssistedCandidateGenerator.get_candidates() missing 1 required "
    "positional argument: 'is_first_iteration')",
}
ON_A_GPU = {"flash_attention_2": "not installed (flash_attn)"}


@pytest.fixture(scope="module")
def directories(exports, tmp_path_factory):
    """The exports, but their text has no bytes of which no character can be made: transformers cannot stream those."""
    folder = tmp_path_factory.mktemp("ecosystem")
    for name in ("tape", "rope"):
        shutil.copytree(exports[name].directory, folder / name)
        pieces = json.loads((folder / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        weights = load_file(folder / name / "model.safetensors")
        weights["lm_head.weight"][[index for piece, index in pieces.items() if piece.startswith("<0x")]] = 0
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    return {name: folder / name for name in ("tape", "rope")}


@pytest.fixture(scope="module")
def subjects(directories, tmp_path_factory):
    return {name: Subject(path, tmp_path_factory.mktemp(name)) for name, path in directories.items()}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def run_script(which, directories, folder, *options, **variables):
    """Run the script on both models and return what it keeps, by row."""
    command = [ecosystem.__file__, directories["tape"], *options, "--json", folder / "outcomes.json"]
    done = run_in(which, folder, *command, **variables)
    assert (folder / "outcomes.json").exists(), done.stderr[-2000:]
    return done, json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))["rows"]


def not_working(rows):
    return {name: row["verdict"] for name, row in rows.items() if row["verdict"] != WORKS}


@pytest.mark.parametrize("name", LIGHT)
def test_row(name, subjects):
    if name in AS_LLAMA:
        outcomes = [try_row(ROWS[name], subject) for subject in subjects.values()]
        assert verdict(*outcomes) == AS_LLAMA[name]
    elif name in ON_A_GPU and not is_installed("flash_attn"):
        assert verdict(try_row(ROWS[name], subjects["tape"]), None) == ON_A_GPU[name]
    else:
        ROWS[name].run(subjects["tape"])


@pytest.mark.parametrize("encoding", [name for name in NAMES if name not in (*TOYS, "tape", "rope")])
def test_rows_of_every_encoding(encoding, exports, tmp_path):
    subject = Subject(exports[encoding].directory, tmp_path)
    for name in (*OF_EVERY_ENCODING, *(OF_SOME if encoding in ("t5", "fox") else ())):
        # Rounding moves RePo's positions, which are content times large numbers.
        if encoding != "repo" or name not in ("maps_and_states", "packed"):
            ROWS[name].run(subject)


def test_what_rows_compare_is_not_one_token_over_and_over(subjects):
    for subject in subjects.values():
        assert len(set(subject.greedy[0].tolist())) >= 4


def test_the_oldest_transformers_does_the_light_rows(directories, tmp_path):
    beside = ("--beside", directories["rope"], "--beside-failures")
    done, rows = run_script("transformers", directories, tmp_path, "--only", "light", *beside)
    assert rows.keys() == set(LIGHT)
    expected = AS_LLAMA | OLDEST_AS_LLAMA | ON_A_GPU
    expected |= {name: "not installed (peft)" for name in ("lora_all_linear", "lora_and_positions")}
    expected |= {name: "not installed (accelerate)" for name in ("trainer", "offloaded_weights")}
    expected["lm_eval"] = "not installed (lm_eval, accelerate)"
    found = not_working(rows)
    refused = {name: found.pop(name) for name in ("continuous_batching", "paged_cache")}
    assert all(text.startswith("refused (continuous batching of TAPE models is not") for text in refused.values())
    assert found == expected and done.returncode == 0, found


@pytest.mark.slow
def test_the_rows_of_heavy_packages(directories, package_site, tmp_path):
    options = ("--only", "heavy", "--beside", directories["rope"], "--beside-failures")
    done, rows = run_script("ecosystem", directories, tmp_path, *options, PYTHONPATH=str(package_site))
    assert rows.keys() == ROWS.keys() - set(LIGHT)
    found = not_working(rows)
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        # For other CPUs torch 2.13 compiles FlexAttention wrongly, for every model.
        assert found.pop("flex_attention", "as Llama").startswith("as Llama")
    assert not found and done.returncode == 0, found


def test_the_table_says_what_happened(capsys, monkeypatch, tmp_path, directories, subjects):
    def row(*problems, needs=()):
        """Raise one problem for TAPE and the other for Llama."""

        def run(subject):
            if problem := dict(zip((True, False), problems)).get(subject.is_tape):
                raise problem

        return Row("name", "what", run, needs, False)

    wrong, other = AssertionError("tokens [1]\ninstead of [2]"), IndexError("a")
    for entry, expected in (
        (row(), "works"),
        (row(wrong, None), "fails (AssertionError: tokens [1] instead of [2])"),
        (row(wrong, other), "fails (AssertionError: tokens [1] instead of [2])"),
        (row(other, IndexError("b")), "as Llama: fails (IndexError: a)"),
        (row(NotImplementedError("no"), None), "refused (no)"),
        (row(needs=("no_such_package", "json")), "not installed (no_such_package)"),
        (row(None, wrong), "works"),
    ):
        assert verdict(*(try_row(entry, subject) for subject in subjects.values())) == expected
    assert verdict(Outcome(FAILS, "no", "NotImplementedError"), Outcome(REFUSED)).startswith("fails")

    monkeypatch.setattr(ecosystem, "load_rows", lambda: {"right": row(), "wrong": row(wrong, None)})
    for options, code, said in (
        (
            ["--beside", directories["rope"], "--markdown"],
            1,
            "| TAPE | Llama |\n| --- | --- | --- |\n| what | works",
        ),
        (["--rows", "right"], 0, "what: works"),
        (["--rows", "x"], 2, "unknown x"),
        (["--beside", tmp_path], 2, "has no config.json"),
    ):
        monkeypatch.setattr(sys, "argv", ["ecosystem.py", *map(str, [directories["tape"], *options])])
        with pytest.raises(SystemExit) as stop:
            ecosystem.main()
        printed = capsys.readouterr()
        assert stop.value.code == code and said in printed.out + printed.err


def test_a_folder_without_code_is_not_an_installed_package(monkeypatch, tmp_path):
    (tmp_path / "a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_folder") and not is_installed("no_such_package") and is_installed("json")
    assert NOT_INSTALLED == try_row(Row("n", "w", None, ("a_folder",), False), None).status
