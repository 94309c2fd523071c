"""Attention in blocks of whole rows of scores, for encodings with a `Rescore`: CoPE, PaTH and
PaTH-FoX.

A row holds the scores of one query and all its keys. These encodings compute a score from several
keys of the row. Blocks are recomputed in the backward pass, so no S x T matrix is saved. The
reference is `naive.py`. Axes: S queries, T keys (the last S of them are the queries' own tokens), B
batch, H query heads, G key/value groups, r queries of a block, t keys from the first that they see
up to the last of them, D head dimension, E width of all values together.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_tape.ops.attention_inputs import AttentionInputs, with_sink
from megatron_tape.ops.visibility import causal_mask


def attend_by_rows(x: AttentionInputs, rows: int) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D), in blocks of
    `rows` queries.

    bf16 and fp16 inputs are computed in fp32.
    """
    q, k, value = x.prepared(join=True)
    D = q.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    output_dtype = value.dtype
    q_BHSD, k_BGTD, v_BGTE = (y.permute(1, 2, 0, 3).to(dtype) for y in (q, k, value))

    # Checkpoints keep what `attend_block` uses until the backward pass. If it used `x`, they would
    # keep the queries and keys before their rotation, too.
    bias = x.bias
    rescore = x.rescore
    sink_H = x.sink_H
    S = len(q)
    bounds_2BT = None
    first_seen = [0] * S
    if x.visibility is not None:
        bounds_2BT = x.visibility.bounds_2BT
        first_seen, _ = x.visibility.first_seen(S)
    tensors = rescore.prepared(q_BHSD, k_BGTD)
    offset = len(k) - S

    def attend_block(first: int) -> Tensor:
        """Return the average (r, B, H, E) of the block that starts at query `first`."""
        queries = q_BHSD[:, :, first : first + rows]
        count = queries.shape[2]
        first_token = offset + first
        stop = first_token + count
        tokens = slice(first_token, stop)
        # The first query sees the earliest keys, and keys of later tokens are not visible.
        seen_tokens = slice(first_seen[first], stop)
        keys = k_BGTD[:, :, seen_tokens]
        bounds = None
        if bounds_2BT is not None:
            bounds = bounds_2BT[..., seen_tokens] - seen_tokens.start
        seen = causal_mask(count, keys.shape[2], bounds, queries.device)

        scores = None
        if rescore.takes_scores:
            scores = _group_products(queries * D**-0.5, keys.mT)
        scores = rescore.rows(
            scores,
            queries,
            keys,
            seen,
            tokens,
            *tensors,
        )
        if bias is not None:
            scores = scores + bias.of(tokens, seen_tokens)

        scores = with_sink(scores.masked_fill(~seen, float("-inf")), sink_H)
        p = scores.softmax(-1)[..., : keys.shape[2]]
        average_BHrE = _group_products(p, v_BGTE[:, :, seen_tokens])
        return average_BHrE.permute(2, 0, 1, 3).to(output_dtype)

    blocks = [
        checkpoint(attend_block, first, use_reentrant=False, preserve_rng_state=False)
        for first in range(0, S, rows)
    ]
    # Split the averages of the concatenated values, which are D wide each.
    return torch.cat(blocks).split(D, dim=-1)


def _group_products(x_BHrm: Tensor, y_BGmn: Tensor) -> Tensor:
    """Return (B, H, r, n), the product of each head with the matrix of its group."""
    B, H, r, m = x_BHrm.shape
    G = y_BGmn.shape[1]
    # The rows of all heads of a group form one matrix, so that the group's matrix is not repeated.
    products = x_BHrm.reshape(B, G, H // G * r, m) @ y_BGmn
    return products.view(B, H, r, -1)
