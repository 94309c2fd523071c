"""Time every implementation of attention with TAPE, compared with RoPE's fastest attention on this machine.

    python -m benchmarks.attention [--shapes 12x64 32/8x128] [--lengths 1024 4096] [--only triton sdpa] [--record]

If a candidate cannot run here, the reason is printed; if its results differ from float64, no time is reported for it.
Repetitions alternate between the candidates, and medians are reported. `layers` are whole attention layers, including
projections; `layers with update` also rewrite the position state if the candidate is TAPE's. Candidates named after a
backend (`model.attention_backend`) are what a model runs; on a GPU the others use a rotation that torch.compile has
fused. Only torch is required; `flash_attn` and `triton` are candidates if they are installed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import DTYPES, add_arguments, positive, reason, recorder, timed
from megatron_tape.model.reference import rope_phases
from megatron_tape.ops.attention import attention, unsupported
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update
from megatron_tape.ops.rotation import rotate_groups

Candidate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Factory = Callable[[int], Candidate]
"""Makes a candidate for sequences of one length."""

LONGEST_LAYER = 4096
"""Whole layers are not timed for longer sequences, where projections hardly matter."""


def sdpa(q: Tensor, k: Tensor, values: tuple[Tensor, ...], kernel: SDPBackend | None = None) -> list[Tensor]:
    """Call torch's SDPA for each value, with the given kernel or with torch's own choice."""
    q, k = (x.permute(1, 2, 0, 3) for x in (q, k))
    grouped = q.shape[1] != k.shape[1]
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return [
            F.scaled_dot_product_attention(
                q, k, value.permute(1, 2, 0, 3), is_causal=True, enable_gqa=grouped
            ).permute(2, 0, 1, 3)
            for value in values
        ]  # fmt: skip


def released(rotate: Callable) -> Candidate:
    """Average v and both halves of the state at full width, in three calls, as the TAPE authors' code does."""

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = z.chunk(2, dim=-1)
        states = (torch.cat([real, real], dim=-1), torch.cat([imaginary, imaginary], dim=-1))
        o, re, im = sdpa(rotate(q, z), rotate(k, z), (v, *states))
        half = q.shape[-1] // 2
        return o, torch.cat([re[..., :half], im[..., :half]], dim=-1)

    return attend


def flex(rotate: Callable, device: torch.device, length: int) -> Candidate:
    """Use torch's FlexAttention with a value that is twice as wide as the key."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    # Without _compile, the whole mask would be materialized.
    mask = create_block_mask(causal, None, None, length, length, device=device.type, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.cat([v, z], dim=-1)
        q, k = rotate(q, z), rotate(k, z)
        q, k, value = (x.permute(1, 2, 0, 3) for x in (q, k, value))
        out = compiled(q, k, value, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).permute(2, 0, 1, 3)
        return out.chunk(2, dim=-1)

    return attend


def with_backend(backend: str) -> Candidate:
    """Return TAPE's attention."""
    return lambda q, k, v, z: attention(q, k, v, z, True, None, backend)


def with_phases(backend: str, phases: Tensor) -> Candidate:
    """Return RoPE's attention, whose state has no gradient and is shared by all sequences and heads."""
    return lambda q, k, v, z: attention(q, k, v, phases.to(q.dtype), False, None, backend)


def rope(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return RoPE's phases (S, 1, 1, D)."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
    return rope_phases(torch.arange(length), frequencies)[:, None, None].to(device, dtype)


def candidates(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Factory], dict[str, str]]:
    """Return the candidates of RoPE and TAPE that can run, by name, and the reasons why others cannot."""
    found: dict[str, Factory] = {}
    rejected: dict[str, str] = {}

    def phases(length: int) -> Tensor:
        return rope(length, dim, dtype, device)

    for backend in ("torch", "tiled", "flash_attn", "triton"):
        why = unsupported(backend, device, dtype, dim)
        if backend == "triton" and device.type != "cuda":
            why = why or "is interpreted here, which says nothing of its speed"
        if backend == "tiled" and device.type != "cpu":
            why = "is for CPUs"
        if why:
            rejected[backend] = why
            continue
        found[f"rope {backend}"] = lambda length, backend=backend: with_phases(backend, phases(length))
        found[f"tape {backend}"] = lambda length, backend=backend: with_backend(backend)
    rotate = rotate_groups
    if device.type == "cuda":
        # Beyond this limit torch silently stops compiling and runs the plain function.
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 100
        rotate = torch.compile(rotate_groups, dynamic=False)

        def rope_sdpa(kernel: SDPBackend | None, length: int) -> Candidate:
            z = phases(length)
            return lambda q, k, v, _: (sdpa(rotate(q, z), rotate(k, z), (v,), kernel)[0], None)

        def tape_sdpa(kernel: SDPBackend | None, length: int) -> Candidate:
            return lambda q, k, v, z: tuple(sdpa(rotate(q, z), rotate(k, z), (v, z), kernel))

        def tape_sdpa_widened(kernel: SDPBackend | None, length: int) -> Candidate:
            def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
                (averages,) = sdpa(rotate(q, z), rotate(k, z), (torch.cat([v, z], dim=-1),), kernel)
                return averages.chunk(2, dim=-1)

            return attend

        kernels = {"sdpa": None, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
        for name, kernel in kernels.items():
            found[f"rope {name}"], found[f"tape {name}"] = partial(rope_sdpa, kernel), partial(tape_sdpa, kernel)
            found[f"tape {name} widened"] = partial(tape_sdpa_widened, kernel)
        found["tape flex"] = partial(flex, rotate, device)
    else:
        rejected["flex"] = "is only compiled for GPUs here"
    found["tape released"] = lambda length: released(rotate)
    return found, rejected


def inputs(length: int, batch: int, heads: int, groups: int, dim: int, dtype: torch.dtype, device: torch.device):
    """Draw q, k, v and z; z is RoPE's phases with small changes."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups, groups)]
    q, k, v, z = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    z.mul_(0.1).add_(rope(length, dim, dtype, device))
    return [x.requires_grad_() for x in (q, k, v, z)]


def runner(candidate: Candidate, tensors: list[Tensor], backward: bool, ones: dict) -> Callable[[], None]:
    """Return a function that runs `candidate` forward, and backward from gradients of ones.

    The first run creates these gradients and keeps them in `ones` for all candidates.
    """
    wanted = [*tensors, *getattr(candidate, "weights", [])]

    def like(x: Tensor) -> Tensor:
        kind = (x.shape, x.stride(), x.dtype)
        if kind not in ones:
            ones[kind] = torch.ones_like(x)
        return ones[kind]

    def once() -> None:
        with torch.set_grad_enabled(backward):
            outputs = [x for x in candidate(*tensors) if x is not None]
        if backward:
            torch.autograd.grad(outputs, wanted, [like(x) for x in outputs], allow_unused=True)

    return once


def check_parity(name: str, make: Factory, heads: int, groups: int, dim: int, dtype, device, length: int) -> str | None:
    """Return how outputs or gradients differ from float64's, if the error is more than twice that of plain torch.

    An odd length is checked, too: Triton compiles separate kernels for multiples of 16, which are the lengths timed.
    """
    for checked in {min(length, 257), min(length, 1024)} if name != "tape flex" else {min(length, 1024)}:
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
    """Return an attention layer around `candidate` with its projections and, if `update`, the update of z."""
    width, inner = heads * dim, 4 * heads

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5).requires_grad_()

    qkv, proj = matrix((heads + 2 * groups) * dim, width), matrix(width, width)
    gate, matrices = matrix(inner, width), [matrix(groups, heads), matrix(inner, groups), matrix(groups, inner)]
    fused = name == "tape triton" and fits_fused(groups, heads, dim, inner, dtype)

    def whole(hidden: Tensor, _k: Tensor, _v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = F.linear(hidden.flatten(2), qkv).unflatten(2, (-1, dim)).split([heads, groups, groups], dim=2)
        o, u = candidate(q, k, v, z)
        out = F.linear(o.flatten(2), proj)
        if u is not None and update:
            states = z.flatten(0, 1), u.reshape(-1, heads, dim), F.linear(out, gate).flatten(0, 1)
            u = (fused_update if fused else plain_update)(*states, *matrices)
        return out, u

    whole.weights = [qkv, proj, *((gate, *matrices) if update else ())]
    return whole


def measure(
    shape: tuple[int, int, int], length: int, arguments: argparse.Namespace, device: torch.device, peak
) -> dict:
    """Time every candidate at one shape and length, forward and forward with backward, alone and in its layer."""
    (heads, groups, dim), dtype = shape, DTYPES[arguments.precision]
    batch = max(1, arguments.tokens // length)
    factories, rejected = candidates(dim, dtype, device)
    if arguments.only:
        wanted = {f"tape {name}" for name in arguments.only}
        factories = {name: make for name, make in factories.items() if name.startswith("rope") or name in wanted}
    found: dict[str, Candidate] = {}
    for name, make in factories.items():
        if why := check_parity(name, make, heads, groups, dim, dtype, device, length):
            rejected[name] = why
            continue
        try:
            found[name] = make(length)
        except Exception as error:  # a compiler may raise anything
            rejected[name] = reason(error)
    tensors = inputs(length, batch, heads, groups, dim, dtype, device)
    result: dict = {"heads": heads, "groups": groups, "head_dim": dim, "length": length, "batch": batch}
    kinds: dict[str, dict[str, Candidate]] = {"attention": found}
    if length <= LONGEST_LAYER:
        for what, update in (("layers", False), ("layers with update", True)):
            kinds[what] = {n: layer(n, f, heads, groups, dim, dtype, device, update) for n, f in found.items()}
    for what, functions in kinds.items():
        for backward in (False, True):
            ones: dict = {}
            runs = {name: runner(f, tensors, backward, ones) for name, f in functions.items()}
            timings, failed = timed(runs, arguments.repetitions, device)
            direction = f"{what} {'forward+backward' if backward else 'forward'}"
            rejected |= {f"{name}, {direction}": why for name, why in failed.items()}
            baselines = [name for name in timings if name.startswith("rope")]
            if not baselines:
                rejected[direction] = "RoPE itself could not be timed, so there are no ratios"
                continue
            fastest = min(baselines, key=lambda name: timings[name]["seconds"])
            for name, timing in timings.items():
                timing["ratio"] = timing["seconds"] / timings[fastest]["seconds"]
                if timing["memory_bytes"]:
                    timing["memory_ratio"] = timing["memory_bytes"] / max(1, timings[fastest]["memory_bytes"])
                if what == "attention":
                    values = 2 if name.startswith("tape") else 1
                    pairs = batch * heads * dim * length * (length + 1) // 2
                    # Forward: scores and each value. Backward: scores again, their gradient twice, each value twice.
                    flops = 2 * pairs * (1 + values + (backward and 3 + 2 * values))
                    timing["tflops"] = flops / timing["seconds"] / 1e12
                    timing["of_matmul_peak"] = flops / timing["seconds"] / peak
            result[direction] = {"against": fastest, "timings": timings}
    return result | {"rejected": rejected}


def show(shape: str, result: dict) -> None:
    """Print the table of one combination, and which candidates have no figures and why."""
    for what, measured in result.items():
        if not isinstance(measured, dict) or what == "rejected":
            continue
        print(f"\n{shape}, {result['length']} tokens, batch {result['batch']}, {what}, against {measured['against']}")
        for name, timing in sorted(measured["timings"].items(), key=lambda item: item[1]["seconds"]):
            line = f"  {name:16} {timing['seconds'] * 1e3:9.2f} ms {timing['ratio']:6.2f}x"
            if "tflops" in timing:
                line += f" {timing['tflops']:7.1f} TFLOP/s, {timing['of_matmul_peak']:4.0%} of matmul"
            if "memory_ratio" in timing:
                line += f", memory {timing['memory_ratio']:.2f}x"
            print(line)
    for name, why in result["rejected"].items():
        print(f"  {name} has no figure: {why}")
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


def shape_of(text: str) -> tuple[int, int, int]:
    """Return heads, groups and head dimension."""
    heads, dim = text.split("x")
    heads, _, groups = heads.partition("/")
    return int(heads), int(groups or heads), int(dim)


def main() -> None:
    """Print tables; `--record` also writes benchmarks/results/attention-*.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes, lengths = ["12x64", "16x64", "32x128", "32/8x128"], [1024, 4096, 16384, 65536]
    parser.add_argument(
        "--shapes", nargs="+", type=checked_shape, default=shapes if on_gpu else shapes[:1], metavar="H[/G]xD",
        help="query heads, groups if there are fewer, and head dimension (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=lengths if on_gpu else lengths[:1], metavar="N",
        help="tokens per sequence; if above --tokens, the batch is one sequence (default here: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="TAPE candidates, such as triton (default: all)")
    add_arguments(parser, on_gpu, repetitions=10)
    arguments = parser.parse_args()
    names = candidates(64, DTYPES[arguments.precision], device)[0]
    known = {name.removeprefix("tape ") for name in names if name.startswith("tape")}
    if unknown := set(arguments.only or ()) - known:
        parser.error(f"--only {' '.join(sorted(unknown))}: not among the candidates here, {', '.join(sorted(known))}")
    peak = matmul_peak(DTYPES[arguments.precision], device)
    print(f"matmul: {peak / 1e12:.2f} TFLOP/s")
    record = recorder("attention", arguments)
    results: list[dict] = []
    # The shortest sequences come first, so that every shape has some results if time runs out.
    combinations = list(itertools.product(sorted(arguments.lengths), arguments.shapes))
    started = time.monotonic()
    for length, shape in combinations:
        done, elapsed = len(results), time.monotonic() - started
        left = f", about {elapsed / done * (len(combinations) - done) / 60:.0f} min left" if done else ""
        print(f"{done + 1} of {len(combinations)}: {shape}, {length} tokens{left}", file=sys.stderr, flush=True)
        results.append(measure(shape_of(shape), length, arguments, device, peak))
        show(shape, results[-1])
        if record:
            record.write({"precision": arguments.precision, "matmul_flops": peak, "results": results})


if __name__ == "__main__":
    main()
