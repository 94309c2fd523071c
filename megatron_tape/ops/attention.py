"""Causal attention with a position state, in several backends behind one function.

Queries and keys are rotated by the state z, and where it is asked for the map averages z beside the value: p @ [v | z].
Axes: S sequence, B batch, H query heads, G key/value groups, D head dimension. Megatron keeps the sequence first. The
plain form to compare with is `megatron_tape.reference.attend`; `naive` is that form.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tape import reference
from megatron_tape.config import ConfigError
from megatron_tape.ops.rotation import rotate_groups

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Widths that the fused kernels are tested with."""


def document_bounds(documents_BS: Tensor) -> Tensor:
    """Return, int32 (2, B, S), where each token's document starts and where the next one does.

    `documents_BS` numbers the documents of each pack in ascending order.
    """
    starts = torch.searchsorted(documents_BS, documents_BS)
    return torch.stack([starts, torch.searchsorted(documents_BS, documents_BS, right=True)]).int()


def document_mask(bounds_2BS: Tensor) -> Tensor:
    """Return the boolean mask (B, 1, S, S), True where query s may see key t: t <= s in the same document."""
    at = torch.arange(bounds_2BS.shape[2], device=bounds_2BS.device)
    return ((at <= at[:, None]) & (at >= bounds_2BS[0, :, :, None]))[:, None]


def attention(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    z_SBGD: Tensor | None,
    average_state: bool = False,
    bounds_2BS: Tensor | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by z, if there is one, and average v and, if asked for, z with softmax(q k^T / sqrt(D)).

    z has v's type in all backends but triton, and may have one sequence or one group for all. `bounds_2BS` (see
    `document_bounds`) keeps packed documents from seeing each other. Returns o (S, B, H, D) and u, its like, or None.
    `backend` is one of `BACKENDS`. Raises ValueError for keys that are not of the queries' own tokens: those of a cache
    are for `triton_attention.attend`.
    """
    if q_SBHD.shape[0] != k_SBGD.shape[0]:
        raise ValueError(f"{q_SBHD.shape[0]} queries and {k_SBGD.shape[0]} keys are not of the same tokens")
    if average_state and z_SBGD is None:
        raise ValueError("there is no position state to average")
    return BACKENDS[backend](q_SBHD, k_SBGD, v_SBGD, z_SBGD, average_state, bounds_2BS)


def _rotated(q: Tensor, k: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    return (q, k) if z is None else (rotate_groups(q, z), rotate_groups(k, z))


def _values(v: Tensor, z: Tensor | None, average_state: bool) -> tuple[Tensor, ...]:
    return (v, z.expand_as(v)) if average_state else (v,)


def naive_attention(q, k, v, z, average_state, bounds):
    """Attend with explicit scores, S x S of them for each head."""
    q, k = _rotated(q, k, z)
    values = _values(v, z, average_state)
    documents = None if bounds is None else bounds[0]
    averages = reference.attend(*(x.transpose(0, 1) for x in (q, k, torch.cat(values, dim=-1))), documents)
    o, *u = averages.transpose(0, 1).split(v.shape[-1], dim=-1)
    return o, u[0] if u else None


def torch_attention(q, k, v, z, average_state, bounds):
    """Call torch's SDPA once for each value: it leaves its fast path when a value is wider than the key.

    That is 2x RoPE's attention instead of the 1.5x that one pass over a widened value takes.
    """
    q, k = _rotated(q, k, z)
    values = _values(v, z, average_state)
    mask = None if bounds is None else document_mask(bounds)
    heads_per_group = q.shape[2] // k.shape[2]
    if mask is not None and heads_per_group > 1:
        # SDPA's kernels that take a mask know no groups; its fallback would hold all S x S scores.
        k, *values = (x.repeat_interleave(heads_per_group, dim=2) for x in (k, *values))
    q, k = (x.permute(1, 2, 0, 3) for x in (q, k))
    o, *u = (
        F.scaled_dot_product_attention(
            q,
            k,
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        ).permute(2, 0, 1, 3)
        for value in values
    )
    return o, u[0] if u else None


def tiled_attention(q, k, v, z, average_state, bounds):
    """Average both values in one pass over small tiles of scores, in plain torch."""
    from megatron_tape.ops.tiled_attention import tiled_attention

    q, k = _rotated(q, k, z)
    G = k.shape[2]
    q, k, *values = (x.permute(1, 2, 0, 3) for x in (q, k, *_values(v, z, average_state)))
    averages = tiled_attention(q.unflatten(1, (G, -1)), k, tuple(values), None if bounds is None else bounds[0])
    o, *u = (x.flatten(1, 2).permute(2, 0, 1, 3) for x in averages)
    return o, u[0] if u else None


def triton_attention(q, k, v, z, average_state, bounds):
    """Average both values in one pass, in kernels of our own."""
    from megatron_tape.ops.triton_attention import attention

    starts, ends = (None, None) if bounds is None else bounds
    return attention(q, k, v, z, average_state, starts, ends)


def flash_attention(q, k, v, z, average_state, bounds):
    """Call flash-attn once for each value, as its kernels want a value as wide as the key."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k = _rotated(q, k, z)
    S, B = q.shape[:2]
    q, k, *values = (x.transpose(0, 1) for x in (q, k, *_values(v, z, average_state)))
    if bounds is None:
        o, *u = (flash_attn_func(q, k, value, causal=True) for value in values)
    else:
        first = torch.arange(S, device=q.device) == bounds[0]
        lengths = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=B * S).int()
        longest = int(lengths.diff().max())
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        o, *u = (
            flash_attn_varlen_func(
                q, k, value.flatten(0, 1), lengths, lengths, longest, longest, causal=True
            ).unflatten(0, (B, S))
            for value in values
        )  # fmt: skip
    return o.transpose(0, 1), u[0].transpose(0, 1) if u else None


BACKENDS: dict[str, Callable] = {
    "triton": triton_attention,
    "tiled": tiled_attention,
    "torch": torch_attention,
    "flash_attn": flash_attention,
    "naive": naive_attention,
}


def unsupported(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say in half a sentence why `backend` cannot run, or return None if it can."""
    if backend not in ("triton", "flash_attn"):
        return None
    if why := _not_importable(backend):
        return why
    if device.type != "cuda" and not (backend == "triton" and _interpreted()):
        return f"needs a GPU, and this runs on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    if backend == "triton":
        return None if head_dim in HEAD_DIMS else f"has heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
    return None if head_dim <= 256 and head_dim % 8 == 0 else f"has no heads of {head_dim}"


def _not_importable(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # built for another torch, for instance
        return f"cannot be imported ({type(error).__name__})"
    return None


def _interpreted() -> bool:
    """Tell whether Triton runs kernels on the CPU, statement by statement."""
    import triton

    return triton.knobs.runtime.interpret


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, averages_state: bool) -> str:
    """Return the backend for `wanted`.

    `auto` takes, where the state is averaged, triton on a GPU, if it can run, and tiled on a CPU; where it is not,
    flash_attn on a GPU, if it can run; else torch. Raises `ConfigError`, in one sentence, where one asked for by name
    cannot run: it never becomes another.
    """
    if wanted != "auto":
        if why := unsupported(wanted, device, dtype, head_dim):
            raise ConfigError(f"model.attention_backend is {wanted}, which {why}; choose another, or auto")
        return wanted
    fast = "triton" if averages_state else "flash_attn"
    if device.type == "cpu":
        return "tiled" if averages_state else "torch"
    return fast if unsupported(fast, device, dtype, head_dim) is None else "torch"
