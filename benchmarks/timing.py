"""What the benchmarks of kernels have in common: their options, their record, and how they take time."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.environment import RESULTS, Record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

ENOUGH_SECONDS = 2.0
"""After which a candidate that has run three times is not repeated."""


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above zero")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser, on_gpu: bool, repetitions: int) -> None:
    """Add what the benchmarks of kernels have in common."""
    parser.add_argument(
        "--tokens", type=positive, default=65536 if on_gpu else 2048, help="in a batch (here by default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=DTYPES, default="bf16" if on_gpu else "fp32", help="(here by default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=repetitions, help="at most (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write a JSON file, and add to it what gets done")
    parser.add_argument("--output", type=Path, help="record in this folder (default: benchmarks/results)")
    parser.add_argument("--commit", help="of this code, where git cannot tell")


def recorder(name: str, arguments: argparse.Namespace) -> Record | None:
    """Return the record to write, if one is asked for."""
    if not arguments.record and arguments.output is None:
        return None
    return Record(name, arguments.output or RESULTS, arguments.commit)


def reason(error: Exception) -> str:
    """Say an error in one line; raise it again if after it nothing on the GPU can be trusted."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def timed(
    functions: dict[str, Callable[[], None]], repetitions: int, device: torch.device
) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the median seconds of each function, and its peak memory above what was there, of alternating runs.

    On a GPU a run is as many calls as take 20 ms, so that launching is hidden. A function that fails, for want of
    memory for instance, has its reason among the second result instead.
    """
    on_gpu = device.type == "cuda"

    def once(function: Callable[[], None], calls: int) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / calls

    memory: dict[str, int | None] = {}
    calls: dict[str, int] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    for name, function in functions.items():
        try:
            once(function, 1)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            first = once(function, 1)
        except Exception as error:
            failed[name] = reason(error)
            continue
        memory[name] = torch.cuda.max_memory_allocated() - before if on_gpu else None
        calls[name] = max(1, int(0.02 / first)) if on_gpu else 1
        seconds[name] = []
    for _ in range(repetitions):
        for name, taken in seconds.items():
            if name in failed or (len(taken) >= 3 and sum(taken) * calls[name] > ENOUGH_SECONDS):
                continue
            try:
                taken.append(once(functions[name], calls[name]))
            except Exception as error:
                failed[name] = reason(error)
    return {
        name: {"seconds": statistics.median(values), "memory_bytes": memory[name], "repetitions": len(values)}
        for name, values in seconds.items()
        if name not in failed
    }, failed
