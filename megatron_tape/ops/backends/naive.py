"""Reference attention, which materializes the S x T scores of each head."""

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.packing import causal_mask


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    # Kernels are compared with this backend, so it uses none.
    q, k = x.rotated(fused=False)
    k_BGTD = k.permute(1, 2, 0, 3)
    S = q.shape[0]
    T = k.shape[0]
    D = q.shape[3]
    per_group = q.shape[2] // k.shape[2]
    k, *values = (y.repeat_interleave(per_group, dim=2) for y in (k, *x.values()))
    q_BHSD = q.permute(1, 2, 0, 3)
    k_BHTD = k.permute(1, 2, 0, 3)
    seen = causal_mask(S, T, None if x.packing is None else x.packing.bounds_2BT, q.device)
    scores = q_BHSD @ k_BHTD.mT / D**0.5
    if x.rescore is not None:
        tensors = x.rescore.prepared(q_BHSD, k_BGTD)
        scores = x.rescore.rows(scores, q_BHSD, k_BGTD, seen, slice(T - S, T), *tensors)
    if x.bias is not None:
        scores = scores + x.bias.of(slice(T - S, T), slice(0, T))
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
    return tuple(torch.einsum("bhst,tbhe->sbhe", p, value) for value in values)
