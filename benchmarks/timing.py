"""What benchmarks share: their options, their limit of time, and how they measure the time of functions in turns."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import Record, add_record_arguments, minutes, positive

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

ENOUGH_SECONDS = 2.0
"""Total time after which a candidate is not repeated, once it has run three times."""


def device_here() -> torch.device:
    """Return the first GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add_arguments(parser: argparse.ArgumentParser, repetitions: int) -> None:
    """Add the options that the kernel benchmarks share."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--tokens", type=positive, default=65536 if on_gpu else 2048, help="per batch (default here: %(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=repetitions, help="maximum (default: %(default)s)")
    add_time_arguments(parser)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say in which precision, how long and how much to measure, and where to write the results."""
    parser.add_argument(
        "--precision", choices=DTYPES, default="bf16" if torch.cuda.is_available() else "fp32",
        help="default here: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=minutes, default=8.0, help="begin nothing after this time (default: %(default)s)"
    )
    parser.add_argument("--toy", action="store_true", help="the smallest sizes, to see whether everything runs")
    add_record_arguments(parser)


class TimeLimit:
    """The minutes that a benchmark has."""

    def __init__(self, minutes: float):
        self._started = time.monotonic()
        self._deadline = self._started + 60 * minutes

    def over(self, needed: float = 0.0) -> bool:
        """Return whether nothing that takes `needed` seconds should begin."""
        return time.monotonic() + needed > self._deadline

    def say(self, line: str) -> None:
        """Report progress, with the time that has passed and the time that is left."""
        now = time.monotonic()
        left = max(0.0, self._deadline - now) / 60
        print(f"{now - self._started:6.1f} s, {left:.1f} min left: {line}", file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Describe an error in one line; raise it again if nothing on the GPU can be trusted after it."""
    fault = getattr(torch, "AcceleratorError", ())
    if not isinstance(error, fault) and torch.cuda.is_initialized():
        # Triton reports a fault as an ordinary error; torch raises at the next synchronization.
        torch.cuda.synchronize()
    if isinstance(error, fault):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long `call` takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def timed(
    functions: dict[str, Callable[[], object]], repetitions: int, device: torch.device
) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the median seconds and the additional peak memory of each function; the functions' runs alternate.

    On a GPU one run consists of enough calls to take 20 ms, which hides the launch time. For a function that fails, for
    example because memory runs out, the second result holds the reason. On a CPU, where kernels are interpreted, a
    function whose name ends in triton runs once, without a time.
    """
    on_gpu = device.type == "cuda"

    def once(name: str, calls: int) -> float:
        def repeat() -> None:
            for _ in range(calls):
                functions[name]()

        return seconds(repeat, device) / calls

    found: dict[str, dict] = {}
    calls: dict[str, int] = {}
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name in functions:
        try:
            once(name, 1)
            if name.endswith("triton") and not on_gpu:
                found[name] = {"interpreted": True}
                continue
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            calls[name] = max(1, int(0.02 / once(name, 1))) if on_gpu else 1
        except Exception as error:
            failed[name] = reason(error)
            continue
        found[name] = {"memory_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None}
        times[name] = []
    for _ in range(repetitions):
        for name, taken in times.items():
            if name in failed or (len(taken) >= 3 and sum(taken) * calls[name] > ENOUGH_SECONDS):
                continue
            try:
                taken.append(once(name, calls[name]))
            except Exception as error:
                failed[name] = reason(error)
    for name, taken in times.items():
        if name in failed:
            del found[name]
        else:
            found[name] |= {"seconds": statistics.median(taken), "repetitions": len(taken)}
    return found, failed


def timed_both_ways(
    functions: dict[str, Callable[..., Sequence[Tensor | None]]], tensors: list[Tensor], repetitions: int
) -> tuple[dict[str, dict[str, dict]], dict[str, str]]:
    """Return what `timed` does of functions of `tensors`, forward alone and with their backward pass."""
    found, failed, slopes = {}, {}, {}

    def run(function: Callable[..., Sequence[Tensor | None]], backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            outputs = [x for x in function(*tensors) if x is not None]
        if backward:
            torch.autograd.grad(outputs, tensors, [slope(x) for x in outputs], allow_unused=True)

    def slope(x: Tensor) -> Tensor:
        # Random, as matrix products are faster where bits do not change, and drawn once for all functions.
        kind = (x.shape, x.stride(), x.dtype)
        if kind not in slopes:
            slopes[kind] = torch.randn_like(x)
        return slopes[kind]

    for direction, backward in (("forward", False), ("forward+backward", True)):
        runs = {name: lambda f=function, b=backward: run(f, b) for name, function in functions.items()}
        found[direction], why = timed(runs, repetitions, tensors[0].device)
        failed |= {f"{name}, {direction}": reason for name, reason in why.items()}
    return found, failed


def run_all(program: str, arguments: argparse.Namespace, combinations: dict[str, tuple], measure: Callable) -> None:
    """Call `measure(*combination, arguments, limit)` of each for which there is time; write and print the results.

    A result holds `timed` functions by direction, against what their `ratio` is, and why functions were `rejected`.
    """
    record, limit, results = Record(program, arguments), TimeLimit(arguments.minutes), []
    for number, (name, combination) in enumerate(combinations.items()):
        if limit.over():
            limit.say(f"no time for {', '.join(list(combinations)[number:])}; --minutes gives more")
            break
        limit.say(f"{number + 1} of {len(combinations)}: {name}")
        results.append(measure(*combination, arguments, limit))
        record.write({"results": results})
        _show(name, results[-1])


def _show(name: str, result: dict[str, Any]) -> None:
    for direction, timings in result["timed"].items():
        print(f"\n{name}, {direction}, against {result['against'][direction]}")
        for function, timing in sorted(timings.items(), key=lambda item: item[1].get("seconds", 0)):
            if "seconds" in timing:
                ratio = f" {timing['ratio']:6.2f}x" if "ratio" in timing else ""
                print(f"  {function:24} {timing['seconds'] * 1e3:9.3f} ms{ratio}")
            else:
                print(f"  {function:24} interpreted here: exact, not timed")
    for function, why in result["rejected"].items():
        print(f"  {function} has no figure: {why}")
    sys.stdout.flush()


def relate(timings: dict[str, dict], base: float) -> None:
    """Add the ratio of the seconds of each function and `base`."""
    for timing in timings.values():
        if "seconds" in timing:
            timing["ratio"] = timing["seconds"] / base


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / timed({"matmul": lambda: a @ b}, 10, device)[0]["matmul"]["seconds"]
