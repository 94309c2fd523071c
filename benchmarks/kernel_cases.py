"""Compile attention kernels and compare them with float64.

A case is one kernel at one shape and length. Each case runs in its own process, so that a kernel
that crashes, hangs or corrupts the GPU's context does not affect other cases.
"""

import faulthandler
import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from benchmarks.attention import Shape, candidates, naive_comparison
from benchmarks.timing import describe_error, device_here
from megatron_tape.ops.parity import (
    LENGTH,
    WINDOWED,
    Check,
    Shapes,
    deviations,
    kernel_checks,
    loss_check,
    swiglu_check,
)

SHAPES = ("12x64", "16x128", "32x128", "32/8x128")
"""Heads, or heads/groups, and head dimension of the recipes."""
LONG_CASE = ("2x128", 4096)
"""Shape and length of one long sequence. It has few heads, since scores in float64 need much
memory.
"""
LIBRARY_LENGTH = 320
"""A length that is 64 modulo 128, at which cuDNN's gradients of queries have been wrong (pytorch
#196678).
"""
TOY_SHAPES = ("1x32",)
TOY_LENGTH = 5
MAX_PROCESSES = 12
"""Maximum number of cases that run at the same time."""
CASE_SECONDS = 60.0
"""Time limit of a case."""
PRELOADED = [
    "benchmarks.kernel_cases",
    "torch.fx.experimental.symbolic_shapes",
    "megatron_tape.ops.kernels.triton_attention",
    "megatron_tape.ops.kernels.triton_position_update",
    "megatron_tape.ops.kernels.triton_swiglu",
]
"""Modules that are imported once, before processes are forked. Importing them does not initialize
CUDA.
"""


class Case(NamedTuple):
    """A check of `ops.parity.kernel_checks`, or a candidate of `benchmarks.attention`, at one shape
    and length.
    """

    shape: str
    name: str
    length: int

    def comparison(self) -> Check:
        """Return the functions to compare, and their inputs."""
        shape = Shape.parse(f"{self.shape}@{self.length}")
        kernels = _kernel_checks(shape, dtype_here())
        if self.name in kernels:
            return kernels[self.name]
        return naive_comparison(self.name, shape, dtype_here())


def dtype_here() -> torch.dtype:
    """Return the dtype of inputs: bf16 on a GPU, fp32 on a CPU, where kernels are interpreted."""
    if device_here().type == "cuda":
        return torch.bfloat16
    return torch.float32


def kernel_cases(toy: bool) -> list[Case]:
    """Return the cases of this project's Triton kernels, at toy size with `toy`."""
    if toy:
        return _cases_of_kernels(TOY_SHAPES, TOY_LENGTH)
    shape, length = LONG_CASE
    long_cases = [Case(shape, name, length) for name in ("attention", f"attention{WINDOWED}")]
    return [*_cases_of_kernels(SHAPES, LENGTH), *long_cases]


def _cases_of_kernels(shapes: Sequence[str], length: int) -> list[Case]:
    """Return the cases of all kernels at these shapes and this length, apart from windows, which
    have the kernels of packed documents.
    """
    # The names of the checks do not depend on the length, so 1 stands for any.
    return [
        Case(shape, name, length)
        for shape in shapes
        for name in _kernel_checks(Shape.parse(f"{shape}@1"), dtype_here())
        if WINDOWED not in name
    ]


def library_cases(toy: bool) -> list[Case]:
    """Return the cases of all other attention backends that can run on this machine."""
    shapes = TOY_SHAPES if toy else SHAPES
    length = TOY_LENGTH if toy else LIBRARY_LENGTH
    cases = []
    for shape in shapes:
        # Candidates do not depend on the length, so 1 stands for any. Those of triton are among
        # the cases that `kernel_cases` returns.
        names, _ = candidates(Shape.parse(f"{shape}@1").head_dim, dtype_here())
        cases += [Case(shape, name, length) for name in names if not name.endswith("triton")]
    return cases


def compile_case(case: Case) -> dict:
    """Run a kernel forward and backward, which compiles it. Return {}, since only a failure
    counts.
    """
    kernel = case.comparison()
    leaves = [x.detach().requires_grad_() for x in kernel.inputs]
    outputs = [x for x in kernel.ours(*leaves) if x is not None]
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    # A kernel's error is raised at the next synchronization.
    if device_here().type == "cuda":
        torch.cuda.synchronize()
    return {}


def check_case(case: Case) -> dict:
    """Compare outputs and gradients with float64.

    Return `worst`, the largest ratio of an error to its allowed error (None if an error is not
    finite), and `inexact`, up to three descriptions of errors above the allowed ones.
    """
    errors = list(deviations(*case.comparison(), dtype_here()))
    inexact = [str(deviation) for deviation in errors if not deviation.exact]
    worst = None
    if all(math.isfinite(deviation.error) for deviation in errors):
        worst = max(deviation.error / deviation.allowed for deviation in errors)
    return {"worst": worst, "inexact": inexact[:3]}


def run_cases(function: Callable[[Case], dict], cases: list[Case]) -> Iterator[dict]:
    """Call `function` for each case in its own process, up to MAX_PROCESSES at a time.

    Yield the result of each case when it arrives, with its `seconds`, or with an `error` and no
    seconds if the process died or took too long.
    """
    # A process that has used CUDA cannot be forked. Spawned processes would import everything anew.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def run(case: Case) -> dict:
        """Return the result of a case, which runs in a new process."""
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_and_send, args=(sender, function, case), daemon=True)
        process.start()
        # Now only the process holds the sending end, so `recv` raises EOFError when it dies.
        sender.close()
        result = {"error": f"took more than {CASE_SECONDS:.0f} s"}
        if receiver.poll(CASE_SECONDS):
            try:
                result = receiver.recv()
            except EOFError:
                process.join()
                result = {"error": f"the process died with exit status {process.exitcode}"}
        # A process that took too long still runs. For one that has ended, `kill` does nothing.
        process.kill()
        return case._asdict() | result

    with ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1)) as threads:
        for future in as_completed([threads.submit(run, case) for case in cases]):
            yield future.result()


def _run_and_send(sender: Connection, function: Callable[[Case], dict], case: Case) -> None:
    """Send the result of `function(case)`, or its error. This runs in the case's own process."""
    faulthandler.enable()
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        result = function(case)
    except Exception as error:  # a compiler may raise anything
        # After a fault of the GPU, `describe_error` raises it again, which ends this process.
        result = {"error": describe_error(error)}
    sender.send(result | {"seconds": round(time.monotonic() - started, 2)})


def _kernel_checks(shape: Shape, dtype: torch.dtype) -> dict[str, Check]:
    """Return the checks of this project's kernels at a shape, by the kernel's name."""
    device = device_here()
    mlp_width = 4 * shape.heads * shape.head_dim
    # `inner` is the default width of TAPE's position MLP, whose update is checked on few tokens.
    shapes = Shapes(
        shape.heads,
        shape.groups,
        shape.head_dim,
        averages=True,
        inner=4 * shape.heads,
        windowed=True,
    )
    checks = kernel_checks(shapes, dtype, device, shape.length, tokens=min(shape.length, 48))
    checks["swiglu"] = swiglu_check(mlp_width, dtype, device)
    if importlib.util.find_spec("liger_kernel"):
        # Here, this number is the size of the vocabulary.
        checks["loss"] = loss_check(mlp_width, dtype, device)
    return checks
