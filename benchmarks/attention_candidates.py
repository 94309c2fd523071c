"""The implementations of attention that are compared: ours, and what torch offers, for RoPE and for TAPE."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_tape.model.reference import rope_phases
from megatron_tape.ops.attention import attention, unsupported
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update
from megatron_tape.ops.rotation import rotate_groups

Candidate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps q, k, v and z to the averages of v and, for TAPE, of z."""
Factory = Callable[[int], Candidate]
"""Makes a candidate for sequences of one length."""

BACKENDS = ("triton", "flash_attn", "torch", "tiled")
"""Backends of a model that are measured, each as `rope NAME` and as `tape NAME`."""

LONGEST_MASK = 16384
"""Tokens up to which FlexAttention's mask is made from all pairs; beyond that by a compiled function."""

FLEX_WIDE = {"fwd_num_stages": 2, "bwd_num_stages": 2, "bwd_num_warps": 8}
FLEX_WIDE |= dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 64)
"""FlexAttention chooses tiles by the width of the keys; with values of 256 those do not fit into shared memory."""


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


def candidates(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Factory], dict[str, str]]:
    """Return the candidates of RoPE and TAPE that can run, by name, and the reasons why others cannot.

    Those that are likely to take long to compile, or to fail, come last.
    """
    found: dict[str, Factory] = {}
    rejected: dict[str, str] = {}
    phases = partial(rope, dim=dim, dtype=dtype, device=device)
    for backend in BACKENDS:
        why = unsupported(backend, device, dtype, dim)
        if backend == "tiled" and device.type != "cpu":
            why = "is for CPUs"
        if why:
            rejected[backend] = why
            continue
        found[f"rope {backend}"] = lambda length, backend=backend: with_phases(backend, phases(length))
        found[f"tape {backend}"] = lambda length, backend=backend: with_backend(backend)
    rotate = rotate_groups
    if device.type == "cuda":
        # Beyond this limit torch would run the plain function, and the comparison would not be fair.
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 100
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        rotate = torch.compile(rotate_groups, dynamic=False)
        kernels = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa": None}
        for name, kernel in kernels.items():
            found[f"rope {name}"] = lambda length, kernel=kernel: rope_sdpa(rotate, kernel, phases(length))
            found[f"tape {name}"] = lambda length, kernel=kernel: tape_sdpa(rotate, kernel)
            found[f"tape {name} widened"] = lambda length, kernel=kernel: tape_sdpa_widened(rotate, kernel)
        found["tape flex"] = lambda length: flex(rotate, device, length)
        found["rope flex"] = lambda length: flex(rotate, device, length, phases(length))
    else:
        rejected["flex"] = "is only compiled for GPUs here"
    found["tape released"] = lambda length: released(rotate)
    return found, rejected


def rope(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return RoPE's phases (S, 1, 1, D)."""
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2).float() / dim)
    return rope_phases(torch.arange(length), frequencies)[:, None, None].to(device, dtype)


def with_backend(backend: str) -> Candidate:
    """Return TAPE's attention."""
    return lambda q, k, v, z: attention(q, k, v, z, True, None, backend)


def with_phases(backend: str, phases: Tensor) -> Candidate:
    """Return RoPE's attention, whose state has no gradient and is shared by all sequences and heads."""
    return lambda q, k, v, z: attention(q, k, v, phases.to(q.dtype), False, None, backend)


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


def rope_sdpa(rotate: Callable, kernel: SDPBackend | None, phases: Tensor) -> Candidate:
    """Return RoPE's attention with a fused rotation and torch's SDPA."""
    return lambda q, k, v, _: (sdpa(rotate(q, phases), rotate(k, phases), (v,), kernel)[0], None)


def tape_sdpa(rotate: Callable, kernel: SDPBackend | None) -> Candidate:
    """Return TAPE's attention with a fused rotation and two calls of SDPA."""
    return lambda q, k, v, z: tuple(sdpa(rotate(q, z), rotate(k, z), (v, z), kernel))


def tape_sdpa_widened(rotate: Callable, kernel: SDPBackend | None) -> Candidate:
    """Return TAPE's attention with a fused rotation and one call of SDPA whose value is `[v | z]`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        (averages,) = sdpa(rotate(q, z), rotate(k, z), (torch.cat([v, z], dim=-1),), kernel)
        return averages.chunk(2, dim=-1)

    return attend


def released(rotate: Callable) -> Candidate:
    """Average v and both halves of the state at full width, in three calls, as the TAPE authors' code does."""

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = z.chunk(2, dim=-1)
        states = (torch.cat([real, real], dim=-1), torch.cat([imaginary, imaginary], dim=-1))
        o, re, im = sdpa(rotate(q, z), rotate(k, z), (v, *states))
        half = q.shape[-1] // 2
        return o, torch.cat([re[..., :half], im[..., :half]], dim=-1)

    return attend


def flex(rotate: Callable, device: torch.device, length: int, phases: Tensor | None = None) -> Candidate:
    """Return attention with torch's FlexAttention: RoPE's, or TAPE's with a value twice as wide as the key."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `_compile` is deprecated where it is not needed
        options = {"_compile": True} if length > LONGEST_MASK else {}
        mask = create_block_mask(causal, None, None, length, length, device=device.type, **options)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        state, value = (z, torch.cat([v, z], dim=-1)) if phases is None else (phases, v)
        tiles = FLEX_WIDE if value.shape[-1] > 128 else None
        q, k, value = (x.permute(1, 2, 0, 3) for x in (rotate(q, state), rotate(k, state), value))
        grouped = q.shape[1] != k.shape[1]
        out = compiled(q, k, value, block_mask=mask, enable_gqa=grouped, kernel_options=tiles).permute(2, 0, 1, 3)
        return out.chunk(2, dim=-1) if phases is None else (out, None)

    return attend


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
