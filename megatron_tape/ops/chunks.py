"""The size of the chunks of tokens in which the loss is computed. Imports no torch."""

from megatron_tape.ops.backends.table import BLACKWELL, CPU, HOPPER, OTHER_GPU

LOGITS = {CPU: 2**26, OTHER_GPU: 2**26, HOPPER: 2**28, BLACKWELL: 2**28}
"""Maximum number of logits per chunk on one GPU, by generation; a chunk has at least one token.

Larger chunks need fewer kernels. 2^28 logits take 1 GiB in fp32, which is little on GPUs of Hopper
and Blackwell with at least 80 GB.
"""


def chunk_size(vocabulary: int, generation: str) -> int:
    """Return the number of tokens per chunk.

    `vocabulary` is the size of this rank's vocabulary shard, and `generation` that of the GPU, a
    key of `LOGITS`.
    """
    return max(1, LOGITS[generation] // vocabulary)
