"""Weights that are made and written one at a time, so that no more than one of them is ever in memory."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.errors import UserError

_MOST_ELEMENTS = 1 << 45


def on_meta(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors without memory, which announce a file's contents to `write_safetensors`.

    Raises UserError for one that no machine can hold.
    """
    for name, shape in shapes.items():
        if math.prod(shape) > _MOST_ELEMENTS:
            problem = f"would have the shape {tuple(shape)!s:.100}, more numbers than any machine can hold"
            raise UserError(name[:100], problem, "give settings that belong to the weights")
    return {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}


def in_parts(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Cut tensors, in their order, into parts of at most `max_bytes`; a larger tensor is a part of its own."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > max_bytes and parts[-1]:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor
    return parts


def with_progress(tensors: Iterable[Tensor], announced: Iterable[Tensor]) -> Generator[Tensor, None, None]:
    """Yield the tensors, and show how many of the `announced` bytes are written. Close it when the last is written."""
    sizes = [tensor.nbytes for tensor in announced]
    progress, written = command_line.Progress(sum(sizes)), 0
    try:
        for tensor, size in zip(tensors, sizes):
            yield tensor
            written += size
            progress.update(written, lambda _: f"writing weights: {written / 1e9:,.2f} GB")  # noqa: B023
    finally:
        progress.end()
