"""Attention of TAPE models, which averages the position state together with the values.

Axes: B batch, S new tokens, T all tokens, H query heads, G key/value heads, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def rotate(x: Tensor, z: Tensor) -> Tensor:
    """Multiply x (..., D) by z (..., D) as complex numbers, both stored as [real | imaginary]."""
    x_re, x_im = x.chunk(2, dim=-1)
    z_re, z_im = z.chunk(2, dim=-1)
    return torch.cat([torch.addcmul(x_re * z_re, x_im, z_im, value=-1), torch.addcmul(x_re * z_im, x_im, z_re)], dim=-1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attend with explicit scores; values may have any width, and are not copied, like keys, for each head of a group.

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, E), mask (B or 1, 1, S, T), boolean (True is seen) or
    additive. Returns the averages (B, S, H, E) and the attention map (B, H, S, T).
    """
    B, H, S, _ = query.shape
    G = key.shape[1]
    scores = torch.matmul(query.reshape(B, G, -1, query.shape[-1]) * scaling, key.transpose(2, 3)).view(B, H, S, -1)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = F.dropout(weights, dropout, training=module.training)
    averages = torch.matmul(weights.view(B, G, -1, weights.shape[-1]), value).view(B, H, S, -1)
    return averages.transpose(1, 2), weights


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[list[Tensor], Tensor | None]:
    """Return the averages of value's parts of width D, each (B, S, H, D), and the attention map or None.

    query (B, H, S, D), key (B, G, T, D) and value (B, G, T, D or 2 D); the mask is in the form that the attention
    implementation of `module.config` expects.
    """
    # The paged implementations differ in the cache, which has been updated, and expect the mask to be given.
    implementation, D = module.config._attn_implementation.removeprefix("paged|"), query.shape[-1]
    # The fast kernels require values as wide as keys, so they run once for each part; a single query has so little
    # to do that reading the keys once is faster.
    if implementation == "eager" or (implementation == "sdpa" and query.shape[2] == 1):
        averages, weights = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return averages.split(D, dim=-1), weights
    attention = ALL_ATTENTION_FUNCTIONS[implementation]
    parts = value.split(D, dim=-1)
    return [attention(module, query, key, part, attention_mask, **kwargs)[0] for part in parts], None
