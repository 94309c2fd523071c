"""The stage `pretraining` of `benchmarks.gpu_trial`: the 155M recipe with TAPE and with RoPE, a few minutes each.

Text, tokenizer and dataset are made on the spot. TAPE trains until its time is over, and RoPE then takes as many steps
on the same tokens. Both are evaluated on held-out documents at 1, 2 and 4 times the trained length.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import Record
from megatron_tape.errors import EXIT_RESTART
from megatron_tape.evaluation.results import read_results
from megatron_tape.io.versions import ROOT

MINUTES = 3.0
"""Time that TAPE trains."""
RESERVE = 150.0
"""Seconds that are kept for the evaluations and for starting programs."""
SETTINGS = {
    # Shorter and faster than the recipe's 10,000 steps of 512 sequences with a learning rate of 1e-4.
    "train.global_batch_size": 128, "train.micro_batch_size": 32, "optimizer.lr": 6e-4, "schedule.warmup_steps": 100,
    "train.eval_interval": 50, "logging.interval": 10, "logging.sample_tokens": 1,
}  # fmt: skip
TOY = {
    "model.num_layers": 2, "model.hidden_size": 64, "model.ffn_hidden_size": 128, "model.num_attention_heads": 2,
    "model.position.mlp_size": 8, "model.seq_length": 64, "model.vocab_size": 512, "train.precision": "fp32",
    "deepspeed.zero_stage": 1, "train.global_batch_size": 4, "train.micro_batch_size": 4, "train.eval_interval": 5,
    "train.eval_steps": 1, "logging.interval": 1, "schedule.warmup_steps": 2,
}  # fmt: skip


def pretrain(record: Record, options: argparse.Namespace) -> None:
    """Train and evaluate both, and write losses as they come in."""
    deadline, found = time.monotonic() + options.seconds, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, length = _dataset(folder, options), 64 if options.toy else 1024
        settings = {"data.prefix": data, "data.tokenizer": folder / "tokenizer.model", "data.split": "95,5,0"}
        settings |= {"schedule.kind": "constant", "checkpoint.interval": 10**6, "logging.tensorboard": False}
        settings |= SETTINGS | (TOY if options.toy else {})
        seconds = 15.0 if options.toy else min(60 * MINUTES, (deadline - time.monotonic() - RESERVE) / 2)
        steps = None
        for encoding in ("tape", "rope"):
            run = folder / encoding
            _train(encoding, run, settings, steps, seconds)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            steps = rows[-1]["step"]
            kept = ("step", "loss", "validation_loss", "tokens_per_second")
            curve = [{key: row[key] for key in kept if key in row} for row in rows]
            found[encoding] = {"steps": steps, "curve": curve, "lengths": {}}
            record.write({"models": found})
        for encoding in found:
            found[encoding]["lengths"] = _losses(folder / encoding, data, [length, 2 * length, 4 * length])
            record.write({"models": found})


def _dataset(folder: Path, options: argparse.Namespace) -> Path:
    """Make a tokenizer and a dataset; return the dataset's prefix."""
    text, tokenizer, prefix = options.text, folder / "tokenizer.model", folder / "data"
    if text is None:
        text = folder / "text.jsonl"
        source = ["folders", ROOT / "megatron_tape", "--suffixes", ".py"] if options.toy else ["stdlib"]
        _run("tools/make_corpus.py", *source, "--output", text)
    vocabulary = 512 if options.toy else 8192
    _run("tools/train_tokenizer.py", "--input", text, "--vocab-size", vocabulary, "--output", tokenizer)
    workers = ["--workers", 1 if options.toy else 8]
    _run("tools/preprocess_data.py", "--input", text, "--tokenizer", tokenizer, "--output-prefix", prefix,
         "--append-eod", *workers)  # fmt: skip
    return prefix


def _train(encoding: str, run: Path, settings: dict, steps: int | None, seconds: float) -> None:
    """Train `steps` steps or, if there is no such number, as many as `seconds` allow."""
    own = "model.position.mlp_size"
    options = [f"--{key}={value}" for key, value in settings.items() if encoding == "tape" or key != own]
    options += [f"--model.position_encoding={encoding}", f"--train.steps={steps or 10**6}"]
    options.append(f"--logging.directory={run}")
    command = [sys.executable, "-m", "pretrain.train", "--config", "pretrain/recipes/tape_155m.yaml", *options]
    program = subprocess.Popen(command, cwd=ROOT)
    try:
        status = program.wait(None if steps else seconds)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGTERM)  # after the current step it writes a checkpoint and ends
        status = program.wait()
    if status not in (0, EXIT_RESTART):
        raise SystemExit(f"training {encoding} ended with status {status}")


def _losses(run: Path, data: Path, lengths: list[int]) -> dict[str, float]:
    """Return the loss of the same held-out tokens by the length of their context."""
    output = run / "losses"
    _run("-m", "pretrain.evaluate", "perplexity", "--model", run, "--output", output, "--perplexity.data", data,
         "--perplexity.split", "95,5,0", "--perplexity.lengths", lengths)  # fmt: skip
    scores = read_results(output).tasks["perplexity"].scores
    return {str(score.length): score.value for score in scores if score.unit == "nats per token" and score.length}


def _run(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)
