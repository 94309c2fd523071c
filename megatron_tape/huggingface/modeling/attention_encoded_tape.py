"""Attention with scores changed by a positional encoding (a bias, forget gates or rescored rows),
in plain torch.

Axes: B batch, S new tokens, T all tokens, H query heads, G key/value heads, D head dimension, E
size of the values, r queries of a block, t keys up to the block's last query (`num_keys`).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 128
"""Queries per block."""


def under_autocast(x: Tensor) -> bool:
    """Return whether autocast is enabled on the device of x."""
    # torch raises RuntimeError for the meta device, which has no autocast.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast on the device of x.

    Encodings choose their own precision. The backward passes of their autograd functions do not run
    under autocast, so neither may the forward passes.
    """
    if under_autocast(x):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def attend_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    positions,
    dropout: float,
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages of the values (B, S, H, E) and, if `with_weights`, the attention weights
    (B, H, S, T).

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, E). The mask (B or 1, 1, S, T) is boolean
    (True: attend) or additive. The queries are the last S of T tokens; attention is causal.
    `positions` (`PositionInputs`) changes the scores of all tokens in up to three ways: `rescore`
    replaces them, `bias` is added, and so are the sums of `log_gate_TBH`, the logarithms of forget
    gates. Each may be None. Computes at least in float32. Training recomputes blocks in the
    backward pass, and saves no S x T tensors.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    S = query.shape[2]
    T = key.shape[2]
    q, k, v = (x.to(dtype) for x in (query, key, value))

    bias = positions.bias
    if bias is not None:
        bias = bias.in_float32()
    rescore = positions.rescore
    rescore_tensors = ()
    if rescore is not None:
        rescore = rescore.in_float32()
        # `rescore.rows` takes these tensors in every block, so they are computed once.
        rescore_tensors = rescore.prepared(q, k)

    sums_BHT = None
    if positions.log_gate_TBH is not None:
        # The sums over all tokens up to each one. They are in float64, since in long sequences
        # float32 would lose the differences between neighboring tokens.
        sums_BHT = positions.log_gate_TBH.double().cumsum(0).permute(1, 2, 0)

    def attend_block(q: Tensor, tokens: slice) -> tuple[Tensor, Tensor | None]:
        """Return the averages (B, H, r, E), and the weights (B, H, r, T) or None, of the queries
        `q` (B, H, r, D) at these indices among the T tokens.
        """
        num_keys = tokens.stop
        keys = torch.arange(num_keys, device=q.device)
        # (1, 1, r, t): a query attends to the keys up to its own token.
        attended = (keys <= keys[tokens, None])[None, None]
        additive = None
        if attention_mask is not None:
            # The rows of the mask are the new tokens, but `tokens` counts all tokens.
            mask_rows = slice(tokens.start - T + S, num_keys - T + S)
            mask = attention_mask.expand(-1, -1, S, T)[:, :, mask_rows, :num_keys]
            if mask.dtype != torch.bool:
                # `rescore` needs a boolean mask. Values near the minimum mask a key.
                additive = mask
                mask = mask > torch.finfo(mask.dtype).min / 2
            attended = attended & mask

        k_BGtD = k[:, :, :num_keys]
        B, H, r, D = q.shape
        G = k.shape[1]
        scores = 0.0
        if rescore is None or rescore.takes_scores:
            # The queries of all heads of a group, H / G r, are the rows of one matrix.
            scaled_q = q.reshape(B, G, -1, D) * D**-0.5
            scores = (scaled_q @ k_BGtD.mT).view(B, H, r, num_keys)
        if rescore is not None:
            scores = rescore.rows(
                scores if rescore.takes_scores else None,
                q,
                k_BGtD,
                attended,
                tokens,
                *rescore_tensors,
            )

        if bias is not None:
            # The bias for the block's queries and their keys.
            scores = scores + bias.of(tokens, slice(0, num_keys))
        if sums_BHT is not None:
            # The scores get the sum of the log gates after key j up to query i. Sums relative to
            # the block's first query are small for keys near it, so that float32 keeps their
            # differences. The sum of the first query cancels, so it needs no gradient.
            first_sums_BH1 = sums_BHT[..., tokens.start, None].detach()
            since_BHt = (sums_BHT[..., :num_keys] - first_sums_BH1).to(dtype)
            scores = scores + (since_BHt[..., tokens, None] - since_BHt[..., None, :])
        if additive is not None:
            scores = scores + additive

        # Queries at padding attend to no key; their averages must still be finite.
        weights = scores.masked_fill(~attended, torch.finfo(dtype).min).softmax(-1)
        weights = F.dropout(weights, dropout)
        averages = (weights.view(B, G, -1, num_keys) @ v[:, :, :num_keys]).view(B, H, r, -1)
        if not with_weights:
            return averages, None
        return averages, weights

    outputs = []
    # Attention weights of all queries have S x T elements anyway.
    queries_per_block = S if with_weights else ROWS
    for start in range(0, S, queries_per_block):
        stop = min(start + queries_per_block, S)
        tokens = slice(T - S + start, T - S + stop)
        inputs = q[:, :, start:stop], tokens
        if torch.is_grad_enabled():
            # Recomputing a block with dropout requires the same random numbers.
            outputs.append(
                checkpoint(
                    attend_block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0
                )
            )
        else:
            outputs.append(attend_block(*inputs))

    averages = torch.cat([average for average, _ in outputs], dim=2).to(value.dtype)
    # With `with_weights`, there is only one block. Without it, the weights of every block are None.
    weights = outputs[0][1]
    if weights is not None:
        weights = weights.to(value.dtype)
    return averages.transpose(1, 2), weights
