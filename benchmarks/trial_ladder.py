"""Train the largest model that a few minutes allow with several encodings, for the part `ladder` of
`benchmarks.gpu_trial`.

The models train on the source code of Python's standard library, with one seed and the learning
rate of the recipe, which is not tuned for them. The time of a step is measured at each size, from
the largest one down, until the training with all encodings fits into the time that is left.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.environment import Record
from benchmarks.measured_model import MeasuredModel, dtype_of, free_memory
from benchmarks.timing import describe_error
from megatron_tape.evaluation.comparison_file import read_comparison
from megatron_tape.io.versions import ROOT
from megatron_tape.model.backend import verified_backend
from megatron_tape.parallel.layout import ParallelLayout, initialize_distributed
from pretrain import compare
from pretrain.comparison.planned_runs import ComparisonPlan, PlannedRun, make_plan

RUN_SECONDS = 25.0
"""Time of a run in addition to its steps: imports, the first steps, validation and a checkpoint."""
SLOWDOWN = 1.15
"""Allowed ratio of a step's time in training to the measured one."""
WARMUP_STEPS = 2
TIMED_STEPS = 3


@dataclass(frozen=True)
class Size:
    """The size of a model, whose heads all have the same width."""

    layers: int
    heads: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {self.heads} heads"


@dataclass(frozen=True)
class Setup:
    """What is trained, and on what."""

    variants: Sequence[str]
    sizes: Sequence[Size]
    """From the largest to the smallest."""
    head_dim: int
    seq_length: int
    batch: int
    """Sequences of a step."""
    vocabulary: int
    tokens_per_parameter: float
    """Parameters are those of the layers' matrices with RoPE, as in ladders."""
    precision: str
    corpus: Sequence[str]
    """Arguments of tools.make_corpus."""

    def parameters(self, size: Size) -> int:
        """Return the parameters of the layers' matrices: four of attention, and three of the MLP,
        each three times as large.
        """
        width = size.heads * self.head_dim
        return size.layers * 13 * width**2

    def steps(self, size: Size) -> int:
        """Return the number of training steps."""
        tokens = self.tokens_per_parameter * self.parameters(size)
        return max(1, round(tokens / (self.batch * self.seq_length)))


FULL = Setup(
    variants=("rope", "tape", "wall", "fox"),
    # 27, 15, 8, 3.4 and 0.9 million parameters.
    sizes=(Size(8, 8), Size(8, 6), Size(6, 5), Size(4, 4), Size(4, 2)),
    head_dim=64,
    seq_length=1024,
    batch=64,
    vocabulary=4096,
    # The smaller amount of pretrain/recipes/compare/ladder.yaml. The text has 9 million tokens, so
    # the larger amount would repeat them ten times and more.
    tokens_per_parameter=5,
    precision="bf16",
    corpus=("stdlib", "--shuffle=0"),
)
TOY = Setup(
    variants=("rope", "fox"),
    sizes=(Size(2, 2), Size(1, 2)),
    head_dim=16,
    seq_length=32,
    batch=2,
    vocabulary=512,
    tokens_per_parameter=0.02,
    precision="fp32",
    corpus=("folders", str(ROOT / "megatron_tape"), "--suffixes", ".py"),
)


def train_ladder(folder: Path, setup: Setup, record: Record, deadline: float) -> None:
    """Train the largest size that fits before `deadline` (of `time.monotonic`) with all variants,
    and record each result at once.

    The files of the runs are in `folder`. A run that fails does not stop the others.
    """
    make_dataset(folder, setup)
    layout = initialize_distributed()
    results: dict = {"step_seconds": {}, "tests": {}, "runs": {}}
    for size in setup.sizes:
        plan = make_plan(*compare.read_command(command(folder, setup, size)))
        left = deadline - time.monotonic()
        times = measure(plan, layout, left, failures=results["tests"])
        results["step_seconds"][size.name] = times
        needed = needed_seconds(times.values(), setup.steps(size))
        left = deadline - time.monotonic()
        print(f"{size.name}: {needed:.0f} s of {left:.0f} s for {', '.join(times)}", flush=True)
        is_measured = len(times) + len(results["tests"]) == len(setup.variants)
        if is_measured and needed <= left:
            break
    # If no size fits, this is the smallest one.
    results |= {
        "size": size.name,
        "parameters": setup.parameters(size),
        "steps": setup.steps(size),
    }
    record.write(results)

    for number, run in enumerate(plan.runs):
        name = run.variant.label
        if name in results["tests"]:
            continue  # it could not be measured
        # --only, since the page needs packages that a GPU machine may lack.
        status = compare.main([*command(folder, setup, size), f"--only={number}"])
        if status == 0:
            scores = read_comparison(run.result).runs[0].scores
            values = {score.metric: score.value for score in scores}
            results["runs"][name] = values
            results["tests"][name] = f"validation loss {values['validation loss']:.4f}"
        else:
            results["tests"][name] = f"failed: exit status {status}; the error is in the log"
        record.write(results)


def make_dataset(folder: Path, setup: Setup) -> None:
    """Write a tokenizer and a dataset, which `command` names, into `folder`."""
    corpus = str(folder / "corpus.jsonl")
    tokenizer = str(folder / "tokenizer.model")
    _run_tool("make_corpus", *setup.corpus, "--output", corpus)
    _run_tool(
        "train_tokenizer",
        *("--input", corpus, "--output", tokenizer),
        *("--vocab-size", str(setup.vocabulary), "--max-bytes", "2000000"),
    )
    _run_tool(
        "preprocess_data",
        *("--input", corpus, "--tokenizer", tokenizer),
        *("--output-prefix", str(folder / "data")),
    )


def _run_tool(name: str, *arguments: str) -> None:
    """Run a program of tools/ in another process."""
    subprocess.run([sys.executable, "-m", f"tools.{name}", *arguments], check=True, cwd=ROOT)


def command(folder: Path, setup: Setup, size: Size) -> list[str]:
    """Return the arguments of `pretrain.compare` that train a size."""
    width = size.heads * setup.head_dim
    steps = setup.steps(size)
    settings = {
        "model.num_layers": size.layers,
        "model.hidden_size": width,
        "model.num_attention_heads": size.heads,
        "model.ffn_hidden_size": 3 * width,
        "model.seq_length": setup.seq_length,
        "model.vocab_size": setup.vocabulary,
        "data.prefix": folder / "data",
        "data.tokenizer": folder / "tokenizer.model",
        "data.cache_directory": folder / "index",
        "schedule.warmup_steps": steps // 10,
        "train.steps": steps,
        "train.micro_batch_size": setup.batch,
        "train.global_batch_size": setup.batch,
        "train.precision": setup.precision,
        # The validation loss is measured once, after the last step.
        "train.eval_interval": steps,
        "train.eval_steps": 8,
        # Some encodings have no kernel unless a library is installed.
        "train.allow_slow_attention": "true",
        "checkpoint.interval": steps,
    }
    return [
        "--recipe=compare/language",
        f"--encodings={','.join(setup.variants)}",
        "--seeds=1",
        "--jobs=1",
        f"--output={folder / size.name.replace(', ', '-').replace(' ', '-')}",
        *(f"--{key}={value}" for key, value in settings.items()),
    ]


def measure(
    plan: ComparisonPlan, layout: ParallelLayout, seconds: float, failures: dict[str, str]
) -> dict[str, float]:
    """Return the seconds of a step by variant.

    Variants are left out once those before need more than `seconds`, or memory is too small. A
    variant that fails otherwise is added to `failures` with its error, and left out from then on.
    """
    times: dict[str, float] = {}
    for run in plan.runs:
        name = run.variant.label
        if name in failures:
            continue
        free_memory()  # of a model that could not be built
        try:
            times[name] = _step_seconds(run, layout)
        except torch.OutOfMemoryError:
            break
        except Exception as error:
            failures[name] = f"failed: {describe_error(error)}"
        if needed_seconds(times.values(), run.config.train.steps) > seconds:
            break
    return times


def needed_seconds(step_times: Iterable[float], steps: int) -> float:
    """Return the expected seconds of runs with these seconds per step."""
    return sum(RUN_SECONDS + SLOWDOWN * steps * seconds for seconds in step_times)


def _step_seconds(run: PlannedRun, layout: ParallelLayout) -> float:
    """Return the median seconds of a step of the run's model on random tokens."""
    config = run.config
    backend = verified_backend(config.model, layout, dtype_of(config), allow_slow=True)
    model = MeasuredModel(config, layout, backend)
    try:
        times = [model.step().seconds for _ in range(WARMUP_STEPS + TIMED_STEPS)]
    finally:
        model.release()
    return statistics.median(times[WARMUP_STEPS:])
