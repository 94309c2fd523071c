"""The update of the position state: the fused kernel beside plain torch, and beside the memory traffic it cannot avoid.

    python -m benchmarks.position_update [--record]

The floor is what has to be read and written once, over the bandwidth that a plain copy reaches on this machine. Without
a GPU only plain torch is timed. No figure appears for a form that gives other numbers than float64.
"""

import argparse
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention import DTYPES, timed
from benchmarks.environment import record
from megatron_tape.ops.attention import unsupported
from megatron_tape.ops.position_update import fused_update, plain_update

SHAPES = {
    "12x64": (12, 12, 64, 48),
    "16x64": (16, 16, 64, 64),
    "32x128": (32, 32, 128, 128),
    "32/8x128": (8, 32, 128, 128),
}


def inputs(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draw z, u, the gate's input and the three matrices, far from TAPE's zero start."""
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


def run(update, tensors: list[Tensor], backward: bool) -> None:
    """Run forward, and backward from a gradient of ones."""
    with torch.set_grad_enabled(backward):
        out = update(*tensors)
    if backward:
        torch.autograd.grad(out, tensors, torch.ones_like(out))


def off(update, shape, dtype, device) -> str | None:
    """Return how outputs or gradients differ from float64's, if they do by more than twice plain torch's rounding."""
    tensors = inputs(65, shape, dtype, device)

    def all_of(function, kind):
        leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
        out = function(*leaves)
        direction = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(out)
        return [x.double() for x in (out, *torch.autograd.grad(out, leaves, direction))]

    exact, plain = all_of(plain_update, torch.float64), all_of(plain_update, dtype)
    for index, (ours, theirs, truth) in enumerate(zip(all_of(update, dtype), plain, exact, strict=True)):
        error, allowed = ((x - truth).norm() / truth.norm() for x in (ours, theirs))
        if not error <= 2 * allowed + 1e-5:
            return f"tensor {index} is off by {error:.1e}, plain torch by {allowed:.1e}"
    return None


def traffic(tensors: list[Tensor], backward: bool) -> int:
    """Count bytes: z, u and the gate read, the new state written; backward, their gradients, and these three again."""
    z, u, gate = (x.numel() * x.element_size() for x in tensors[:3])
    forward = z + u + gate + z
    return forward + (z + 2 * (z + u + gate) if backward else 0)


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes per second, read and written, of a large copy."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    seconds = timed({"copy": partial(target.copy_, source)}, 10, device)["copy"]["seconds"]
    return 2 * source.numel() * source.element_size() / seconds


def main() -> None:
    """Print a table; `--record` also writes benchmarks/results/position_update-*.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/position_update-*.json")
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[arguments.precision]
    bandwidth = copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s")
    results = []
    for name, shape in SHAPES.items():
        updates = {"torch": plain_update}
        if why := unsupported("triton", device, dtype, shape[2]):
            print(f"triton {why}", file=sys.stderr)
        elif why := off(fused_update, shape, dtype, device):
            print(f"triton gets no figure: {why}", file=sys.stderr)
        else:
            updates["triton"] = fused_update
        tensors = inputs(arguments.tokens, shape, dtype, device)
        for backward in (False, True):
            functions = {n: partial(run, u, tensors, backward) for n, u in updates.items()}
            floor = traffic(tensors, backward) / bandwidth
            for update, timing in timed(functions, arguments.repetitions, device).items():
                timing |= {"shape": name, "update": update, "backward": backward, "floor_seconds": floor}
                timing["of_floor"] = timing["seconds"] / floor
                results.append(timing)
                what = "forward+backward" if backward else "forward"
                milliseconds, times = timing["seconds"] * 1e3, timing["of_floor"]
                print(f"{name:9} {what:16} {update:7} {milliseconds:8.3f} ms, {times:.2f}x the floor")
    if arguments.record:
        record("position_update", {"arguments": vars(arguments), "bytes_per_second": bandwidth, "results": results})


if __name__ == "__main__":
    main()
