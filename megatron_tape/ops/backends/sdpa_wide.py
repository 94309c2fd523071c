"""torch's scaled_dot_product_attention, called once with the value [v | z], by cuDNN's kernels alone.

cuDNN's kernels for Hopper and Blackwell take values of up to 128 with narrower keys, forward and backward. torch's
other kernels do not, or keep all S x S scores, so torch raises where cuDNN has no kernel.
"""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import sdpa


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    if sdpa.needs_mask(x) or len(x.q_SBHD) == 1:
        # cuDNN has no kernel for a single key, and none of those for masks is used (see `sdpa`). For a single query,
        # putting the cached values and states together would take longer than attention.
        return sdpa.attend(x)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa.attend_to(x, *x.with_one_value())
