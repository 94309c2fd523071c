"""flash-linear-attention's kernels: forget gates (Forgetting Transformer) and reflections
(PaTH).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.householder import Reflections


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return a tuple with the weighted average of v, (S, B, H, D). Raises ValueError for fewer
    queries than keys.
    """
    q, k, v = x.prepared()
    S, B, H, D = q.shape
    if S != k.shape[0]:
        raise ValueError(
            f"backend is fla, which needs as many keys ({len(k)}) as queries ({S}); use tiled"
        )

    gates = x.log_gate_TBH
    if gates is not None:
        gates = gates.float()
    if isinstance(x.rescore, Reflections):
        from fla.ops.path_attn import parallel_path_attn

        kernel = parallel_path_attn
        reflections = [y.float() for y in x.rescore.w_and_beta()]
        # This kernel also divides the sums of gates by sqrt(D).
        if gates is not None:
            gates = gates * D**0.5
    else:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        kernel = parallel_forgetting_attn
        if x.window is not None:
            kernel = partial(kernel, window_size=x.window)
        reflections = []
        # This kernel requires gates; the logarithm of an open gate is zero.
        if gates is None:
            gates = torch.zeros(S, B, H, device=q.device)

    # The kernels expect the sequences first, (B, S, ...). The gates are their last argument; only
    # the kernel for reflections may be called without them.
    tensors = [q, k, v, *reflections, gates]
    tensors = [y.transpose(0, 1).contiguous() for y in tensors if y is not None]
    if x.documents is not None:
        # `cached` returns the same tensor object in all layers, so that fla reuses the block counts
        # that it caches by object.
        def key_bounds() -> Tensor:
            """Return cu_seqlens_k, which is the second argument of flash-attn's kernels."""
            _, cu_seqlens_k, *_ = x.documents.varlen_arguments(S)
            return cu_seqlens_k.long()

        cu_seqlens = x.documents.cached(("fla", S), key_bounds)
        kernel = partial(kernel, cu_seqlens=cu_seqlens)
        # All documents of the batch are passed as one sequence.
        tensors = [y.flatten(0, 1)[None] for y in tensors]

    (averaged,) = x.run(partial(_average, kernel), *tensors)
    if x.documents is not None:
        averaged = averaged[0].unflatten(0, (B, S))
    return (averaged.transpose(0, 1),)


def _average(kernel: Callable, *tensors: Tensor) -> tuple[Tensor]:
    """Return the kernel's average as a tuple; the kernel for reflections also returns transformed
    keys.
    """
    results = kernel(*tensors)
    if isinstance(results, tuple):
        return (results[0],)
    return (results,)
