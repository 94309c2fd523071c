"""torch's FlexAttention, which compiles a kernel for each bias of the scores and forms no S x T
matrices.

On CPUs it is not compiled and forms all scores, which is only good for tests. Axes: B batch, S
queries, T keys (the last S of them are the queries' own tokens), H query heads, D head dimension.
"""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_tape.ops.attention_inputs import AttentionInputs

BLOCK = 128
"""Queries and keys per block of the mask."""
RECOMPILATIONS = 1 << 16
"""Value to which torch.compile's limits of recompilations are raised."""


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return a tuple with the weighted average of v, (S, B, H, D)."""
    q, k, v = x.prepared()
    S = q.shape[0]
    T = k.shape[0]
    if x.visibility is None:
        mask = _causal_mask(S, T, q.device)
    else:
        starts_BT = x.visibility.bounds_2BT[0]
        make_mask = functools.partial(block_mask, S, T, starts_BT, q.device)
        mask = x.visibility.cached(("blocks", S), make_mask)

    # Compiling takes seconds for each length. Short sequences run uncompiled, as their scores take
    # little memory.
    function = flex_attention
    if q.is_cuda and T > BLOCK:
        function = _compiled()
    grouped = q.shape[2] != k.shape[2]
    bias_of_pair = None
    if x.bias is not None:
        bias_of_pair = x.bias.score
    offset = T - S

    def average(
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor]:
        """Return the average (B, H, S, D); `tensors` are those of the bias."""

        # FlexAttention counts queries from 0, `Bias.score` from the start of the T tokens.
        def biased(score, b, h, query, key):
            return score + bias_of_pair(b, h, query + offset, key, *tensors)

        score_mod = biased if bias_of_pair else None
        averaged = function(
            q_BHSD,
            k_BGTD,
            v_BGTD,
            score_mod,
            mask,
            enable_gqa=grouped,
        )
        return (averaged,)

    # The bias's tensors are arguments, so that `x.run` computes their gradients.
    tensors = [y.permute(1, 2, 0, 3) for y in (q, k, v)]
    if x.bias is not None:
        tensors += x.bias.tensors
    (averaged,) = x.run(average, *tensors)
    return (averaged.permute(2, 0, 1, 3),)


@functools.cache
def _compiled():
    """Return `flex_attention` as a function that torch compiles for each bias and shape."""
    import torch._dynamo

    # When the number of recompilations reaches one of these limits, torch runs the uncompiled
    # function, which materializes all scores.
    config = torch._dynamo.config
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, limit, max(getattr(config, limit), RECOMPILATIONS))
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _causal_mask(S: int, T: int, device: torch.device) -> BlockMask:
    """Return `block_mask` without bounds, the same object in all layers."""
    return block_mask(S, T, None, device)


def block_mask(
    S: int,
    T: int,
    starts_BT: Tensor | None,
    device: torch.device,
) -> BlockMask:
    """Return the block mask of the last S of T tokens, which attend to the keys from `starts_BT` on
    and up to their own.

    With None, they attend from the first key on, and all sequences share the mask. Blocks are
    classified by their first and last tokens, without S x T matrices.
    """
    offset = T - S
    # The first and last tokens of each block of queries, and of each block of keys.
    first_query = torch.arange(offset, T, BLOCK, device=device)[:, None]
    last_query = (first_query + BLOCK - 1).clamp(max=T - 1)
    first_key = torch.arange(0, T, BLOCK, device=device)
    last_key = first_key + BLOCK - 1

    # Starts never decrease, so the first query of a block attends to the earliest keys. `earliest`,
    # `latest` and the two masks below are (B or 1, 1, query blocks, key blocks or 1).
    starts = starts_BT
    if starts is None:
        starts = torch.zeros(1, T, dtype=torch.int32, device=device)
    earliest = starts[:, None, first_query]
    latest = starts[:, None, last_query]
    visible_in_part = (first_key <= last_query) & (last_key >= earliest)
    visible = (last_key <= first_query) & (first_key >= latest)
    # Blocks that extend beyond the last token are not visible as a whole, so they need the mask.
    visible = visible & (first_query + BLOCK <= T) & (last_key < T)

    def seen(b, h, query, key):
        """Return whether a query attends to a key, given their 0-d indices."""
        past = key <= query + offset
        if starts_BT is None:
            return past
        return past & (key >= starts_BT[b, query + offset])

    return BlockMask.from_kv_blocks(
        *_counts_and_indices(visible_in_part & ~visible),
        *_counts_and_indices(visible),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(S, T),
    )


def _counts_and_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the number of key blocks that are True, and the indices of
    all key blocks, those that are True first.

    `blocks` is (B or 1, 1, query blocks, key blocks).
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
