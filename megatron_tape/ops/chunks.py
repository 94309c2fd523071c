"""The size of the chunks of tokens in which the loss is computed. Imports no torch."""

from megatron_tape.ops.backends.table import BLACKWELL, CPU, HOPPER, OTHER_GPU

LOGITS = {CPU: 2**26, OTHER_GPU: 2**26, HOPPER: 2**28, BLACKWELL: 2**28}
"""Maximum number of logits per chunk on one device, by the device's generation; a chunk has at
least one token.

Larger chunks launch fewer kernels. 2^28 logits take 1 GiB in fp32, which is little on GPUs of
Hopper and Blackwell, with their 80 GB or more.
"""


def chunk_size(vocabulary: int, generation: str) -> int:
    """Return the number of tokens per chunk.

    `vocabulary` is the size of this rank's vocabulary shard, and `generation` that of the device, a
    key of `LOGITS`.
    """
    tokens = LOGITS[generation] // vocabulary
    return max(1, tokens)
