"""Time the update of the position state: the fused kernel, plain torch, and the memory traffic that is unavoidable.

    python -m benchmarks.position_update [--record]

The floor is the number of bytes that have to be read and written once, divided by the bandwidth of a plain copy on this
machine. Without a GPU only plain torch is timed. An implementation whose results differ from float64 gets no figure.
Repetitions alternate between the implementations, and medians are reported.
"""

import argparse
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import DTYPES, add_arguments, reason, recorder, timed
from megatron_tape.ops.attention import unsupported
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update

SHAPES = {
    "12x64": (12, 12, 64, 48),
    "16x64": (16, 16, 64, 64),
    "32x128": (32, 32, 128, 128),
    "32/8x128": (8, 32, 128, 128),
}


def inputs(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draw z, u, the gate's input and the three matrices, which are far from their zero start."""
    groups, heads, dim, inner = shape
    shapes = [
        (tokens, groups, dim),
        (tokens, heads, dim),
        (tokens, inner),
        (groups, heads),
        (inner, groups),
        (groups, inner),
    ]
    generator = torch.Generator(device).manual_seed(0)
    return [
        (torch.randn(s, generator=generator, device=device) * (s[-1] ** -0.5 if i > 2 else 1))
        .to(dtype)
        .requires_grad_()
        for i, s in enumerate(shapes)
    ]


def run(update, tensors: list[Tensor], direction: Tensor | None) -> None:
    """Run forward and, if the gradient `direction` is given, backward from it."""
    with torch.set_grad_enabled(direction is not None):
        out = update(*tensors)
    if direction is not None:
        torch.autograd.grad(out, tensors, direction)


def traffic(tensors: list[Tensor], backward: bool) -> int:
    """Count the bytes of reading z, u and the gate and writing the new state; backward, also those of the gradients."""
    z, u, gate = (x.numel() * x.element_size() for x in tensors[:3])
    forward = z + u + gate + z
    return forward + (z + 2 * (z + u + gate) if backward else 0)


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, reads plus writes, of a large copy."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    seconds = timed({"copy": partial(target.copy_, source)}, 10, device)[0]["copy"]["seconds"]
    return 2 * source.numel() * source.element_size() / seconds


def check(update, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return how `update` is inexact, or None; an odd number of tokens is checked, too."""
    for tokens in (65, 80):
        tensors = inputs(tokens, shape, dtype, device)
        try:
            why = inexact(lambda *x: [update(*x)], lambda *x: [plain_update(*x)], tensors, dtype)
        except Exception as error:  # a compiler may raise anything
            why = reason(error)
        if why:
            return why
    return None


def main() -> None:
    """Print a table; `--record` also writes benchmarks/results/position_update-*.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, device.type == "cuda", repetitions=20)
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.precision]
    bandwidth = copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s")
    record = recorder("position_update", arguments)
    results: list[dict] = []
    for name, shape in SHAPES.items():
        updates, rejected = {"torch": plain_update}, {}
        if device.type == "cuda":
            torch._dynamo.reset()
            updates["torch.compile"] = torch.compile(plain_update, dynamic=False)
        if why := unsupported("triton", device, dtype, shape[2]):
            rejected["triton"] = why
        elif device.type != "cuda":
            rejected["triton"] = "is interpreted here, which says nothing of its speed"
        elif fits_fused(*shape, dtype):
            updates["triton"] = fused_update
        else:
            rejected["triton"] = "does not fit the shared memory"
        for update in list(updates):
            if why := check(updates[update], shape, dtype, device):
                rejected[update] = why
                del updates[update]
        tensors = inputs(arguments.tokens, shape, dtype, device)
        result: dict = {"shape": name}
        for backward in (False, True):
            what = "forward+backward" if backward else "forward"
            direction = torch.ones_like(tensors[0]) if backward else None
            functions = {n: partial(run, u, tensors, direction) for n, u in updates.items()}
            floor = traffic(tensors, backward) / bandwidth
            timings, failed = timed(functions, arguments.repetitions, device)
            rejected |= {f"{update}, {what}": why for update, why in failed.items()}
            for update, timing in timings.items():
                timing["of_floor"] = timing["seconds"] / floor
                print(
                    f"{name:9} {what:16} {update:13} {timing['seconds'] * 1e3:8.3f} ms, "
                    f"{timing['of_floor']:.2f}x the floor"
                )
            result[what] = {"floor_seconds": floor, "timings": timings}
        for update, why in rejected.items():
            print(f"{name:9} {update} has no figure: {why}")
        sys.stdout.flush()
        results.append(result | {"rejected": rejected})
        if record:
            settings = {"precision": arguments.precision, "tokens": arguments.tokens, "bytes_per_second": bandwidth}
            record.write(settings | {"results": results})


if __name__ == "__main__":
    main()
