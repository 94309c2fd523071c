"""flash-attn in the newest installed version that runs on the GPU: 4 (the package flash-attn-4), 3
or 2.

Versions 2 and 3 require values as wide as the keys, so they are called once for v and once for z.
Version 4 also supports [v | z]. On Hopper, [v | z] requires the tile sizes below: version 4 selects
tile sizes by the width of the keys, with which [v | z] does not fit into shared memory.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends.choice import FLASH_ATTN, flash_attn_version, takes_wide_value
from megatron_tape.ops.backends.sdpa import parts

# For (D, 2D): the tile (queries, keys) forward, and FlashAttention-4's `BwdConfig` backward. Both
# compile for capability 9.0 without spills and within 227 KiB, and are exact on an H200 (version
# 4.0.0b36, docs/gpu.md).
_FORWARD = {(64, 128): (128, 128), (128, 256): (128, 96)}
_BACKWARD = {
    (64, 128): (64, 128, 2, 2, 2, True, False, False, 1, 2, 1),
    (128, 256): (64, 96, 2, 1, 1, False, True, False, 1, 1, 1),
}


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    (S, B, H, D), G = x.q_SBHD.shape, x.k_TBGD.shape[2]
    version = flash_attn_version(x.q_SBHD.device)
    functions = importlib.import_module(FLASH_ATTN[version])
    packed = x.packing is not None
    if x.average_state and not packed and takes_wide_value(x.q_SBHD.device, D, grouped=H != G):
        _choose_tiles(functions)
        q, k, *values = x.with_one_value()
    else:
        q, k, *values = *x.rotated(), *x.values()
    q, k, *values = (y.transpose(0, 1) for y in (q, k, *values))
    settings = {"causal": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
    lengths = x.packing.lengths(S) if packed else ()

    def averages(q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        if lengths:
            kernel = functions.flash_attn_varlen_func
        else:
            kernel = functions.flash_attn_func
        if lengths:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            kernel = functools.partial(kernel, **dict(zip(names, lengths)))
        results = (kernel(q, k, value, **settings) for value in values)
        # Version 4 and early releases of version 3 also return the log-sum-exp.
        return tuple(result[0] if isinstance(result, tuple) else result for result in results)

    if lengths:
        outputs = x.run(averages, *(y.flatten(0, 1) for y in (q, k, *values)))
        outputs = [output.unflatten(0, (B, S)) for output in outputs]
    else:
        outputs = x.run(averages, q, k, *values)
    return tuple(part for output in outputs for part in parts(output.transpose(0, 1), D))


def _choose_tiles(functions: Any) -> None:
    """Override version 4's tile sizes for [v | z] on Hopper; those of the backward pass cannot be
    set by arguments.
    """
    if isinstance(functions._tile_size_fwd_sm90, _Tiles):
        return
    forward = functions._tile_size_fwd_sm90
    backward = functions._tile_size_bwd_sm90
    ours = {widths: functions.FwdConfig(*tile, True, True) for widths, tile in _FORWARD.items()}
    functions._tile_size_fwd_sm90 = _Tiles(ours, forward)
    ours = {widths: functions.BwdConfig(*tile) for widths, tile in _BACKWARD.items()}
    functions._tile_size_bwd_sm90 = _Tiles(ours, backward)


class _Tiles:
    """Replaces a function of version 4 that selects tile sizes: returns `ours` by (key width, value
    width) first.
    """

    def __init__(self, ours: dict[tuple[int, int], object], theirs: Callable[..., object]):
        self._ours = ours
        self._theirs = theirs

    def __call__(
        self, head_dim: int, head_dim_v: int, *arguments: object, **named: object
    ) -> object:
        ours = self._ours.get((head_dim, head_dim_v))
        if ours is None:
            return self._theirs(head_dim, head_dim_v, *arguments, **named)
        return ours
