"""Safetensors files written one tensor at a time, so that no more than one of them is ever in memory.

The format: eight bytes with the header's length, a JSON header that gives every tensor's type, shape and place, and the
tensors' bytes without gaps. Since shapes are known beforehand, the header is written first.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_tape.checkpoint.index import Place

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def size_in_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


class TensorFile:
    """A safetensors file of `shapes`, all of one type, that `write` fills in any order. Use as a context manager.

    At the end of the block the file is complete and on disk.
    """

    def __init__(
        self,
        path: str | Path,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        metadata: Mapping[str, str] | None = None,
    ):
        self.path, self.dtype = Path(path), dtype
        header: dict = {"__metadata__": dict(metadata or {"format": "pt"})}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + size_in_bytes(shape, dtype)
            header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._start = 8 + len(encoded)
        self._missing = {name: (tuple(shape), header[name]["data_offsets"][0]) for name, shape in shapes.items()}
        self._file = open(self.path, "xb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def places(self) -> dict[str, Place]:
        """Return where in the file the tensors that are not written yet will be."""
        return {
            name: {"offset": self._start + offset, "shape": list(shape)}
            for name, (shape, offset) in self._missing.items()
        }

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor with the announced name and shape; each must be written once.

        Raises ValueError if a finite number does not fit the file's type.
        """
        shape, offset = self._missing.pop(name)
        assert tuple(tensor.shape) == shape, (name, tuple(tensor.shape), shape)
        converted = tensor.to(self.dtype).contiguous()
        if self.dtype is torch.float16 and not torch.isfinite(converted).all():
            raise ValueError(f"{name} holds numbers beyond the range of fp16; use bf16 or fp32")
        self._file.seek(self._start + offset)
        self._file.write(memoryview(converted.flatten().view(torch.uint8).numpy()))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            assert not self._missing, f"{self.path.name} lacks {sorted(self._missing)}"
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        return False
