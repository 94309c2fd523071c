"""Sizes of what is computed in parts. Imports no torch."""

LOGITS = 2**26
"""How many logits the loss holds at once on one GPU, but at least those of one token: 256 MiB in fp32."""


def chunk_size(vocabulary: int) -> int:
    """Return of how many tokens the loss holds the logits at once, with this rank's part of the vocabulary."""
    return max(1, LOGITS // vocabulary)
