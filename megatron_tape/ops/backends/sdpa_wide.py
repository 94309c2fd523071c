"""torch's scaled_dot_product_attention, called once with the value [v | z] and restricted to
cuDNN's kernels.

On Hopper and Blackwell, cuDNN supports values of width up to 128 that are wider than the keys,
forward and backward. torch's other kernels do not, or save all S x S scores, so torch raises an
error if cuDNN has no kernel.
"""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import sdpa


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D)."""
    if sdpa.needs_mask(x) or len(x.q_SBHD) == 1:
        # cuDNN has no kernel for a single key, and its kernels with masks are avoided (see
        # `sdpa._without_cudnn`). For a single query, concatenating the cached values and states
        # would take longer than attention.
        return sdpa.attend(x)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa.attend_rotated(x, *x.prepared(join=True))
