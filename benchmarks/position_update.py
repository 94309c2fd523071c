"""Time the update of the position state: the fused kernel, plain torch, and the memory traffic that is unavoidable.

    python -m benchmarks.position_update [--record]

The state is in fp32 and everything else in `--precision`, as in a model; a state in that precision, too, is measured
afterwards. The floor is the number of bytes that have to be read and written once, divided by the bandwidth of a plain
copy on this machine. A kernel whose results differ from float64 gets no figure. Repetitions alternate between the
implementations, and medians are reported. Without a GPU, TRITON_INTERPRET=1 lets the fused kernel take part, without a
time.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import (
    DTYPES,
    TimeLimit,
    add_arguments,
    device_here,
    reason,
    relate,
    run_all,
    timed,
    timed_both_ways,
)
from megatron_tape.ops.attention import unsupported
from megatron_tape.ops.parity import Shapes, inexact, kernel_checks
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update

SHAPES = {
    "12x64": Shapes(12, 12, 64, averages=True, inner=48),
    "32x128": Shapes(32, 32, 128, averages=True, inner=128),
    "16x128": Shapes(16, 16, 128, averages=True, inner=64),
    "32/8x128": Shapes(32, 8, 128, averages=True, inner=128),
    "16x64": Shapes(16, 16, 64, averages=True, inner=64),
}
"""The most important first."""

TOY = {"4/2x32": Shapes(4, 2, 32, averages=True, inner=16)}
"""What `--toy` measures."""


def inputs(tokens: int, shapes: Shapes, dtype: torch.dtype, state: torch.dtype) -> list[Tensor]:
    """Draw z, in the type `state`, u, the gate's input and the three matrices, which are far from their zero start."""
    H, G, D, P = shapes.heads, shapes.groups, shapes.head_dim, shapes.inner
    drawn = [(tokens, G, D), (tokens, H, D), (tokens, P), (G, H), (P, G), (G, P)]
    generator = torch.Generator(device_here()).manual_seed(0)
    return [
        (torch.randn(s, generator=generator, device=generator.device) * (s[-1] ** -0.5 if i > 2 else 1))
        .to(dtype if i else state)
        .requires_grad_()
        for i, s in enumerate(drawn)
    ]


def traffic(tensors: list[Tensor], backward: bool) -> int:
    """Count the bytes of reading z, u and the gate and writing the new state; backward, also those of the gradients."""
    z, u, gate = (x.nbytes for x in tensors[:3])
    forward = z + u + gate + z
    return forward + (z + 2 * (z + u + gate) if backward else 0)


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, reads plus writes, of a large copy."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    seconds = timed({"copy": partial(target.copy_, source)}, 10, device)[0]["copy"]["seconds"]
    return 2 * source.nbytes / seconds


def why_not_fused(shapes: Shapes, dtype: torch.dtype, state: torch.dtype) -> str | None:
    """Return why the fused kernel cannot run, or how its results differ from float64's; else None."""
    device = device_here()
    if why := unsupported("triton", device, dtype, shapes.head_dim):
        return why
    if not fits_fused(shapes.groups, shapes.heads, shapes.head_dim, shapes.inner, dtype):
        return "does not fit the shared memory"
    try:
        for tokens in (33, 48):  # Triton compiles kernels anew for multiples of 16
            if why := inexact(*kernel_checks(shapes, dtype, device, 1, tokens)["position update"], dtype):
                return f"{tokens} tokens: {why}"
    except Exception as error:  # a compiler may raise anything
        return reason(error)
    return None


def measure(shapes: Shapes, state: str, arguments: argparse.Namespace, _: TimeLimit) -> dict:
    """Time the implementations at one shape."""
    dtype, updates = DTYPES[arguments.precision], {"torch": plain_update, "triton": fused_update}
    why = why_not_fused(shapes, dtype, DTYPES[state])
    rejected = {"triton": why} if why else {}
    functions = {name: lambda *x, f=update: [f(*x)] for name, update in updates.items() if name not in rejected}
    tensors, bandwidth = inputs(arguments.tokens, shapes, dtype, DTYPES[state]), copy_bandwidth(device_here())
    found, failed = timed_both_ways(functions, tensors, arguments.repetitions)
    floors = {way: traffic(tensors, way == "forward+backward") / bandwidth for way in found}
    for direction, timings in found.items():
        relate(timings, floors[direction])
    against = {direction: f"a floor of {1e3 * floor:.3f} ms" for direction, floor in floors.items()}
    result = {"heads": shapes.heads, "groups": shapes.groups, "head_dim": shapes.head_dim, "inner": shapes.inner}
    result |= {"state": state, "bytes_per_second": bandwidth, "floor_seconds": floors, "against": against}
    return result | {"timed": found, "rejected": rejected | failed}


def main() -> None:
    """Print a table; `--record` or `--output` also writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, repetitions=20)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.tokens, arguments.repetitions = 64, 1
    combinations = {
        f"{name} with a state in {state}": (shapes, state)
        for state in dict.fromkeys(("fp32", arguments.precision))
        for name, shapes in (TOY if arguments.toy else SHAPES).items()
    }
    run_all("position_update", arguments, combinations, measure)


if __name__ == "__main__":
    main()
