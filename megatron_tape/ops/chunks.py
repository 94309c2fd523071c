"""Chunk sizes. Imports no torch."""

LOGITS = 2**26
"""Logits that the loss computes at once on one GPU, 256 MiB in fp32; at least those of one token."""


def chunk_size(vocabulary: int) -> int:
    """Return the number of tokens whose logits the loss computes at once, given this rank's vocabulary shard."""
    return max(1, LOGITS // vocabulary)
