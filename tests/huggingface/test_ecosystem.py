"""Every row of the table of what works beside Llama; test_plain_environment.py tries them with older transformers."""

import json
import sys

import ecosystem
import pytest
import torch
from ecosystem import WORKS, Row, Subject, is_installed, try_row, verdict
from environments import run_in

ROWS = ecosystem.load_rows()
LIGHT = [name for name, entry in ROWS.items() if not entry.heavy]
# Of other encodings than TAPE, in three kinds of exports; test_exported_models.py has what each could get wrong alone.
OF_ENCODINGS = "loss saves maps_and_states packed dynamic_cache reused_cache batch embeddings beam_search".split()
OF_ENCODINGS += "sampling assisted gradient_checkpointing lora_and_positions offloaded_weights".split()
OF_ENCODINGS += "sequence_classification token_classification question_answering".split()
AS_LLAMA = {"offloaded_cache": "as Llama: fails (AssertionError: Torch not compiled with CUDA enabled)"}
ON_A_GPU = {"flash_attention_2": "not installed (flash_attn)"}


@pytest.fixture(scope="module")
def subjects(streamable, tmp_path_factory):
    return {name: Subject(path, tmp_path_factory.mktemp(name)) for name, path in streamable.items()}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@pytest.mark.parametrize("name", LIGHT)
def test_row(name, subjects):
    if name in AS_LLAMA:
        outcomes = [try_row(ROWS[name], subject) for subject in subjects.values()]
        assert verdict(*outcomes) == AS_LLAMA[name]
    elif name in ON_A_GPU and not is_installed("flash_attn"):
        assert verdict(try_row(ROWS[name], subjects["tape"]), None) == ON_A_GPU[name]
    else:
        ROWS[name].run(subjects["tape"])


@pytest.mark.parametrize("encoding", ["t5", "fox", "tape_learned"])
def test_rows_of_other_encodings(encoding, exports, tmp_path):
    subject = Subject(exports[encoding].directory, tmp_path)
    for name in OF_ENCODINGS:
        ROWS[name].run(subject)


def test_what_rows_compare_is_not_one_token_over_and_over(subjects):
    for subject in subjects.values():
        assert len(set(subject.greedy[0].tolist())) >= 4


@pytest.mark.slow
def test_the_rows_of_heavy_packages(streamable, package_site, tmp_path):
    options = ("--only", "heavy", "--beside", streamable["rope"], "--beside-failures")
    command = [ecosystem.__file__, streamable["tape"], *options, "--json", tmp_path / "outcomes.json"]
    done = run_in("ecosystem", tmp_path, *command, PYTHONPATH=str(package_site))
    rows = json.loads((tmp_path / "outcomes.json").read_text(encoding="utf-8"))["rows"]
    assert rows.keys() == ROWS.keys() - set(LIGHT)
    found = {name: row["verdict"] for name, row in rows.items() if row["verdict"] != WORKS}
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        # For other CPUs torch 2.13 compiles FlexAttention wrongly, for every model.
        assert found.pop("flex_attention", "as Llama").startswith("as Llama")
    assert not found and done.returncode == 0, found


def test_the_table_says_what_happened(capsys, monkeypatch, streamable, subjects):
    def row(*problems, needs=()):
        """Raise one problem for TAPE and the other for Llama."""

        def run(subject):
            if problem := dict(zip((True, False), problems)).get(subject.is_tape):
                raise problem

        return Row("name", "what", run, needs, False)

    wrong, other = AssertionError("tokens [1]\ninstead of [2]"), IndexError("a")
    for entry, expected in (
        (row(), "works"),
        (row(wrong, other), "fails (AssertionError: tokens [1] instead of [2])"),
        (row(other, IndexError("b")), "as Llama: fails (IndexError: a)"),
        (row(NotImplementedError("no"), None), "refused (no)"),
        (row(needs=("no_such_package", "json")), "not installed (no_such_package)"),
    ):
        assert verdict(*(try_row(entry, subject) for subject in subjects.values())) == expected

    monkeypatch.setattr(ecosystem, "load_rows", lambda: {"right": row(), "wrong": row(wrong, None)})
    monkeypatch.setattr(sys, "argv", ["ecosystem.py", str(streamable["tape"]), "--markdown"])
    with pytest.raises(SystemExit) as stop:
        ecosystem.main()
    assert stop.value.code == 1 and "| what | result |\n| --- | --- |\n| what | works |" in capsys.readouterr().out
