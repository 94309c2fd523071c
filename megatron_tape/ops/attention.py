"""Causal attention with a position state, in several backends behind one function.

Queries and keys are rotated by the state z, and where it is asked for the map averages z beside the value: p @ [v | z].
Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension. Megatron keeps the sequence first. The plain form to compare with is `model.reference.attend`;
`naive` is that form.
"""

import importlib.util
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tape.errors import ConfigError
from megatron_tape.model import reference
from megatron_tape.ops.rotation import rotate_groups

logger = logging.getLogger(__name__)

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Widths that the fused kernels are tested with."""


def document_bounds(documents_BT: Tensor) -> Tensor:
    """Return, int32 (2, B, T), where each token's document starts and where the next one does.

    `documents_BT` numbers the documents of each pack in ascending order. Padding before a sequence is a document, too:
    an attention mask of zeros and then ones will do. Raises ValueError for another order; it is looked at on CPUs only.
    """
    documents_BT = documents_BT.contiguous().long()
    if documents_BT.device.type == "cpu" and (documents_BT.diff() < 0).any():
        raise ValueError("documents must be numbered in ascending order; padding comes before a sequence, not after it")
    starts = torch.searchsorted(documents_BT, documents_BT)
    return torch.stack([starts, torch.searchsorted(documents_BT, documents_BT, right=True)]).int()


def causal_mask(S: int, T: int, bounds_2BT: Tensor | None, device: torch.device) -> Tensor:
    """Return the boolean mask (B or 1, 1, S, T), True where a query may see a key: none later, of the same document."""
    keys = torch.arange(T, device=device)
    mask = (keys <= keys[T - S :, None])[None, None]
    return mask if bounds_2BT is None else mask & (keys >= bounds_2BT[0, :, None, T - S :, None])


def attention(
    q_SBHD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    z_TBGD: Tensor | None,
    average_state: bool = False,
    bounds_2BT: Tensor | None = None,
    backend: str = "torch",
    rotate: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by z, if there is one, and average v and, if asked for, z with softmax(q k^T / sqrt(D)).

    z has v's type in all backends but triton, and may have one sequence or one group for all. `bounds_2BT` (see
    `document_bounds`) keeps packed documents from seeing each other. Returns o (S, B, H, D) and u, as large and of z's
    type, or None. `backend` is one of `BACKENDS`; `choose_backend` turns auto into one.

    With a cache (T > S, one query at a time for instance) each token is rotated once, when it comes: q by its own
    state and the new key before it joins the cache (`ops.rotation.rotate_groups`), and here `rotate` is False.
    Raises ValueError for shapes or types that do not fit, a cache to be rotated, or no state to average.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, not one of {', '.join(BACKENDS)}; choose_backend turns auto into one"
        )
    if average_state and z_TBGD is None:
        raise ValueError("there is no position state to average")
    if (
        z_TBGD is not None
        and z_TBGD.dtype != v_TBGD.dtype
        and not (backend == "triton" and z_TBGD.dtype == torch.float32)
    ):
        raise ValueError(f"states of type {z_TBGD.dtype} do not go with values of type {v_TBGD.dtype} in {backend}")
    _check_shapes(q_SBHD, k_TBGD, v_TBGD, z_TBGD, bounds_2BT)
    S, T = q_SBHD.shape[0], k_TBGD.shape[0]
    if S < T and rotate and z_TBGD is not None:
        raise ValueError(
            f"{S} queries have {T} keys: those of a cache were rotated when they came; rotate the new ones with "
            "ops.rotation.rotate_groups, and pass rotate=False"
        )
    return BACKENDS[backend](q_SBHD, k_TBGD, v_TBGD, z_TBGD, average_state, bounds_2BT, rotate)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, bounds: Tensor | None) -> None:
    """Refuse what a kernel would read beyond its end."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"queries and keys have {q.dim()} and {k.dim()} axes, not 4: sequence, batch, heads, head dimension"
        )
    (S, B, H, D), (T, G) = q.shape, k.shape[::2]
    queries, keys = f"queries {tuple(q.shape)}", f"keys {tuple(k.shape)}"
    if k.shape != (T, B, G, D) or H % G:
        raise ValueError(f"{queries} do not fit {keys}: (S, B, H, D) and (T, B, G, D), where G divides H")
    if S > T:
        raise ValueError(f"{queries} have {keys}: each query's own token must be among the keys")
    if v.shape != k.shape:
        raise ValueError(f"{keys} have values {tuple(v.shape)}, not of the same shape")
    if z is not None and (z.shape[::3] != (T, D) or z.shape[1] not in (1, B) or z.shape[2] not in (1, G)):
        raise ValueError(
            f"{keys} have states {tuple(z.shape)}, not {(T, B, G, D)}, or 1 for {B} or {G}: those of all keys"
        )
    if z is not None and D % 2:
        raise ValueError(f"heads of {D} hold no pairs that a state could rotate: their dimension must be even")
    if bounds is not None and bounds.shape != (2, B, T):
        raise ValueError(f"{keys} have document bounds {tuple(bounds.shape)}, not {(2, B, T)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values are of types {q.dtype}, {k.dtype} and {v.dtype}, not of one")


def _rotated(q: Tensor, k: Tensor, z: Tensor | None, rotate: bool) -> tuple[Tensor, Tensor]:
    return (rotate_groups(q, z), rotate_groups(k, z)) if rotate and z is not None else (q, k)


def _values(v: Tensor, z: Tensor | None, average_state: bool) -> tuple[Tensor, ...]:
    return (v, z.expand_as(v)) if average_state else (v,)


def naive_attention(q, k, v, z, average_state, bounds, rotate):
    """Attend with explicit scores, S x S of them for each head."""
    q, k = _rotated(q, k, z, rotate)
    values = _values(v, z, average_state)
    documents = None if bounds is None else bounds[0]
    averages = reference.attend(*(x.transpose(0, 1) for x in (q, k, torch.cat(values, dim=-1))), documents)
    o, *u = averages.transpose(0, 1).split(v.shape[-1], dim=-1)
    return o, u[0] if u else None


def torch_attention(q, k, v, z, average_state, bounds, rotate):
    """Call torch's SDPA once for each value: it leaves its fast path when a value is wider than the key.

    That is 2x RoPE's attention instead of the 1.5x that one pass over a widened value takes.
    """
    q, k = _rotated(q, k, z, rotate)
    values = _values(v, z, average_state)
    S, T = q.shape[0], k.shape[0]
    # One query sees all keys; as many queries as keys are the case that SDPA knows itself.
    mask = None if bounds is None and S in (1, T) else causal_mask(S, T, bounds, q.device)
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
            is_causal=mask is None and S > 1,
            enable_gqa=q.shape[1] != k.shape[1],
        ).permute(2, 0, 1, 3)
        for value in values
    )
    return o, u[0] if u else None


def tiled_attention(q, k, v, z, average_state, bounds, rotate):
    """Average both values in one pass over small tiles of scores, in plain torch."""
    from megatron_tape.ops.tiled_attention import tiled_attention

    q, k = _rotated(q, k, z, rotate)
    G = k.shape[2]
    q, k, *values = (x.permute(1, 2, 0, 3) for x in (q, k, *_values(v, z, average_state)))
    averages = tiled_attention(q.unflatten(1, (G, -1)), k, tuple(values), None if bounds is None else bounds[0])
    o, *u = (x.flatten(1, 2).permute(2, 0, 1, 3) for x in averages)
    return o, u[0] if u else None


def triton_attention(q, k, v, z, average_state, bounds, rotate):
    """Average both values in one pass, in kernels of our own."""
    if not q.is_cuda and (why := unsupported("triton", q.device, q.dtype, q.shape[-1])):
        raise ValueError(f"backend is triton, which {why}")
    from megatron_tape.ops.triton_attention import attention

    starts, ends = (None, None) if bounds is None else bounds
    return attention(q, k, v, z, average_state, starts, ends, rotate)


def flash_attention(q, k, v, z, average_state, bounds, rotate):
    """Call flash-attn once for each value, as its kernels want a value as wide as the key."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k = _rotated(q, k, z, rotate)
    (S, B), T = q.shape[:2], k.shape[0]
    q, k, *values = (x.transpose(0, 1) for x in (q, k, *_values(v, z, average_state)))
    if bounds is None:
        o, *u = (flash_attn_func(q, k, value, causal=True) for value in values)
    else:
        first = torch.arange(T, device=q.device) == bounds[0]
        k_ends = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=B * T)
        # Documents that end before the first query have no queries.
        q_ends = k_ends // T * S + (k_ends % T - (T - S)).clamp(min=0)
        q_longest, k_longest = (int(x.diff().max()) for x in (q_ends, k_ends))
        q, k, ends = q.flatten(0, 1), k.flatten(0, 1), (q_ends.int(), k_ends.int())
        o, *u = (
            flash_attn_varlen_func(q, k, value.flatten(0, 1), *ends, q_longest, k_longest, causal=True).unflatten(
                0, (B, S)
            )
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
    if device.type != "cuda" and _interpreted_wrong(dtype):
        return f"computes {str(dtype).removeprefix('torch.')} wrong where it is interpreted; interpret it in fp32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    types = (torch.bfloat16, torch.float16, *((torch.float32,) if backend == "triton" else ()))
    if dtype not in types:
        names = " or ".join(str(kind).removeprefix("torch.") for kind in types)
        return f"computes in {names}, not in {str(dtype).removeprefix('torch.')}"
    if backend == "triton":
        return None if head_dim in HEAD_DIMS else f"has heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}"
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


def _interpreted_wrong(dtype: torch.dtype) -> bool:
    """Tell what Triton's interpreter (3.6, 3.7) gets wrong: it cuts numbers off, and multiplies their bits."""
    return dtype is torch.bfloat16


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
    if device.type == "cpu":
        return "tiled" if averages_state else "torch"
    fast = "triton" if averages_state else "flash_attn"
    if why := unsupported(fast, device, dtype, head_dim):
        logger.info("attention cannot run as %s, which %s", fast, why)
        return "torch"
    return fast
