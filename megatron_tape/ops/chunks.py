"""The size of the chunks of tokens in which the loss is computed. Imports no torch."""

LOGITS = 2**26
"""Maximum number of logits per chunk on one GPU, 256 MiB in fp32; a chunk has at least one token.
"""


def chunk_size(vocabulary: int) -> int:
    """Return the number of tokens per chunk; `vocabulary` is the size of this rank's vocabulary
    shard.
    """
    return max(1, LOGITS // vocabulary)
