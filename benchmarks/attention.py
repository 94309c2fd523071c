"""Time every implementation of attention with TAPE, compared with RoPE's fastest attention on this machine.

    python -m benchmarks.attention [--shapes 12x64 32/8x128] [--lengths 1024 4096] [--only triton sdpa] [--record]

If a candidate cannot run here, the reason is printed; if its results differ from float64, no time is reported for it.
Repetitions alternate between the candidates, and medians are reported. Both TAPE and RoPE rotate queries and keys;
TAPE also averages its state, and computes its gradient. `of_rope` is the time, forward and backward, of the fastest of
TAPE's candidates that a model can run (`model.attention_backend`) over that of RoPE's fastest candidate of any kind. On
a GPU, those that are not backends of a model use a rotation that torch.compile has fused. `layers` are whole attention
layers, including projections; `layers with update` also rewrite the position state if the candidate is TAPE's.

On a GPU each combination of shape and length is measured in a process of its own: a candidate that crashes or hangs is
left out when the combination is measured again. Only torch is required; `flash_attn` and `triton` are candidates if
they are installed. Without a GPU, TRITON_INTERPRET=1 lets triton's candidates take part, without a time.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.apart import Measurements, Tell
from benchmarks.attention_candidates import (
    BACKENDS,
    Candidate,
    Factory,
    candidates,
    inputs,
    layer,
    rope,
    shape_of,
    with_backend,
    with_phases,
)
from benchmarks.environment import positive, writer
from benchmarks.timing import DTYPES, add_arguments, matmul_peak, reason, timed
from megatron_tape.ops.parity import inexact

ON_GPU = ("12x64@1024", "32x128@8192", "16x128@4096", "32/8x128@8192", "12x64@8192", "32x128@4096", "16x64@4096")
"""What is measured on a GPU by default, the most important first."""

LONGEST_LAYER = 4096
"""Whole layers are not timed for longer sequences, where projections hardly matter."""

Combination = tuple[str, int]
"""A shape such as 32/8x128, and a length."""


def runner(candidate: Candidate, tensors: list[Tensor], backward: bool, slopes: dict) -> Callable[[], None]:
    """Return a function that runs `candidate` forward, and backward from random gradients.

    The first run draws these gradients and keeps them in `slopes` for all candidates.
    """
    wanted = [*tensors, *getattr(candidate, "weights", [])]

    def like(x: Tensor) -> Tensor:
        kind = (x.shape, x.stride(), x.dtype)
        if kind not in slopes:
            slopes[kind] = torch.randn_like(x)
        return slopes[kind]

    def once() -> None:
        with torch.set_grad_enabled(backward):
            outputs = [x for x in candidate(*tensors) if x is not None]
        if backward:
            torch.autograd.grad(outputs, wanted, [like(x) for x in outputs], allow_unused=True)

    return once


def check_parity(name: str, make: Factory, heads: int, groups: int, dim: int, dtype, device, length: int) -> str | None:
    """Return how outputs or gradients differ from float64's, if the error is more than twice that of plain torch.

    Our kernels are also checked at an odd length: Triton compiles them anew for the multiples of 16 that are timed.
    """
    odd = {min((length - 1) | 1, 257)} if name.endswith("triton") else set()
    for checked in sorted({*odd, min(length, 1024)}):
        naive = with_backend("naive")
        if name.startswith("rope"):
            naive = with_phases("naive", rope(checked, dim, dtype, device))
        try:
            why = inexact(make(checked), naive, inputs(checked, 1, heads, groups, dim, dtype, device), dtype)
        except Exception as error:  # a compiler may raise anything
            why = reason(error)
        if why:
            return f"{checked} tokens: {why}"
    return None


def exact_candidates(
    tell: Tell, deadline: float, faulty: dict, shape: tuple[int, int, int], length: int, arguments, device
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates to be timed, and why others are not; `faulty` ones are not even tried."""
    (heads, groups, dim), dtype = shape, DTYPES[arguments.precision]
    factories, rejected = candidates(dim, dtype, device)
    rejected |= faulty
    if arguments.only:
        wanted = {f"tape {name}" for name in arguments.only}
        factories = {name: make for name, make in factories.items() if name.startswith("rope") or name in wanted}
    found: dict[str, Candidate] = {}
    for name, make in factories.items():
        if name in faulty:
            continue
        if time.monotonic() > deadline:
            rejected[name] = "there was no time left"
            continue
        tell(name)
        if why := check_parity(name, make, heads, groups, dim, dtype, device, length):
            rejected[name] = why
            continue
        try:
            found[name] = make(length)
        except Exception as error:  # a compiler may raise anything
            rejected[name] = reason(error)
    return found, rejected


def measure(
    tell: Tell,
    deadline: float,
    faulty: dict[str, str],
    combination: Combination,
    arguments: argparse.Namespace,
    device: torch.device,
) -> None:
    """Time every candidate at one shape and length, forward and forward with backward, alone and in its layer.

    `tell` is given the name of each candidate before it runs, and the results whenever there are more. After `deadline`
    (`time.monotonic`) no further candidate is tried, and no layers are timed.
    """
    (heads, groups, dim), length, dtype = shape_of(combination[0]), combination[1], DTYPES[arguments.precision]
    batch = max(1, arguments.tokens // length)
    result: dict = {"heads": heads, "groups": groups, "head_dim": dim, "length": length, "batch": batch}
    result["matmul_flops"] = matmul_peak(dtype, device)
    found, rejected = exact_candidates(tell, deadline, faulty, (heads, groups, dim), length, arguments, device)
    result["rejected"] = rejected
    interpreted = {name for name in found if name.endswith("triton") and device.type != "cuda"}
    tensors = inputs(length, batch, heads, groups, dim, dtype, device)
    kinds: dict[str, dict[str, Candidate]] = {"attention": found}
    if length <= LONGEST_LAYER:
        for what, update in (("layers", False), ("layers with update", True)):
            kinds[what] = {n: layer(n, f, heads, groups, dim, dtype, device, update) for n, f in found.items()}
    for what, functions in kinds.items():
        if what == "layers":
            tensors[3] = tensors[3].detach().float().requires_grad_()
        for backward in (False, True):
            direction = f"{what} {'forward+backward' if backward else 'forward'}"
            if what != "attention" and time.monotonic() > deadline:
                rejected[direction] = "there was no time left"
                continue
            slopes: dict = {}
            runs = {name: runner(f, tensors, backward, slopes) for name, f in functions.items()}
            timings, failed = timed(runs, arguments.repetitions, device, tell, interpreted)
            rejected |= {f"{name}, {direction}": why for name, why in failed.items()}
            against = fastest(timings, "rope")
            if against is None:
                rejected[direction] = "RoPE itself could not be timed, so there are no ratios"
            result[direction] = {"against": against, "timings": timings}
            relate(result, direction)
            tell(result)


def fastest(timings: dict[str, dict], encoding: str, names: tuple[str, ...] | None = None) -> str | None:
    """Return the fastest candidate of an encoding (among `names`, if given), or None if none was timed."""
    timed_ones = [
        name
        for name, timing in timings.items()
        if "seconds" in timing and name.startswith(encoding) and (names is None or name.split(" ", 1)[1] in names)
    ]
    return min(timed_ones, key=lambda name: timings[name]["seconds"], default=None)


def relate(result: dict, direction: str) -> None:
    """Add to the timings what they are compared with RoPE's fastest and with a matrix product, and `of_rope`."""
    against, timings = result[direction]["against"], result[direction]["timings"]
    backward = direction.endswith("backward")
    for name, timing in timings.items():
        if "seconds" not in timing:
            continue
        if against is not None:
            timing["ratio"] = timing["seconds"] / timings[against]["seconds"]
            if timing["memory_bytes"]:
                timing["memory_ratio"] = timing["memory_bytes"] / max(1, timings[against]["memory_bytes"])
        if direction.startswith("attention"):
            length, values = result["length"], 2 if name.startswith("tape") else 1
            pairs = result["batch"] * result["heads"] * result["head_dim"] * length * (length + 1) // 2
            # Forward: scores and each value. Backward: scores again, their gradient twice, each value twice.
            flops = 2 * pairs * (1 + values + (backward and 3 + 2 * values))
            timing["tflops"] = flops / timing["seconds"] / 1e12
            timing["of_matmul_peak"] = flops / timing["seconds"] / result["matmul_flops"]
    ours = fastest(timings, "tape", BACKENDS)
    if direction == "attention forward+backward" and against is not None and ours is not None:
        result["of_rope"] = {"ratio": timings[ours]["ratio"], "tape": ours, "rope": against}


def show(name: str, result: dict) -> None:
    """Print the table of one combination, and which candidates have no figures and why."""
    for what, measured in result.items():
        if not isinstance(measured, dict) or "timings" not in measured:
            continue
        against = f", against {measured['against']}" if measured["against"] else ""
        print(f"\n{name} tokens, batch {result['batch']}, {what}{against}")
        for name, timing in sorted(measured["timings"].items(), key=lambda item: item[1].get("seconds", 0)):
            if "seconds" not in timing:
                print(f"  {name:24} interpreted here: exact, not timed")
                continue
            line = f"  {name:24} {timing['seconds'] * 1e3:9.2f} ms"
            if "ratio" in timing:
                line += f" {timing['ratio']:6.2f}x"
            if "tflops" in timing:
                line += f" {timing['tflops']:7.1f} TFLOP/s, {timing['of_matmul_peak']:4.0%} of matmul"
            if "memory_ratio" in timing:
                line += f", memory {timing['memory_ratio']:.2f}x"
            print(line)
    for name, why in result.get("rejected", {}).items():
        print(f"  {name} has no figure: {why}")
    if of_rope := result.get("of_rope"):
        print(f"  forward+backward: {of_rope['tape']} takes {of_rope['ratio']:.2f} times as long as {of_rope['rope']}")
    sys.stdout.flush()


def checked_shape(text: str) -> str:
    """Check a shape such as `12x64` or `32/8x128`: heads, groups if there are fewer, and head dimension."""
    try:
        heads, groups, dim = shape_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a shape such as 12x64 or 32/8x128") from None
    if min(heads, groups, dim) < 1 or heads % groups or dim % 2:
        raise argparse.ArgumentTypeError(f"{text}: groups must divide heads, and the dimension must be even")
    return text


def combinations_of(arguments: argparse.Namespace, on_gpu: bool) -> list[Combination]:
    """Return what to measure: the chosen shapes at the chosen lengths, or this machine's default; shortest first."""
    if arguments.toy:
        return [("2/1x32", 64)]
    if on_gpu and not arguments.shapes and not arguments.lengths:
        return [(shape, int(length)) for shape, length in (text.split("@") for text in ON_GPU)]
    shapes, lengths = arguments.shapes or ["12x64"], arguments.lengths or [1024]
    return [(shape, length) for length in sorted(lengths) for shape in shapes]


def main() -> None:
    """Print tables; `--record` or `--output` also writes them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=checked_shape, metavar="H[/G]xD",
        help="query heads, groups if there are fewer, and head dimension (default: 12x64)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=positive, metavar="N",
        help="tokens per sequence; if above --tokens, the batch is one sequence (default: 1024; on a GPU, with neither "
        f"--shapes nor --lengths: {' '.join(ON_GPU)})",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="TAPE candidates, such as triton (default: all)")
    add_arguments(parser, on_gpu, repetitions=10)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.tokens, arguments.repetitions = 64, 1
    if arguments.only:
        names = candidates(64, DTYPES[arguments.precision], device)[0]
        known = {name.removeprefix("tape ") for name in names if name.startswith("tape")}
        if unknown := set(arguments.only) - known:
            names = ", ".join(sorted(known))
            parser.error(f"--only {' '.join(sorted(unknown))}: not among the candidates here, {names}")
    record = writer("attention", arguments)

    def write(results: list[dict]) -> None:
        record({"precision": arguments.precision, "results": results})

    combinations = {f"{shape} at {length}": (shape, length) for shape, length in combinations_of(arguments, on_gpu)}
    measurements = Measurements(arguments.minutes, apart=on_gpu)
    measurements.run_all(measure, combinations, arguments, device, write=write, show=show)


if __name__ == "__main__":
    main()
