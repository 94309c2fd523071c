"""Time the update of the position state: the fused kernel, plain torch, and the memory traffic that is unavoidable.

    python -m benchmarks.position_update [--record]

The state is in fp32 and everything else in `--precision`, as in a model; a state in that precision, too, is measured
afterwards. The floor is the number of bytes that have to be read and written once, divided by the bandwidth of a plain
copy on this machine. An implementation whose results differ from float64 gets no figure. Repetitions alternate between
the implementations, and medians are reported. On a GPU each shape is measured in a process of its own, so that a crash
costs only what crashed. Without a GPU, TRITON_INTERPRET=1 lets the fused kernel take part, without a time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.apart import Measurements, Tell
from benchmarks.environment import writer
from benchmarks.timing import DTYPES, add_arguments, reason, timed
from megatron_tape.ops.attention import unsupported
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update

SHAPES = {
    "12x64": (12, 12, 64, 48),
    "32x128": (32, 32, 128, 128),
    "16x128": (16, 16, 128, 64),
    "32/8x128": (8, 32, 128, 128),
    "16x64": (16, 16, 64, 64),
}
"""Groups, query heads, head dimension and width of the position MLP; the most important first."""

TOY = {"4/2x32": (2, 4, 32, 16)}
"""What `--toy` measures."""


def inputs(
    tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, state: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Draw z, in the type `state`, u, the gate's input and the three matrices, which are far from their zero start."""
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
        .to(dtype if i else state)
        .requires_grad_()
        for i, s in enumerate(shapes)
    ]


def run(update: Callable[..., Tensor], tensors: list[Tensor], slope: Tensor | None) -> None:
    """Run forward and, if the gradient `slope` of the result is given, backward from it."""
    with torch.set_grad_enabled(slope is not None):
        out = update(*tensors)
    if slope is not None:
        torch.autograd.grad(out, tensors, slope)


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


def check(name: str, update: Callable[..., Tensor], shape, dtype, state, device: torch.device) -> str | None:
    """Return how `update` is inexact, or None; the kernel is also checked with an odd number of tokens."""

    def whole(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        # A state in fp32 holds numbers that the narrower type of the other tensors cannot hold.
        widen = state != dtype
        return lambda z, *others: [function(z.float() * 1.0001 if widen and z.dtype == dtype else z, *others)]

    for tokens in (33, 48) if name == "triton" else (48,):
        try:
            why = inexact(whole(update), whole(plain_update), inputs(tokens, shape, dtype, dtype, device), dtype)
        except Exception as error:  # a compiler may raise anything
            why = reason(error)
        if why:
            return f"{tokens} tokens: {why}"
    return None


def updates_for(shape: tuple[int, int, int, int], dtype, device: torch.device) -> tuple[dict[str, Callable], dict]:
    """Return the implementations that can run, by name, and why others cannot."""
    updates, rejected = {"torch": plain_update}, {}
    if why := unsupported("triton", device, dtype, shape[2]):
        rejected["triton"] = why
    elif fits_fused(*shape, dtype):
        updates["triton"] = fused_update
    else:
        rejected["triton"] = "does not fit the shared memory"
    if device.type == "cuda":
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        updates["torch.compile"] = torch.compile(plain_update, dynamic=False)
    return updates, rejected


def measure(
    tell: Tell,
    deadline: float,
    faulty: dict[str, str],
    combination: tuple[str, str],
    arguments: argparse.Namespace,
    device: torch.device,
) -> None:
    """Time every implementation at one shape; `tell` is given the names of what runs, and then the results."""
    name, state = combination
    shape, dtype = (SHAPES | TOY)[name], DTYPES[arguments.precision]
    bandwidth = copy_bandwidth(device)
    updates, rejected = updates_for(shape, dtype, device)
    rejected |= faulty
    for update in list(updates):
        late = time.monotonic() > deadline
        if update not in faulty and not late:
            tell(update)
            if why := check(update, updates[update], shape, dtype, DTYPES[state], device):
                rejected[update] = why
        elif late:
            rejected.setdefault(update, "there was no time left")
        if update in rejected:
            del updates[update]
    tensors = inputs(arguments.tokens, shape, dtype, DTYPES[state], device)
    interpreted = {"triton"} if device.type != "cuda" else set()
    result: dict = {"shape": name, "state": state, "bytes_per_second": bandwidth, "rejected": rejected}
    for backward in (False, True):
        what = "forward+backward" if backward else "forward"
        slope = torch.randn_like(tensors[0]) if backward else None
        functions = {n: partial(run, u, tensors, slope) for n, u in updates.items()}
        floor = traffic(tensors, backward) / bandwidth
        timings, failed = timed(functions, arguments.repetitions, device, tell, interpreted)
        rejected |= {f"{update}, {what}": why for update, why in failed.items()}
        for timing in timings.values():
            if "seconds" in timing:
                timing["of_floor"] = timing["seconds"] / floor
        result[what] = {"floor_seconds": floor, "timings": timings}
        tell(result)


def show(_: str, result: dict) -> None:
    """Print the timings of one shape, and which implementations have no figures and why."""
    for what, measured in result.items():
        if not isinstance(measured, dict) or "timings" not in measured:
            continue
        for update, timing in measured["timings"].items():
            line = f"{result['shape']:9} {result['state']} state {what:16} {update:13} "
            if "seconds" in timing:
                print(f"{line}{timing['seconds'] * 1e3:8.3f} ms, {timing['of_floor']:.2f}x the floor")
            else:
                print(f"{line}interpreted here: exact, not timed")
    for update, why in result.get("rejected", {}).items():
        print(f"{result.get('shape', '')} {update} has no figure: {why}")
    sys.stdout.flush()


def main() -> None:
    """Print a table; `--record` or `--output` also writes it to a file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, device.type == "cuda", repetitions=20)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.tokens, arguments.repetitions = 64, 1
    record = writer("position_update", arguments)

    def write(results: list[dict]) -> None:
        record({"precision": arguments.precision, "tokens": arguments.tokens, "results": results})

    states = dict.fromkeys(("fp32", arguments.precision))
    shapes = TOY if arguments.toy else SHAPES
    combinations = {f"{name} with a state in {state}": (name, state) for state in states for name in shapes}
    measurements = Measurements(arguments.minutes, apart=device.type == "cuda")
    measurements.run_all(measure, combinations, arguments, device, write=write, show=show)


if __name__ == "__main__":
    main()
