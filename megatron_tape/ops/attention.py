"""Causal attention that averages several values with one attention map.

Axes: S sequence, B batch, H query heads, G key/value groups, D head dimension. Megatron keeps the sequence first.
The plain form to compare with is `megatron_tape.reference.attend`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents_BS: Tensor) -> Tensor:
    """Return the boolean mask (B, 1, S, S), True where query s may see key t: t <= s in the same document."""
    S = documents_BS.shape[1]
    causal = torch.ones(S, S, dtype=torch.bool, device=documents_BS.device).tril()
    return (causal & (documents_BS[:, :, None] == documents_BS[:, None, :]))[:, None]


def attention(
    q_SBHD: Tensor, k_SBGD: Tensor, values_SBGD: tuple[Tensor, ...], mask_B1SS: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Average every value with the map softmax(q k^T / sqrt(D)); one result (S, B, H, D) for each value.

    Causal without a mask; with one, exactly what it shows is seen. torch's SDPA leaves its fast path when a value is
    wider than the key, so it is called once per value: 2x RoPE's attention instead of the 1.5x that one call with a
    widened value would take.
    """
    heads_per_group = q_SBHD.shape[2] // k_SBGD.shape[2]
    if mask_B1SS is not None and heads_per_group > 1:
        # SDPA's kernels that take a mask know no groups; its fallback would hold all S x S scores.
        k_SBGD, *values_SBGD = (x.repeat_interleave(heads_per_group, dim=2) for x in (k_SBGD, *values_SBGD))
    q, k = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD))
    grouped = q.shape[1] != k.shape[1]
    return tuple(
        F.scaled_dot_product_attention(
            q,
            k,
            value.permute(1, 2, 0, 3),
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            enable_gqa=grouped,
        ).permute(2, 0, 1, 3)
        for value in values_SBGD
    )
