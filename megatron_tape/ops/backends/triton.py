"""The project's Triton kernels. One pass averages all values; a separate kernel rotates queries and
keys.
"""

from functools import partial

from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    # Imported here, since Triton is installed only on some systems.
    from megatron_tape.ops.kernels.triton_attention import attention

    bounds = None
    if x.visibility is not None:
        bounds = x.visibility.bounds_2BT
    kernel = partial(
        attention,
        average_state=x.average_state,
        bounds_2BT=bounds,
        rotate=x.rotate,
    )
    z = x.z_TBGD
    if z is not None:
        # Expanded before `run`, since activation checkpointing recognizes a saved tensor as an
        # input only if it has the same shape.
        z = z.expand_as(x.k_TBGD)
    return x.run(kernel, x.q_SBHD, x.k_TBGD, x.v_TBGD, z)
