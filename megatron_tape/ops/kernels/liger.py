"""Liger's kernels of the vocabulary-parallel cross-entropy (Hsu et al., 2024), called for one chunk
of tokens.

They read logits in any dtype and compute in float32; the caller sums over ranks. Imports
liger-kernel.

Axes: n tokens of a chunk, V this rank's shard of the vocabulary.
"""

import torch
import triton
from liger_kernel.ops.vocab_parallel_cross_entropy import (
    liger_vocab_parallel_ce_backward_kernel,
    liger_vocab_parallel_ce_forward_kernel,
)
from torch import Tensor

BLOCK = 32768
"""Largest number of logits that a program loads at once. It and the 32 warps of a program are those
of Liger's own calls.
"""
NOTHING_IGNORED = -1
"""The label of tokens that the kernels skip; no token has it."""


def exponentials(
    logits_nV: Tensor,
    largest_n: Tensor,
    labels_n: Tensor,
    first_label: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(logits - largest) (n, V), its sums (n,), and the labels' logits - largest (n,),
    all in float32.

    `largest_n` is the largest logit of each token. `labels_n` are indices into the whole
    vocabulary; this shard begins at `first_label`. The last tensor is 0 for labels of other shards.
    """
    n, V = logits_nV.shape
    results = logits_nV.new_empty(n, V, dtype=torch.float32)
    sums = results.new_empty(n)
    label_logits = results.new_empty(n)
    # Triton launches on the current device, which may be another one. Each program has one token.
    with torch.cuda.device_of(logits_nV):
        liger_vocab_parallel_ce_forward_kernel[(n,)](
            logits_nV,
            logits_nV.stride(0),
            results,
            results.stride(0),
            largest_n,
            labels_n,
            label_logits,
            sums,
            first_label,
            V,
            NOTHING_IGNORED,
            BLOCK_SIZE=_block(V),
            num_warps=32,
        )
    return results, sums, label_logits


def to_gradients(
    exponentials_nV: Tensor,
    divisors_n: Tensor,
    labels_n: Tensor,
    factors_n: Tensor,
    first_label: int,
) -> Tensor:
    """Return the logits' gradient (n, V), which overwrites the exponentials.

    Divided by `divisors_n`, the exponentials are the softmax, or its product with 1 + 2 z_loss
    log_z if the z-loss is used. `factors_n` are the gradients of the tokens' losses.
    """
    n, V = exponentials_nV.shape
    with torch.cuda.device_of(exponentials_nV):
        liger_vocab_parallel_ce_backward_kernel[(n,)](
            exponentials_nV,
            exponentials_nV.stride(0),
            divisors_n,
            labels_n,
            factors_n,
            first_label,
            V,
            NOTHING_IGNORED,
            0.0,  # without label smoothing: the amount, and the amount per label
            0.0,
            HAS_LABEL_SMOOTHING=False,
            BLOCK_SIZE=_block(V),
            num_warps=32,
        )
    return exponentials_nV


def _block(V: int) -> int:
    """Return the number of logits that a program loads at once, a power of two."""
    return min(BLOCK, triton.next_power_of_2(V))
