"""Helpers to write weights one at a time, so that at most one is in memory."""

from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.model.names import HUGGING_FACE_OUTPUT

VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", HUGGING_FACE_OUTPUT)
"""Hugging Face's names of the weights with one row for each token of the vocabulary."""


def on_meta(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors without data, of these shapes, by name. `write_safetensors` takes them as the
    description of a file's contents.
    """
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def in_parts(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into parts of at most `max_bytes` each. A tensor larger than that
    has its own part. Without tensors, there is one empty part.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > max_bytes and parts[-1]:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor
    return parts


def with_progress(
    tensors: Iterable[Tensor], announced: Iterable[Tensor]
) -> Generator[Tensor, None, None]:
    """Yield `tensors`, and report how many bytes of their total size are written.

    `announced` has tensors of the same sizes in the same order, on the meta device. After the last
    write, the caller must close the generator, which ends the progress report.
    """
    sizes = [tensor.nbytes for tensor in announced]
    progress = command_line.Progress(sum(sizes))
    written = 0
    try:
        for tensor, size in zip(tensors, sizes):
            yield tensor
            # The caller asks for the next tensor when it has written this one.
            written += size
            # The message gets the seconds since the start, which it does not show.
            progress.update(written, lambda _: f"writing weights: {written / 1e9:,.2f} GB")  # noqa: B023
    finally:
        progress.end()
