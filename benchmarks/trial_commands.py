"""Run this project's commands at small size, one after another, for the part `commands` of
`benchmarks.gpu_trial`: train, kill and continue, evaluate, extend, export, load and generate.

Most commands run in this process, so that their libraries are imported only once.
"""

import json
import math
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from benchmarks.timing import device_here
from megatron_tape.errors import one_line
from megatron_tape.io.versions import ROOT

STEPS = 8
"""Steps of the run; a checkpoint is saved after the first half."""
KILLED_STEP = 6
"""The step in which a run is killed, after it has saved a checkpoint."""
VOCABULARY = 1024
CORPUS_CHARACTERS = 200_000
DOCUMENT_CHARACTERS = 4000
"""Long enough for the evaluation at twice the length of training."""
CACHED_TOKENS = 4
"""Tokens that are decoded one by one, with a key/value cache."""
MAX_LOGIT_ERROR = 1e-3
"""Maximum relative difference in fp32 of logits with a cache from those without."""
MAX_LOSS_ERROR = {"fp32": 1e-4, "bf16": 0.005}
"""Maximum relative difference of the losses of the continued run, by precision. Some kernels sum
in a different order in each run.
"""
OWN_PACKAGES = ("megatron_tape", "pretrain", "tools", "benchmarks")
"""Packages of this project. If a module of another package is missing, a command is skipped."""
SECONDS = 90.0
"""Time limit of a command in another process."""

# Trains like `python -m pretrain.train`, but kills itself in a step. Its arguments are the number
# of the step, and the arguments of the command.
KILLED_RUN = """
import os, signal, sys
from megatron_tape.training.engine import Engine
from pretrain import train
original = Engine.train_step
def train_step(self, batches, lr, step=0):
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batches, lr, step)
Engine.train_step = train_step
sys.exit(train.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its training."""

    layers: int
    heads: int
    head_dim: int
    seq_length: int
    batch: int
    precision: str


TOY = Sizes(layers=2, heads=2, head_dim=16, seq_length=32, batch=2, precision="fp32")
# The heads of the 155M model, whose kernels are compiled already.
SMALL = Sizes(layers=4, heads=12, head_dim=64, seq_length=256, batch=8, precision="bf16")


def run_commands(folder: Path, toy: bool) -> Iterator[tuple[str, str]]:
    """Run all commands, whose files are in `folder`. Yield the name of each and its outcome:
    "passed", "skipped: ..." with the module that is not installed, or "failed: ..." with the error.
    """
    commands = Commands(folder, TOY if toy else SMALL)
    steps: dict[str, Callable[[], None]] = {
        "tokenizer and dataset": commands.prepare,
        "train": commands.train,
        "kill and continue": commands.kill_and_continue,
        "evaluate": commands.evaluate,
        "extend": commands.extend,
        "export": commands.export,
        "load, and generate with a cache": commands.generate,
    }
    try:
        for name, step in steps.items():
            try:
                step()
            except ModuleNotFoundError as error:
                outcome = "skipped"
                if str(error.name).startswith(OWN_PACKAGES):
                    outcome = "failed"
                yield name, f"{outcome}: {error}"
            # A command that refuses its arguments raises SystemExit.
            except (Exception, SystemExit) as error:
                yield name, f"failed: {type(error).__name__}: {one_line(error)}"
            else:
                yield name, "passed"
    finally:
        commands.close()


class Commands:
    """The commands, in the order of their definitions. Each uses results of earlier ones, which are
    in `folder`. All raise an exception if they fail.
    """

    def __init__(self, folder: Path, sizes: Sizes):
        self.folder = folder
        self.sizes = sizes
        self.killed_run: subprocess.Popen | None = None
        """The process of the run that kills itself; None before it starts."""

    def close(self) -> None:
        """End the run that kills itself, if it still runs."""
        if self.killed_run is not None:
            self.killed_run.kill()
            self.killed_run.wait()

    def prepare(self) -> None:
        """Train a tokenizer on Python's standard library, and make a dataset and two recipes."""
        corpus = self._write_corpus()
        self._make_dataset(corpus, self._train_tokenizer(corpus))
        (self.folder / "recipe.yaml").write_text(self._recipe(), encoding="utf-8")
        (self.folder / "longer.yaml").write_text(self._longer_recipe(), encoding="utf-8")

    def _write_corpus(self) -> Path:
        """Write documents of Python's standard library, and return the JSONL file."""
        text = ""
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= CORPUS_CHARACTERS:
                break
        corpus = self.folder / "corpus.jsonl"
        with open(corpus, "w", encoding="utf-8") as file:
            for start in range(0, CORPUS_CHARACTERS, DOCUMENT_CHARACTERS):
                document = text[start : start + DOCUMENT_CHARACTERS]
                file.write(json.dumps({"text": document}) + "\n")
        return corpus

    def _train_tokenizer(self, corpus: Path) -> Path:
        """Train a tokenizer on the corpus, and return its file."""
        from tools import train_tokenizer

        tokenizer = self.folder / "tokenizer.model"
        _run_tool(
            train_tokenizer,
            f"--input={corpus}",
            f"--vocab-size={VOCABULARY}",
            f"--output={tokenizer}",
        )
        return tokenizer

    def _make_dataset(self, corpus: Path, tokenizer: Path) -> None:
        """Tokenize the corpus into a dataset."""
        # In another process: the program forks, which a process with threads should not do.
        subprocess.run(
            [
                sys.executable,
                ROOT / "tools" / "preprocess_data.py",
                "--workers=1",
                f"--input={corpus}",
                f"--tokenizer={tokenizer}",
                f"--output-prefix={self.folder / 'data'}",
            ],
            check=True,
            cwd=ROOT,
            timeout=SECONDS,
        )

    def train(self) -> None:
        """Train the run `whole`. At the same time, another process trains an equal run, `killed`,
        until it kills itself.
        """
        program = [sys.executable, "-c", KILLED_RUN, str(KILLED_STEP), *self._training("killed")]
        with open(self.folder / "killed.log", "wb") as log:
            self.killed_run = subprocess.Popen(
                program,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._train("whole")

    def kill_and_continue(self) -> None:
        """Wait until the run `killed` is, and continue it. It must have the losses of the run
        `whole`.
        """
        status = self.killed_run.wait(SECONDS)
        if status != -signal.SIGKILL:
            log = (self.folder / "killed.log").read_text(errors="replace")
            raise RuntimeError(f"the run ended with status {status}: {log[-300:]}")
        time_of_continuation = time.time()
        self._train("killed")

        metrics = self._metrics("killed")
        # The first step must be that of the killed process.
        if metrics[1]["time"] > time_of_continuation:
            raise RuntimeError("the run began anew instead of continuing from its checkpoint")
        found = {step: row["train/loss"] for step, row in metrics.items()}
        expected = {step: row["train/loss"] for step, row in self._metrics("whole").items()}
        if found.keys() != expected.keys():
            raise RuntimeError(f"the steps are {list(found)}, not {list(expected)}")
        allowed = MAX_LOSS_ERROR[self.sizes.precision]
        for step, loss in expected.items():
            if not math.isclose(found[step], loss, rel_tol=allowed):
                raise RuntimeError(f"the loss of step {step} is {found[step]}, not {loss}")

    def evaluate(self) -> None:
        """Measure the perplexity at the length of training and at twice that length."""
        from pretrain import evaluate

        length = self.sizes.seq_length
        status = evaluate.main(
            [
                "perplexity",
                f"--model={self.folder / 'whole'}",
                f"--output={self.folder / 'evaluation'}",
                f"--perplexity.data={self.folder / 'data'}",
                "--perplexity.split=900,100,0",
                f"--perplexity.lengths=[{length}, {2 * length}]",
                "--perplexity.documents=2",
            ]
        )
        _require_success(status)

    def extend(self) -> None:
        """Extend the model to twice its context."""
        from pretrain import extend_context

        status = extend_context.main([f"--config={self.folder / 'longer.yaml'}"])
        _require_success(status)

    def export(self) -> None:
        """Export the extended model in the format of transformers."""
        # The export converts the tokenizer with this package. It would refuse the tokenizer instead
        # of reporting that the package is missing.
        import_module("tokenizers")
        from tools import convert_checkpoint

        _run_tool(
            convert_checkpoint,
            "to-hf",
            f"--checkpoint={self.folder / 'longer'}",
            f"--output={self.folder / 'exported'}",
        )

    @torch.no_grad()
    def generate(self) -> None:
        """Load the export in transformers, compare the logits with a cache with those without, and
        generate.
        """
        import transformers

        from megatron_tape.evaluation.model_source import find_model

        path = str(self.folder / "exported")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=find_model(path).needs_trust
        )
        model = model.to(device_here()).eval()
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.sizes.seq_length)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(model.device)
        _compare_with_cache(model, tokens)

        prompt = tokens[:, :-CACHED_TOKENS]
        generated = model.generate(prompt, max_new_tokens=CACHED_TOKENS, do_sample=False)
        # The result begins with the prompt.
        if generated.shape[1] <= prompt.shape[1]:
            raise RuntimeError("no token was generated")

    def _training(self, name: str) -> list[str]:
        """Return the options of `pretrain.train` for the run `name`."""
        return [
            f"--config={self.folder / 'recipe.yaml'}",
            f"--logging.directory={self.folder / name}",
        ]

    def _train(self, name: str) -> None:
        """Train the run `name`, or continue it."""
        from pretrain import train

        _require_success(train.main(self._training(name)))

    def _metrics(self, name: str) -> dict[int, dict]:
        """Return the metrics of the run `name` by step."""
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row for row in rows if "train/loss" in row}

    def _recipe(self) -> str:
        """Return the recipe of the run."""
        sizes = self.sizes
        width = sizes.heads * sizes.head_dim
        return f"""
model: {{position_encoding: tape, num_layers: {sizes.layers}, hidden_size: {width},
        ffn_hidden_size: {2 * width}, num_attention_heads: {sizes.heads},
        seq_length: {sizes.seq_length}, vocab_size: {VOCABULARY}}}
optimizer: {{lr: 0.002}}
{self._common(STEPS, "whole")}
"""

    def _longer_recipe(self) -> str:
        """Return the recipe of the extension."""
        return f"""
model: {{position_encoding: tape, position: {{rope_scaling_factor: 2.0}},
        seq_length: {2 * self.sizes.seq_length}}}
extension: {{from: '{self.folder / "whole"}', trains: [position, lora]}}
optimizer: {{lr: 0.001}}
{self._common(2, "longer")}
"""

    def _common(self, steps: int, name: str) -> str:
        """Return the settings that both recipes have, with the values of the run `name`."""
        batch = self.sizes.batch
        return f"""
data: {{prefix: '{self.folder / "data"}', tokenizer: '{self.folder / "tokenizer.model"}',
       split: '900,100,0', cache_directory: '{self.folder / "index"}'}}
schedule: {{kind: constant}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: {batch},
        precision: {self.sizes.precision}, eval_interval: {STEPS}, eval_steps: 1,
        hang_timeout: 300}}
checkpoint: {{interval: {STEPS // 2}}}
logging: {{interval: 1, sample_tokens: 0, tensorboard: false, directory: '{self.folder / name}'}}
"""


def _compare_with_cache(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Raise RuntimeError if the logits of `tokens` (B, S) with a key/value cache differ from those
    without.
    """
    expected = model(tokens).logits[:, -CACHED_TOKENS - 1 :].float()

    output = model(tokens[:, :-CACHED_TOKENS], use_cache=True)
    found = [output.logits[:, -1:]]
    for token in tokens[:, -CACHED_TOKENS:].split(1, dim=1):
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits)

    difference = torch.cat(found, 1).float() - expected
    error = float(difference.norm() / expected.norm())
    # Not `>`, which is false for NaN.
    if not error <= MAX_LOGIT_ERROR:
        raise RuntimeError(f"logits with a cache are off by {error:.2g}")


def _run_tool(tool: ModuleType, *arguments: str) -> None:
    """Run a program of tools/ in this process."""
    with mock.patch.object(sys, "argv", [tool.__name__, *arguments]):
        tool.main()


def _require_success(status: int) -> None:
    """Raise RuntimeError unless the exit status of a command is 0."""
    if status != 0:
        raise RuntimeError(f"the command ended with status {status}")
