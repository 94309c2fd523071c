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
    """Return the weighted average of the value, (S, B, H, D)."""
    q, k = x.rotated()
    S = q.shape[0]
    T = k.shape[0]
    if x.packing is None:
        mask = _causal_mask(S, T, q.device)
    else:
        mask = x.packing.cached(
            ("blocks", S),
            lambda: block_mask(
                S,
                T,
                x.packing.bounds_2BT[0],
                q.device,
            ),
        )

    # Compiling takes seconds for each length. Short sequences run uncompiled, as their scores take
    # little memory.
    function = _compiled() if q.is_cuda and T > BLOCK else flex_attention

    def average(
        q_BHSD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor]:
        score = None
        if x.bias is not None:
            of_pair = x.bias.score
            offset = T - S

            def score(
                score: Tensor,
                b: Tensor,
                h: Tensor,
                query: Tensor,
                key: Tensor,
            ) -> Tensor:
                return score + of_pair(b, h, query + offset, key, *tensors)

        grouped = q_BHSD.shape[1] != k_BGTD.shape[1]
        return (function(q_BHSD, k_BGTD, v_BGTD, score, mask, enable_gqa=grouped),)

    tensors = () if x.bias is None else x.bias.tensors
    (averaged,) = x.run(
        average,
        *(y.permute(1, 2, 0, 3) for y in (q, k, *x.values())),
        *tensors,
    )
    return (averaged.permute(2, 0, 1, 3),)


@functools.cache
def _compiled():
    import torch._dynamo

    # Beyond these limits torch would run the uncompiled function, which materializes all scores.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, RECOMPILATIONS)
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _causal_mask(S: int, T: int, device: torch.device) -> BlockMask:
    return block_mask(S, T, None, device)


def block_mask(
    S: int,
    T: int,
    starts_BT: Tensor | None,
    device: torch.device,
) -> BlockMask:
    """Return the causal block mask of the last S of T tokens, restricted to each query's document.

    `starts_BT` holds the start of each token's document; with None, each sequence is one document,
    and all sequences share the mask. Blocks are classified by their first and last tokens, without
    S x T matrices.
    """
    first, keys = (torch.arange(0, length, BLOCK, device=device) for length in (S, T))
    last = (first + BLOCK - 1).clamp(max=S - 1)
    # Starts never decrease, so the first query of a block attends to the earliest keys.
    if starts_BT is None:
        starts = torch.zeros(1, T, dtype=torch.int32, device=device)
    else:
        starts = starts_BT

    earliest, latest = (starts[:, None, T - S + x, None] for x in (first, last))
    ends = keys + BLOCK - 1
    some = (keys <= (T - S + last)[:, None]) & (ends >= earliest)
    whole = (
        (ends <= (T - S + first)[:, None])
        & (keys >= latest)
        & ((first + BLOCK <= S)[:, None] & (ends < T))
    )

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        past = key <= query + (T - S)
        if starts_BT is None:
            return past
        return past & (key >= starts_BT[b, query + (T - S)])

    partial, full = (
        (x.sum(-1, dtype=torch.int32), x.int().argsort(dim=-1, descending=True, stable=True).int())
        for x in (some & ~whole, whole)
    )
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(S, T)
    )
