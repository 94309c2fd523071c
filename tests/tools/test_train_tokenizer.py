import signal
import subprocess
import sys

import pytest
from tool_runs import ROOT

from megatron_tape.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_source_code_is_reproduced_and_two_runs_give_the_same_model(
    tmp_path, corpus, run_tool, texts, kind
):
    models = [tmp_path / "a.model", tmp_path / "b.model"]
    options = ["--input", corpus, "--vocab-size", 600, "--model-type", kind]
    options += ["--max-bytes", 50000, "--seed", 3]
    for model in models:
        run_tool("train_tokenizer", *options, "--output", model)
    assert models[0].read_bytes() == models[1].read_bytes()
    tokenizer = load_tokenizer(models[0])
    assert tokenizer.vocab_size == 600
    for text in [*texts, " leading", "trailing \n", "\n\n\tx\n", "\0\x01", "\U0010ffff"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_another_seed_samples_other_documents(tmp_path, corpus, run_tool):
    for seed in (0, 1):
        options = ["--vocab-size", 400, "--max-bytes", 60000, "--seed", seed]
        output = ["--output", tmp_path / f"{seed}.model"]
        run_tool("train_tokenizer", "--input", corpus, *options, *output)
    assert (tmp_path / "0.model").read_bytes() != (tmp_path / "1.model").read_bytes()


def test_user_errors_are_one_sentence_and_leave_no_output(tmp_path, corpus, run_tool):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{\n')
    for arguments, problem in (
        ([corpus, "--vocab-size", 100000], "too many for this text; choose at most "),
        ([corpus, "--vocab-size", 50], "which SentencePiece refuses: "),
        ([corpus, "--max-document-bytes", 1000], "more than 1,000 bytes in one document; repair"),
        ([tmp_path / "bad.jsonl"], "bad.jsonl:2 cannot be used: invalid JSON"),
    ):
        options = ["--input", *arguments, "--output", tmp_path / "t.model"]
        assert problem in run_tool("train_tokenizer", *options, code=2).stderr
    assert not (tmp_path / "t.model").exists()
    (tmp_path / "t.model").write_text("existing")
    options = ["--input", corpus, "--output", tmp_path / "t.model"]
    assert "exists; pass" in run_tool("train_tokenizer", *options, code=2).stderr
    assert (tmp_path / "t.model").read_text() == "existing"


def test_a_signal_ends_the_training_at_once_and_leaves_no_model(corpus, tmp_path):
    code = (
        "import time; from megatron_tape import command_line; from tools import train_tokenizer as"
        " tool;tool.train = lambda *_: (print(flush=True), time.sleep(60));"
        " command_line.run(tool.main)"
    )
    options = ["--input", str(corpus), "--output", str(tmp_path / "t.model")]
    command = [sys.executable, "-c", code, *options]
    tool = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    tool.stdout.readline()
    tool.send_signal(signal.SIGINT)
    tool.communicate(timeout=60)
    assert tool.returncode == -signal.SIGINT
    assert not (tmp_path / "t.model").exists()
