"""What `benchmarks.check_gpu` runs and what it should find, as data. Imports no torch."""

from dataclasses import dataclass
from typing import Any

TARGETS = ("H100", "H200")
"""GPUs that the goals for speed were set for."""


@dataclass(frozen=True)
class Slice:
    """A program `python -m ...`: pytest or a benchmark, on a GPU and at toy size on a CPU."""

    name: str
    purpose: str
    command: tuple[str, ...]
    toy: tuple[str, ...] | None = None
    """The command at toy size, if it is another."""
    packages: tuple[str, ...] = ()
    """What it imports besides torch, as pip names it."""
    every_gpu: bool = False
    """Whether torchrun starts one process for each GPU; such a slice needs at least two."""
    minutes: float = 4.0
    """What it should be given at least, unless it comes first; the programs that use up their time need more."""
    traces: bool = False
    """Whether it takes `--profile`."""

    @property
    def is_pytest(self) -> bool:
        """Whether its results are JUnit's."""
        return self.command[0] == "pytest"


PYTEST = ("pytest", "-o", "addopts=", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu")
# A kernel that hangs or crashes ends its worker, which xdist replaces (under --dist=load alone: with loadgroup and
# loadscope, xdist 3.8 then hangs or repeats the crash); only a thread can end a call that hangs.
PYTEST += ("--timeout=150", "--timeout-method=thread", "--dist=load", "--max-worker-restart=40")
PYTEST += ("--continue-on-collection-errors",)
TESTING = ("pytest", "pytest-timeout", "pytest-xdist")
STACK = ("megatron-core", "deepspeed")


def _step(name: str, purpose: str, shape: str, every_gpu: bool = False) -> Slice:
    program = ("benchmarks.train_step", "--shape")
    return Slice(name, purpose, (*program, shape), (*program, "toy"), STACK, every_gpu, traces=True)


SLICES = (
    Slice(
        "kernels",
        "every fused kernel compiles and agrees with plain torch and float64",
        (*PYTEST, "-n", "auto", "tests/gpu/test_kernels.py", "tests/ops/test_triton.py", "tests/ops/test_memory.py"),
        (*PYTEST, "-n", "2", "tests/gpu/test_kernels.py"),
        TESTING,
        minutes=7.5,
    ),
    Slice(
        "training",
        "20 steps of TAPE and RoPE: losses, gradient norms and gradients against the CPU's",
        (*PYTEST, "-n", "1", "tests/gpu/test_training_on_gpu.py"),
        packages=(*TESTING, *STACK),
        minutes=8.5,
    ),
    _step("step-155m-1k", "a training step of the 155M model at 1,024 tokens, TAPE beside RoPE", "155m-1k"),
    Slice(
        "attention",
        "attention: ours, FlexAttention, cuDNN, flash-attn, beside the fastest RoPE",
        ("benchmarks.attention",),
        ("benchmarks.attention", "--toy"),
        minutes=8.75,
    ),
    Slice(
        "position-update",
        "the update of the position state beside the bandwidth of the memory",
        ("benchmarks.position_update",),
        ("benchmarks.position_update", "--toy"),
    ),
    _step("step-1.3b-4k", "a training step of a 1.3B model at 4,096 tokens", "1.3b-4k"),
    _step("step-7b-8k", "a training step of layers shaped like a 7B model's at 8,192 tokens", "7b-8k"),
    Slice(
        "decoding",
        "generation with a cache, TAPE beside a plain Llama",
        ("benchmarks.generate",),
        ("benchmarks.generate", "--toy"),
        ("transformers",),
    ),
    _step("all-gpus", "a training step of the 1.3B model on all GPUs at once", "1.3b-4k", every_gpu=True),
)


@dataclass(frozen=True)
class Goal:
    """A number in a slice's results, and the limit that it should keep; without a number, that all tests pass."""

    slice: str
    aim: str
    place: tuple[str, ...] = ()
    """Where the number stands in the record; a list on the way stands for the largest of its numbers."""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def of_speed(self) -> bool:
        """Whether it says something about a kind of GPU."""
        return bool(self.place)

    def met(self, value: float) -> bool:
        """Return whether a value keeps the limits."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


GOALS = (
    Goal("kernels", "every fused kernel compiles and is exact"),
    Goal("training", "20 steps of TAPE and RoPE agree with the CPU's"),
    Goal("step-155m-1k", "TAPE's step takes at most 1.10 times RoPE's", ("ratio_time",), at_most=1.10),
    Goal("step-7b-8k", "TAPE's step takes at most 1.15 times RoPE's", ("ratio_time",), at_most=1.15),
    Goal("step-1.3b-4k", "MFU of RoPE is at least 45 %", ("models", "rope", "mfu"), at_least=0.45),
    Goal("step-1.3b-4k", "MFU of TAPE is at least 40 %", ("models", "tape", "mfu"), at_least=0.40),
    Goal(
        "attention",
        "forward and backward take at most 1.5 times the fastest RoPE, in every shape",
        ("results", "of_rope", "ratio"),
        at_most=1.5,
    ),
)


def numbers(record: Any, place: tuple[str, ...]) -> list[float | None]:
    """Return what a record holds at a place: one number, or as many as a list on the way has; None where one lacks."""
    if isinstance(record, list):
        return [number for each in record for number in numbers(each, place)]
    if place:
        return numbers(record.get(place[0]), place[1:]) if isinstance(record, dict) else [None]
    return [float(record) if isinstance(record, (int, float)) else None]
