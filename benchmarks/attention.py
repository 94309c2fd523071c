"""Time every implementation of attention with TAPE, compared with RoPE's fastest attention on this machine.

    python -m benchmarks.attention [--shapes 12x64 32/8x128] [--lengths 1024 4096] [--record]

If a candidate cannot run here, the reason is printed; if its results differ from float64, no time is reported for it.
Repetitions alternate between the candidates, and medians are reported. Both TAPE and RoPE rotate queries and keys;
TAPE also averages its state, and computes its gradient. `of_rope` is the time, forward and backward, of the fastest of
TAPE's candidates that a model can run (`model.attention_backend`) over that of RoPE's fastest candidate of any kind. On
a GPU, those that are not backends of a model use a rotation that torch.compile has fused. Only torch is required;
`flash_attn`, `flash_attn_3` and `triton` are candidates if they are installed. Without a GPU, TRITON_INTERPRET=1 lets
triton's candidates take part, without a time.
"""

import argparse
import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.environment import positive
from benchmarks.timing import DTYPES, TimeLimit, add_arguments, device_here, reason, relate, run_all, timed_both_ways
from megatron_tape.model.reference import rope_phases
from megatron_tape.ops.attention import attention, unsupported
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.rotation import rotate_groups

Candidate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps q, k, v and z to the averages of v and, for TAPE, of z."""

ON_GPU = ("12x64@1024", "32x128@8192", "16x128@4096", "32/8x128@8192", "12x64@8192", "32x128@4096", "16x64@4096")
"""What is measured on a GPU by default, the most important first."""

BACKENDS = ("triton", "flash_attn_3", "flash_attn", "torch", "tiled")
"""Backends of a model that are measured, each as `rope NAME` and as `tape NAME`."""

FLEX_WIDE = {"fwd_num_stages": 2, "bwd_num_stages": 2, "bwd_num_warps": 8}
FLEX_WIDE |= dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 64)
"""FlexAttention chooses tiles by the width of the keys; with values of 256 those do not fit into shared memory."""


def shape_of(text: str) -> tuple[int, int, int]:
    """Return heads, groups and head dimension of a shape such as `12x64` or `32/8x128`."""
    try:
        heads, dim = text.split("x")
        heads, _, groups = heads.partition("/")
        heads, groups, dim = int(heads), int(groups or heads), int(dim)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a shape such as 12x64 or 32/8x128") from None
    if min(heads, groups, dim) < 1 or heads % groups or dim % 2:
        raise argparse.ArgumentTypeError(f"{text}: groups must divide heads, and the dimension must be even")
    return heads, groups, dim


def inputs(length: int, batch: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k, v and z; z is RoPE's phases with small changes."""
    (heads, groups, dim), device = shape, device_here()
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups, groups)]
    q, k, v, z = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
    z.mul_(0.1).add_(rope(length, dim, dtype))
    return [x.requires_grad_() for x in (q, k, v, z)]


@functools.lru_cache(maxsize=4)
def rope(length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return RoPE's phases (S, 1, 1, D)."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
    return rope_phases(torch.arange(length), frequencies)[:, None, None].to(device_here(), dtype)


def candidates(dim: int, dtype: torch.dtype) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates of RoPE and TAPE that can run, by name, and the reasons why others cannot.

    Those that are likely to take long to compile, or to fail, come last.
    """
    found: dict[str, Candidate] = {}
    rejected: dict[str, str] = {}
    device = device_here()
    for backend in BACKENDS:
        why = unsupported(backend, device, dtype, dim)
        if backend == "tiled" and device.type != "cpu":
            why = "is for CPUs"
        if why:
            rejected[backend] = why
        else:
            found |= {"rope " + backend: rope_with(backend, dtype), "tape " + backend: tape_with(backend)}
    if device.type != "cuda":
        rejected["flex"] = "is only compiled for GPUs here"
        return found, rejected
    # Beyond this limit torch would run the plain function, and the comparison would not be fair.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 100
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    rotate = torch.compile(rotate_groups, dynamic=False)
    kernels = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa": None}
    for name, kernel in kernels.items():
        found |= {"rope " + name: sdpa(rotate, kernel, False), "tape " + name: sdpa(rotate, kernel, True)}
    return found | {"tape flex": flex(rotate, True), "rope flex": flex(rotate, False)}, rejected


def tape_with(backend: str) -> Candidate:
    """Return TAPE's attention."""
    return lambda q, k, v, z: attention(q, k, v, z, True, None, backend)


def rope_with(backend: str, dtype: torch.dtype) -> Candidate:
    """Return RoPE's attention, whose state has no gradient and is shared by all sequences and heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, None]:
        return attention(q, k, v, rope(len(z), z.shape[-1], dtype).to(q.dtype), False, None, backend)

    return attend


def sdpa(rotate: Callable, kernel: SDPBackend | None, averages: bool) -> Candidate:
    """Return attention with a fused rotation and a call of torch's SDPA for each value; TAPE's, if it `averages` z.

    Without a kernel, torch chooses one.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        state = z if averages else rope(len(z), z.shape[-1], q.dtype)
        q, k, *values = (
            x.permute(1, 2, 0, 3) for x in (rotate(q, state), rotate(k, state), v, *([z] if averages else []))
        )
        grouped = q.shape[1] != k.shape[1]
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            found = [
                F.scaled_dot_product_attention(q, k, x, is_causal=True, enable_gqa=grouped).permute(2, 0, 1, 3)
                for x in values
            ]
        return found[0], found[1] if averages else None

    return attend


def flex(rotate: Callable, averages: bool) -> Candidate:
    """Return attention with torch's FlexAttention: RoPE's, or TAPE's with a value twice as wide as the key."""
    from torch.nn.attention.flex_attention import flex_attention

    from megatron_tape.ops.backends.flex import block_mask

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = functools.cache(lambda length: block_mask(length, length, None, device_here()))

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        state, value = (z, torch.cat([v, z], dim=-1)) if averages else (rope(len(z), z.shape[-1], q.dtype), v)
        tiles = FLEX_WIDE if value.shape[-1] > 128 else None
        q, k, value = (x.permute(1, 2, 0, 3) for x in (rotate(q, state), rotate(k, state), value))
        grouped = q.shape[1] != k.shape[1]
        out = compiled(q, k, value, block_mask=mask(len(z)), enable_gqa=grouped, kernel_options=tiles)
        out = out.permute(2, 0, 1, 3)
        return out.chunk(2, dim=-1) if averages else (out, None)

    return attend


def inexact_at(name: str, candidate: Candidate, lengths: set[int], shape: tuple, dtype: torch.dtype) -> str | None:
    """Return how outputs or gradients differ from float64's, if the error is more than twice that of plain torch."""
    naive = rope_with("naive", dtype) if name.startswith("rope") else tape_with("naive")
    for length in sorted(lengths):
        try:
            why = inexact(candidate, naive, inputs(length, 1, shape, dtype), dtype)
        except Exception as error:  # a compiler may raise anything
            why = reason(error)
        if why:
            return f"{length} tokens: {why}"
    return None


def measure(shape: tuple[int, int, int], length: int, arguments: argparse.Namespace, limit: TimeLimit) -> dict:
    """Time every candidate that is exact, forward and forward with backward."""
    dtype, batch, exact = DTYPES[arguments.precision], max(1, arguments.tokens // length), {}
    found, rejected = candidates(shape[2], dtype)
    for name, candidate in found.items():
        # Triton compiles our kernels anew for the multiples of 16 that are timed.
        odd = {min((length - 1) | 1, 257)} if name.endswith("triton") else set()
        if limit.over():
            rejected[name] = "there was no time left"
        elif why := inexact_at(name, candidate, {*odd, min(length, 1024)}, shape, dtype):
            rejected[name] = why
        else:
            exact[name] = candidate
    timed, failed = timed_both_ways(exact, inputs(length, batch, shape, dtype), arguments.repetitions)
    against = {direction: fastest(timings, "rope") for direction, timings in timed.items()}
    result = {"shape": shape, "length": length, "batch": batch, "against": against, "timed": timed}
    for direction, timings in timed.items():
        if against[direction]:
            relate(timings, timings[against[direction]]["seconds"])
    timings = timed["forward+backward"]
    ours, rope = fastest(timings, "tape", BACKENDS), against["forward+backward"]
    if ours and rope:
        result["of_rope"] = {"ratio": timings[ours]["ratio"], "tape": ours, "rope": rope}
    return result | {"rejected": rejected | failed}


def fastest(timings: dict[str, dict], encoding: str, names: tuple[str, ...] | None = None) -> str | None:
    """Return the fastest candidate of an encoding (among `names`, if given), or None if none was timed."""
    timed_ones = [
        name
        for name, timing in timings.items()
        if "seconds" in timing and name.startswith(encoding) and (names is None or name.split(" ")[1] in names)
    ]
    return min(timed_ones, key=lambda name: timings[name]["seconds"], default=None)


def main() -> None:
    """Print tables; `--record` or `--output` also writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=shape_of, metavar="H[/G]xD",
        help="query heads, groups if there are fewer, and head dimension (default: 12x64)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", type=positive, metavar="N",
        help="tokens per sequence; if above --tokens, the batch is one sequence (default: 1024; on a GPU, with neither "
        f"--shapes nor --lengths: {' '.join(ON_GPU)})",
    )  # fmt: skip
    add_arguments(parser, repetitions=10)
    arguments = parser.parse_args()
    shapes, lengths = arguments.shapes or [(12, 12, 64)], arguments.lengths or [1024]
    chosen = [(shape, length) for length in sorted(lengths) for shape in shapes]
    if arguments.toy:
        arguments.tokens, arguments.repetitions, chosen = 64, 1, [((2, 1, 32), 64)]
    elif torch.cuda.is_available() and not arguments.shapes and not arguments.lengths:
        chosen = [(shape_of(shape), int(length)) for shape, length in (text.split("@") for text in ON_GPU)]
    names = {f"{shape[0]}/{shape[1]}x{shape[2]} at {length} tokens": (shape, length) for shape, length in chosen}
    run_all("attention", arguments, names, measure)


if __name__ == "__main__":
    main()
