"""torch's scaled_dot_product_attention with cuDNN's kernels and no others: where cuDNN has none, torch raises."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import sdpa


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    if x.k_TBGD.shape[0] == 1:  # for which cuDNN has no kernel
        return sdpa.attend(x)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa.attend(x)
