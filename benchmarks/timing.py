"""What the kernel benchmarks share: their options, their record, and how they measure time."""

import argparse
import statistics
import time
from collections.abc import Callable, Set

import torch

from benchmarks.apart import Tell
from benchmarks.environment import add_record_arguments, minutes, positive

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

ENOUGH_SECONDS = 2.0
"""Total time after which a candidate is not repeated, once it has run three times."""


def add_arguments(parser: argparse.ArgumentParser, on_gpu: bool, repetitions: int) -> None:
    """Add the options that the kernel benchmarks share."""
    parser.add_argument(
        "--tokens", type=positive, default=65536 if on_gpu else 2048, help="per batch (default here: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=DTYPES, default="bf16" if on_gpu else "fp32", help="default here: %(default)s"
    )
    parser.add_argument("--repetitions", type=positive, default=repetitions, help="maximum (default: %(default)s)")
    add_time_arguments(parser)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how long and how much to measure, and where to write the results."""
    parser.add_argument(
        "--minutes", type=minutes, default=8.0, help="begin nothing after this time (default: %(default)s)"
    )
    parser.add_argument("--toy", action="store_true", help="the smallest sizes, to see whether everything runs")
    add_record_arguments(parser)


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
    functions: dict[str, Callable[[], None]],
    repetitions: int,
    device: torch.device,
    tell: Tell = lambda name: None,
    interpreted: Set[str] = frozenset(),
) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the median seconds and the additional peak memory of each function; the functions' runs alternate.

    On a GPU one run consists of enough calls to take 20 ms, which hides the launch time. For a function that fails, for
    example because memory runs out, the second result holds the reason. Functions in `interpreted` run once, without a
    time. `tell` is given the name of the function that runs next.
    """
    on_gpu = device.type == "cuda"

    def once(name: str, calls: int) -> float:
        def repeat() -> None:
            for _ in range(calls):
                functions[name]()

        tell(name)
        return seconds(repeat, device) / calls

    memory: dict[str, int | None] = {}
    calls: dict[str, int] = {}
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for name in functions:
        try:
            once(name, 1)
            if name in interpreted:
                continue
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            first = once(name, 1)
        except Exception as error:
            failed[name] = reason(error)
            continue
        memory[name] = torch.cuda.max_memory_allocated() - before if on_gpu else None
        calls[name] = max(1, int(0.02 / first)) if on_gpu else 1
        times[name] = []
    for _ in range(repetitions):
        for name, taken in times.items():
            if name in failed or (len(taken) >= 3 and sum(taken) * calls[name] > ENOUGH_SECONDS):
                continue
            try:
                taken.append(once(name, calls[name]))
            except Exception as error:
                failed[name] = reason(error)
    timings = {
        name: {"seconds": statistics.median(values), "memory_bytes": memory[name], "repetitions": len(values)}
        for name, values in times.items()
        if name not in failed
    }
    return timings | {name: {"interpreted": True} for name in functions if name in interpreted - failed.keys()}, failed


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / timed({"matmul": lambda: a @ b}, 10, device)[0]["matmul"]["seconds"]
