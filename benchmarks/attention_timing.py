"""Measure attention at one shape and length: check every candidate against float64, then time those that are exact."""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.apart import Tell
from benchmarks.attention_candidates import BACKENDS, Candidate, Factory, candidates, rope, with_backend, with_phases
from benchmarks.timing import DTYPES, reason, timed
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update

LONGEST_LAYER = 4096
"""Whole layers are not timed for longer sequences, where projections hardly matter."""

Combination = tuple[str, int]
"""A shape such as 32/8x128, and a length."""


def shape_of(text: str) -> tuple[int, int, int]:
    """Return heads, groups and head dimension."""
    heads, dim = text.split("x")
    heads, _, groups = heads.partition("/")
    return int(heads), int(groups or heads), int(dim)


def inputs(length: int, batch: int, heads: int, groups: int, dim: int, dtype: torch.dtype, device: torch.device):
    """Draw q, k, v and z; z is RoPE's phases with small changes."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups, groups)]
    q, k, v, z = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    z.mul_(0.1).add_(rope(length, dim, dtype, device))
    return [x.requires_grad_() for x in (q, k, v, z)]


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


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / timed({"matmul": lambda: a @ b}, 10, device)[0]["matmul"]["seconds"]


def layer(name: str, candidate: Candidate, heads: int, groups: int, dim: int, dtype, device, update: bool) -> Candidate:
    """Return an attention layer around `candidate` with its projections and, if `update`, the update of z.

    As in a model, z accumulates in float32, and attention reads it rounded.
    """
    width, inner = heads * dim, 4 * heads

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5).requires_grad_()

    qkv, proj = matrix((heads + 2 * groups) * dim, width), matrix(width, width)
    gate, matrices = matrix(inner, width), [matrix(groups, heads), matrix(inner, groups), matrix(groups, inner)]
    fused = name == "tape triton" and fits_fused(groups, heads, dim, inner, dtype)

    def whole(hidden: Tensor, _k: Tensor, _v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = F.linear(hidden.flatten(2), qkv).unflatten(2, (-1, dim)).split([heads, groups, groups], dim=2)
        o, u = candidate(q, k, v, z.to(hidden.dtype))
        out = F.linear(o.flatten(2), proj)
        if u is not None and update:
            states = z.flatten(0, 1), u.reshape(-1, heads, dim), F.linear(out, gate).flatten(0, 1)
            u = (fused_update if fused else plain_update)(*states, *matrices)
        return out, u

    whole.weights = [qkv, proj, *((gate, *matrices) if update else ())]
    return whole


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
