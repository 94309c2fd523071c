"""Attention in plain torch: within sliding windows, and with scores changed by a positional
encoding (a bias, forget gates or rescored rows).

Axes: B batch, S new tokens, T tokens with keys (the last S of them are the new tokens; the cache of
a layer with a window may have dropped earlier ones), H query heads, G key/value heads, D head
dimension, E size of the values, r queries of a block, t keys of a block.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention_tape import attend

ROWS = 128
"""Queries per block. Without changes of scores, a block has as many queries as the window has
tokens if that is more.
"""


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


def attend_in_window(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    window: int | None,
    **kwargs,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the results of `attend`, in which a token attends only to the last `window` tokens,
    including itself.

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, D or 2 D). The mask (B or 1, 1, S, at
    least T) is that of a layer without a window, which may have earlier keys, or None. Computes
    blocks of queries, so that no S x T mask is needed.
    """
    S = query.shape[2]
    T = key.shape[2]
    if attention_mask is not None:
        attention_mask = attention_mask[..., -T:]
    if window is None or window >= T:
        return attend(module, query, key, value, attention_mask, **kwargs)

    # The attention weights of all queries and keys have S x T elements, so they need one block.
    with_weights = module.config._attn_implementation == "eager"
    queries_per_block = S if with_weights else max(ROWS, window)
    weights = None
    averages_of_blocks = []
    for start in range(0, S, queries_per_block):
        stop = min(start + queries_per_block, S)
        # The block's queries and keys, as indices among the T tokens.
        tokens = slice(T - S + start, T - S + stop)
        keys = slice(0, tokens.stop)
        if not with_weights:
            keys = slice(first_in_window(tokens, window), tokens.stop)
        mask = attended_keys(attention_mask, S, T, tokens, keys, window, query.device)
        averages, weights = attend(
            module, query[:, :, start:stop], key[:, :, keys], value[:, :, keys], mask, **kwargs
        )
        averages_of_blocks.append(averages)
    averages = [torch.cat(parts, dim=1) for parts in zip(*averages_of_blocks, strict=True)]
    # With weights, there is only one block.
    return averages, weights


def first_in_window(tokens: slice, window: int) -> int:
    """Return the index of the first token to which any of these tokens attends."""
    return max(tokens.start - window + 1, 0)


def attended_keys(
    attention_mask: Tensor | None,
    S: int,
    T: int,
    tokens: slice,
    keys: slice,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Return the mask (B or 1, 1, r, t), boolean or additive, of the queries at `tokens` for these
    keys. Both are indices among the T tokens.

    It is the mask (B or 1, 1, S, T), which has a row for each of the last S tokens, restricted to
    keys up to the query and, with a window, to the last `window` of them.
    """
    rows = torch.arange(tokens.start, tokens.stop, device=device)[:, None]
    columns = torch.arange(keys.start, keys.stop, device=device)
    attended = columns <= rows
    if window is not None:
        attended = attended & (columns > rows - window)
    attended = attended[None, None]
    if attention_mask is None:
        return attended

    of_new_tokens = slice(tokens.start - T + S, tokens.stop - T + S)
    mask = attention_mask.expand(-1, -1, S, T)[:, :, of_new_tokens, keys]
    if mask.dtype == torch.bool:
        return mask & attended
    return mask.masked_fill(~attended, torch.finfo(mask.dtype).min)


def attend_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    positions,
    dropout: float,
    with_weights: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the averages of the values (B, S, H, E) and, if `with_weights`, the attention weights
    (B, H, S, T).

    query (B, H, S, D), key (B, G, T, D), value (B, G, T, E). The mask (B or 1, 1, S, at least T) is
    boolean (True: attend) or additive. The queries are the last S of T tokens; attention is causal
    and, with `window`, restricted to the last `window` tokens. `positions` (`PositionInputs`)
    changes the scores in up to four ways: `rescore` replaces them, `bias` is added, and so are the
    sums of `log_gate_TBH`, the logarithms of forget gates; `sink_H` has the logit of a sink, which
    takes a part of the weights. Each may be None. Bias, gates and `rescore` are those of the T
    tokens. Computes at least in float32. Training recomputes blocks in the backward pass, and saves
    no S x T tensors.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    S = query.shape[2]
    T = key.shape[2]
    if attention_mask is not None:
        attention_mask = attention_mask[..., -T:]
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
        keys = slice(0, tokens.stop)
        # `rescore` computes the scores of all keys.
        if window is not None and rescore is None and not with_weights:
            keys = slice(first_in_window(tokens, window), tokens.stop)
        attended = attended_keys(attention_mask, S, T, tokens, keys, window, q.device)
        additive = None
        if attended.dtype != torch.bool:
            # `rescore` needs a boolean mask. Values near the minimum mask a key.
            additive = attended
            attended = attended > torch.finfo(attended.dtype).min / 2

        k_BGtD = k[:, :, keys]
        B, H, r, D = q.shape
        G = k.shape[1]
        scores = 0.0
        if rescore is None or rescore.takes_scores:
            # The queries of all heads of a group, H / G r, are the rows of one matrix.
            scaled_q = q.reshape(B, G, -1, D) * D**-0.5
            scores = (scaled_q @ k_BGtD.mT).view(B, H, r, -1)
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
            scores = scores + bias.of(tokens, keys)
        if sums_BHT is not None:
            # The scores get the sum of the log gates after key j up to query i. Sums relative to
            # the block's first query are small for keys near it, so that float32 keeps their
            # differences. The sum of the first query cancels, so it needs no gradient.
            first_sums_BH1 = sums_BHT[..., tokens.start, None].detach()
            of_queries = (sums_BHT[..., tokens] - first_sums_BH1).to(dtype)
            of_keys = (sums_BHT[..., keys] - first_sums_BH1).to(dtype)
            scores = scores + (of_queries[..., None] - of_keys[..., None, :])
        if additive is not None:
            scores = scores + additive

        # Queries at padding attend to no key; their averages must still be finite.
        scores = scores.masked_fill(~attended, torch.finfo(dtype).min)
        if positions.sink_H is not None:
            sinks = positions.sink_H.to(dtype)[:, None, None].expand(B, -1, r, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : k_BGtD.shape[2]]
        weights = F.dropout(weights, dropout)
        averages = (weights.view(B, G, H // G * r, -1) @ v[:, :, keys]).view(B, H, r, -1)
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
