"""Reference attention, which materializes the S x T scores of each head."""

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs, with_sink
from megatron_tape.ops.visibility import causal_mask


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    # Kernels are compared with this backend, so it does not rotate with a kernel either.
    q, k, *values = x.prepared(fused=False)
    S, _, H, D = q.shape
    T, _, G, _ = k.shape
    tokens = slice(T - S, T)
    q_BHSD = q.permute(1, 2, 0, 3)
    k_BGTD = k.permute(1, 2, 0, 3)
    bounds = None
    if x.visibility is not None:
        bounds = x.visibility.bounds_2BT
    seen = causal_mask(S, T, bounds, q.device)

    # Each key/value group serves H / G adjacent heads.
    heads_per_group = H // G
    k_BHTD = k_BGTD.repeat_interleave(heads_per_group, dim=1)
    scores = q_BHSD @ k_BHTD.mT / D**0.5
    if x.rescore is not None:
        tensors = x.rescore.prepared(q_BHSD, k_BGTD)
        scores = x.rescore.rows(
            scores,
            q_BHSD,
            k_BGTD,
            seen,
            tokens,
            *tensors,
        )
    if x.bias is not None:
        scores = scores + x.bias.of(tokens, slice(0, T))

    scores = scores.masked_fill(~seen, float("-inf"))
    p = with_sink(scores, x.sink_H).softmax(-1)[..., :T].to(q.dtype)
    averages = []
    for value in values:
        value_TBHD = value.repeat_interleave(heads_per_group, dim=2)
        average_SBHD = torch.einsum("bhst,tbhd->sbhd", p, value_TBHD)
        averages.append(average_SBHD)
    return tuple(averages)
