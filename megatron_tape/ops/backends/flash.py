"""flash-attn in the newest installed version that runs on the GPU: 4 (the package flash-attn-4) or
2.

Version 2 requires values as wide as the keys, so it is called once for v and once for z. Version 4
also supports [v | z]. On Hopper, [v | z] requires the tile sizes below: version 4 selects tile
sizes by the width of the keys, with which [v | z] does not fit into shared memory.

With grouped queries, the backward pass of version 4 also requires values as wide as the keys. Keys
and [v | z] are therefore repeated for each query head of their group. This takes memory and a copy,
but a second call would compute all scores again.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends.choice import FLASH_ATTN, flash_attn_version, takes_wide_value
from megatron_tape.ops.backends.sdpa import split_average

# Settings by (D, 2D), the widths of the keys and of [v | z]. `_FORWARD` has the queries and keys of
# a tile, `_BACKWARD` the arguments of FlashAttention-4's `BwdConfig`. Both compile for capability
# 9.0 without spills and within 227 KiB, and are exact on an H200 (version 4.0.0b36, docs/gpu.md).
_FORWARD = {(64, 128): (128, 128), (128, 256): (128, 96)}
_BACKWARD = {
    (64, 128): (64, 128, 2, 2, 2, True, False, False, 1, 2, 1),
    (128, 256): (64, 96, 2, 1, 1, False, True, False, 1, 1, 1),
}


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    S, B, H, D = x.q_SBHD.shape
    device = x.q_SBHD.device
    functions = importlib.import_module(FLASH_ATTN[flash_attn_version(device)])
    deterministic = torch.are_deterministic_algorithms_enabled()
    options: dict[str, Any] = {"causal": True, "deterministic": deterministic}

    # One call for [v | z] if the kernel supports it, otherwise a call for v and one for z. Values
    # wider than keys were not tried with documents or a window.
    if x.average_state and x.visibility is None and takes_wide_value(device, D):
        _choose_tiles(functions)
        q, k, value = x.prepared(join=True)
        inputs = (
            q,
            _for_each_head(k, H),
            _for_each_head(value, H),
        )
    else:
        inputs = x.prepared()
    tensors = [y.transpose(0, 1) for y in inputs]

    if x.window is not None:
        # Keys before and after a query's own, inclusive.
        options["window_size"] = (x.window - 1, 0)

    kernel = functions.flash_attn_func
    if x.documents is not None:
        kernel = functions.flash_attn_varlen_func
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= zip(names, x.documents.varlen_arguments(S))
        # The sequences of the batch are concatenated, (B * S, H, D).
        tensors = [y.flatten(0, 1) for y in tensors]

    def averages(q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the average of each value, with a call of the kernel for each."""
        outputs = []
        for value in values:
            output = kernel(q, k, value, **options)
            if isinstance(output, tuple):  # version 4 also returns the log-sum-exp
                output = output[0]
            outputs.append(output)
        return tuple(outputs)

    averaged: list[Tensor] = []
    for output in x.run(averages, *tensors):
        if x.documents is not None:
            output = output.unflatten(0, (B, S))
        averaged += split_average(output.transpose(0, 1), D)
    return tuple(averaged)


def _for_each_head(x_TBGE: Tensor, heads: int) -> Tensor:
    """Return the key or value of its group for each of the `heads` query heads, (T, B, H, E).

    In the backward pass, torch sums the gradients of a group's heads in fp32, and rounds only the
    sum to the dtype of x.
    """
    heads_per_group = heads // x_TBGE.shape[2]
    if heads_per_group == 1:
        return x_TBGE
    return x_TBGE.repeat_interleave(heads_per_group, dim=2)


def _choose_tiles(functions: Any) -> None:
    """Override version 4's tile sizes for [v | z] on Hopper in its module `functions`.

    Its arguments cannot set the tile sizes of the backward pass.
    """
    # Replace the functions once per process: another call would wrap them again.
    if hasattr(functions, "has_our_tiles"):
        return
    functions.has_our_tiles = True
    forward = {}
    for widths, tile in _FORWARD.items():
        # The arguments after the tile are `mma_pv_is_rs` and `intra_wg_overlap`.
        forward[widths] = functions.FwdConfig(*tile, True, True)
    backward = {}
    for widths, settings in _BACKWARD.items():
        backward[widths] = functions.BwdConfig(*settings)

    selectors = {
        "_tile_size_fwd_sm90": forward,
        "_tile_size_bwd_sm90": backward,
    }
    for name, ours in selectors.items():
        theirs = getattr(functions, name)
        setattr(functions, name, _with_tiles(ours, theirs))


def _with_tiles(
    ours: dict[tuple[int, int], object], theirs: Callable[..., object]
) -> Callable[..., object]:
    """Return a function that selects tile sizes by key and value width: from `ours`, else by
    `theirs`.
    """

    def select(
        head_dim: int,
        head_dim_v: int,
        *arguments: object,
        **named: object,
    ) -> object:
        """Return the tile sizes for these widths of keys and values.

        The other arguments are passed on to version 4's function.
        """
        if (head_dim, head_dim_v) in ours:
            return ours[head_dim, head_dim_v]
        return theirs(head_dim, head_dim_v, *arguments, **named)

    return select
