"""Options and timing functions that the benchmarks share."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from benchmarks.environment import add_record_arguments
from megatron_tape.errors import one_line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

ENOUGH_SECONDS = 2.0
"""Total time after which `timed` does not repeat a function that has run at least three times."""


def device_here() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --precision, --toy, --output and --commit to `parser`."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    parser.add_argument(
        "--precision", choices=DTYPES, default=precision, help="default here: %(default)s"
    )
    parser.add_argument(
        "--toy", action="store_true", help="use the smallest sizes, to test that everything runs"
    )
    add_record_arguments(parser)


def describe_error(error: Exception) -> str:
    """Return an error's class and message in one line. Raises AcceleratorError if the GPU's context
    is unusable after the error.
    """
    # Older versions of torch do not have the class; no error is an instance of ().
    fault = getattr(torch, "AcceleratorError", ())
    if not isinstance(error, fault) and torch.cuda.is_initialized():
        # Triton reports a fault of the GPU as an ordinary error. This synchronization then raises
        # torch's error.
        torch.cuda.synchronize()
    if isinstance(error, fault):
        raise error
    return f"{type(error).__name__}: {one_line(error)}"


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds, after waiting for the kernels that were launched on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_per_call(call: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Return the mean seconds of one of `count` calls, including their kernels on the GPU."""
    started = synchronized_time(device)
    for _ in range(count):
        call()
    return (synchronized_time(device) - started) / count


def median_ratio(ours: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of paired times, `ours` divided by `others`."""
    return statistics.median(a / b for a, b in zip(ours, others))


def timed(
    functions: dict[str, Callable[[], object]], repetitions: int, device: torch.device
) -> tuple[dict[str, dict], dict[str, str]]:
    """Time functions, alternating between them.

    Return two dictionaries by the function's name: `seconds` (the median) and `repetitions` of each
    timed function, and the error of each function that failed. On a GPU, one repetition calls a
    function for 20 ms, which hides the launch time. On a CPU, where kernels are interpreted,
    functions with names that end in triton run once and are not timed; they have `interpreted`
    instead.
    """
    on_gpu = device.type == "cuda"
    timings: dict[str, dict] = {}
    errors: dict[str, str] = {}
    # How often one repetition calls a function, for the functions that are timed.
    calls_per_time: dict[str, int] = {}
    for name, function in functions.items():
        try:
            # The first call compiles kernels, so it is not timed.
            seconds_per_call(function, device)
            if name.endswith("triton") and not on_gpu:
                timings[name] = {"interpreted": True}
                continue
            calls_per_time[name] = 1
            if on_gpu:
                calls_per_time[name] = max(1, int(0.02 / seconds_per_call(function, device)))
        except Exception as error:
            errors[name] = describe_error(error)

    times: dict[str, list[float]] = {name: [] for name in calls_per_time}
    for _ in range(repetitions):
        # A copy, since functions that fail are removed.
        for name, times_so_far in list(times.items()):
            if len(times_so_far) >= 3 and sum(times_so_far) * calls_per_time[name] > ENOUGH_SECONDS:
                continue
            try:
                times_so_far.append(seconds_per_call(functions[name], device, calls_per_time[name]))
            except Exception as error:
                errors[name] = describe_error(error)
                del times[name]

    for name, times_so_far in times.items():
        timings[name] = {
            "seconds": statistics.median(times_so_far),
            "repetitions": len(times_so_far),
        }
    return timings, errors


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the measured FLOP/s of a large matrix product."""
    # Large enough for the peak rate, and small enough to be quick.
    size = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    return 2 * size**3 / _median_seconds(lambda: a @ b, device)


def copy_bandwidth(device: torch.device) -> float:
    """Return the measured bytes per second, reads plus writes, of a large copy."""
    # Much larger than the caches.
    size = 2**28 if device.type == "cuda" else 2**25
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def _median_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call of `function`, in up to 10 repetitions (see `timed`)."""
    timings, _ = timed({"function": function}, repetitions=10, device=device)
    return timings["function"]["seconds"]
