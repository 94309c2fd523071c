"""flash-linear-attention's kernels: forget gates (Forgetting Transformer), reflections (PaTH), and
decays and sinks (Wall attention).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.decay import Decay
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
    sink = None
    # Tensors of all tokens that follow queries, keys and values.
    changes: list[Tensor | None]
    if isinstance(x.rescore, Decay) or x.sink_H is not None:
        from fla.ops.wall_attn import parallel_wall_attn

        kernel = partial(_wall, partial(parallel_wall_attn, window_size=x.window))
        # This kernel requires decays.
        log_decay = torch.zeros(q.shape, device=q.device)
        if isinstance(x.rescore, Decay):
            log_decay = _with_last_sums_zero(x.rescore.log_decay_TBHD, x).float()
        changes = [log_decay, gates]
        sink = x.sink_H
    elif isinstance(x.rescore, Reflections):
        from fla.ops.path_attn import parallel_path_attn

        kernel = parallel_path_attn
        # This kernel also divides the sums of gates by sqrt(D).
        if gates is not None:
            gates = gates * D**0.5
        changes = [*(y.float() for y in x.rescore.w_and_beta()), gates]
    else:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        kernel = parallel_forgetting_attn
        if x.window is not None:
            kernel = partial(kernel, window_size=x.window)
        # This kernel requires gates; the logarithm of an open gate is zero.
        if gates is None:
            gates = torch.zeros(S, B, H, device=q.device)
        changes = [gates]

    # The kernels expect the sequences first, (B, S, ...). The gates are their last argument; that
    # for forget gates alone may not be called without them.
    tensors = [q, k, v, *changes]
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
    if sink is not None:
        kernel = partial(kernel, has_sink=True)
        tensors.append(sink)

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


def _wall(
    kernel: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *rest: Tensor,
    has_sink: bool = False,
    **options: Tensor,
) -> Tensor:
    """Return the average of Wall attention's kernel. `rest` are the gates, unless there are none,
    and then the sink with `has_sink`.
    """
    gates = sink = None
    if has_sink:
        sink = rest[-1]
    if len(rest) > has_sink:
        gates = rest[0]
    return kernel(q, k, v, log_decay, g_scalar=gates, sink_bias=sink, **options)


def _with_last_sums_zero(log_decay_TBHD: Tensor, x: AttentionInputs) -> Tensor:
    """Return the decays, with that of each document's first token replaced so that all sum to zero.

    No score contains the decay of a first token. fla-core 0.6.0 pads the last tokens of a document
    to a block of queries. It multiplies their zeros by the exponential of the difference between
    zero and the sum of the block's first token, so that gradients would be NaN if the sum is less
    than -88.
    """
    sums_TBHD = log_decay_TBHD.detach().cumsum(0, dtype=torch.float64)
    S, B = log_decay_TBHD.shape[:2]
    tokens = torch.arange(S, device=log_decay_TBHD.device)
    if x.documents is None:
        starts_TB = tokens.new_zeros(S, B)
        ends_TB = starts_TB + S
    else:
        starts_TB, ends_TB = x.documents.documents_2BT.mT.long()
    index = (ends_TB - 1)[..., None, None].expand_as(sums_TBHD)
    of_others = sums_TBHD.gather(0, index) - sums_TBHD
    is_first = (tokens[:, None] == starts_TB)[..., None, None]
    return torch.where(is_first, -of_others.to(log_decay_TBHD.dtype), log_decay_TBHD)
