"""torch's scaled_dot_product_attention (SDPA), called once per value.

On most devices, its fast kernels require values as wide as the keys; `sdpa_wide` is for devices
whose kernels do not. Forward and backward together, two calls take 14 matrix products of S x S x D.
One pass over [v | z] would take 10, and attention without z takes 7.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_tape.ops.attention_inputs import AttentionInputs, split
from megatron_tape.ops.bias import NEAR, Bias
from megatron_tape.ops.visibility import additive_mask

_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    return attend_rotated(x, *x.prepared())


def attend_rotated(
    x: AttentionInputs,
    q: Tensor,
    k: Tensor,
    *values: Tensor,
) -> tuple[Tensor, ...]:
    """Return the averages of `values`, (S, B, H, D) each: v and z, or one [v | z]. q and k are
    already rotated.
    """
    mask = _mask(x)
    heads_per_group = q.shape[2] // k.shape[2]
    keys_and_values = [k, *values]
    if mask is not None and heads_per_group > 1:
        # SDPA's kernels with a mask do not support groups; its fallback would materialize all S x S
        # scores.
        keys_and_values = [y.repeat_interleave(heads_per_group, dim=2) for y in keys_and_values]
    # SDPA expects the tokens after the heads, (B, H, S, D).
    tensors = [y.permute(1, 2, 0, 3) for y in (q, *keys_and_values)]

    with _without_cudnn(tensors[0], mask):
        # `run` may request the gradients of all its tensors. A mask with a bias is one of them. A
        # mask without a bias is not: it needs no gradient, and no fast kernel computes one.
        if x.bias is None:
            averages = x.run(partial(_averages, mask), *tensors)
        else:
            averages = x.run(_averages, mask, *tensors)

    outputs: list[Tensor] = []
    for average in averages:
        outputs += split_average(average.permute(2, 0, 1, 3), q.shape[-1])
    return tuple(outputs)


def split_average(average: Tensor, width: int) -> tuple[Tensor, ...]:
    """Return o and u of the average [o | u] (S, B, H, 2 * width), or only o of an average o (S, B,
    H, width).
    """
    if average.shape[-1] == width:
        return (average,)
    return split(average, [width, width])


def _without_cudnn(q: Tensor, mask: Tensor | None) -> AbstractContextManager:
    """Disable cuDNN for masks, as its gradient of q can be NaN at lengths of 64 modulo 128 (pytorch
    issue 196678).
    """
    if mask is None or not q.is_cuda:
        return nullcontext()
    return sdpa_kernel(_WITHOUT_CUDNN)


def _averages(
    mask: Tensor | None,
    q_BHSD: Tensor,
    k_BGTD: Tensor,
    *values_BGTE: Tensor,
) -> tuple[Tensor, ...]:
    """Return the averages (B, H, S, E) of the values, one call of SDPA each."""
    # A single query is the last token and attends to all keys. `is_causal` would hide all keys but
    # the first.
    return tuple(
        F.scaled_dot_product_attention(
            q_BHSD,
            k_BGTD,
            value,
            attn_mask=mask,
            is_causal=mask is None and q_BHSD.shape[2] > 1,
            enable_gqa=q_BHSD.shape[1] != k_BGTD.shape[1],
        )
        for value in values_BGTE
    )


def needs_mask(x: AttentionInputs) -> bool:
    """Return whether SDPA needs an explicit mask.

    Without bias, documents or window, two cases need none: a single query attends to all keys, and
    for equally many queries and keys, SDPA applies the causal mask itself.
    """
    return (
        x.bias is not None
        or x.visibility is not None
        or x.q_SBHD.shape[0] not in (1, x.k_TBGD.shape[0])
    )


def _mask(x: AttentionInputs) -> Tensor | None:
    """Return the bias plus minus infinity at masked pairs, (B or 1, H or 1, S, T), or None if not
    needed.
    """
    if not needs_mask(x):
        return None
    S = x.q_SBHD.shape[0]
    T = x.k_TBGD.shape[0]
    dtype = x.q_SBHD.dtype
    if x.visibility is None:
        mask = additive_mask(S, T, None, x.q_SBHD.device, dtype)
    else:
        mask = x.visibility.mask(S, dtype)
    if x.bias is None:
        return mask
    return _bias(x.bias, slice(T - S, T), T).to(dtype) + mask


def _bias(
    bias: Bias,
    rows: slice,
    keys: int,
) -> Tensor:
    """Return the bias of the queries `rows` (a slice of tokens) and all `keys` keys.

    The constants that small tiles omit are added, since the bias without them is too large to round
    to bf16.
    """
    tile = bias.of(rows, slice(0, keys))
    if bias.left_out is None or rows.stop - rows.start > NEAR:
        return tile
    left_out = bias.left_out(rows, *bias.tensors)
    # The constants are taken relative to that of the first query, as in large tiles, so that
    # numbers stay small.
    return tile + (left_out - left_out[..., :1].detach())[..., None]
