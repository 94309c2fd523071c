"""flash-linear-attention's kernels: forget gates (Forgetting Transformer)."""

import torch
from torch import Tensor

from megatron_tape.ops.inputs import AttentionInputs


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of the value, (S, B, H, D). Raises ValueError if there are fewer queries than keys."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    q, k = x.rotated()
    S, B, H, _ = q.shape
    if S != k.shape[0]:
        raise ValueError(f"backend is fla, which cannot attend from {S} queries to {k.shape[0]} keys; use tiled")
    gates = torch.zeros(S, B, H, device=q.device) if x.log_gate_TBH is None else x.log_gate_TBH.float()
    tensors = [y.transpose(0, 1).contiguous() for y in (q, k, *x.values(), gates)]
    if x.packing is None:
        return (parallel_forgetting_attn(*tensors).transpose(0, 1),)
    ends = x.packing.lengths(S)[1].long()
    averaged = parallel_forgetting_attn(*(y.flatten(0, 1)[None] for y in tensors), cu_seqlens=ends)
    return (averaged[0].unflatten(0, (B, S)).transpose(0, 1),)
