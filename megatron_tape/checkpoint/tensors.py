"""Safetensors files of a checkpoint: read whole or in part.

The format: eight bytes with the header's length, a JSON header with every tensor's type, shape and place, and the
tensors' bytes.
"""

import hashlib
import math
import mmap
import os
from pathlib import Path
from typing import TypedDict

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from megatron_tape.errors import CheckpointError
from megatron_tape.io.records import check_shape, parse_record
from megatron_tape.io.safetensors import Place
from megatron_tape.model.weights import current_name

BLOCK = 1 << 22
"""Bytes that are read and hashed at once."""
Content = bytearray | mmap.mmap
"""All bytes of a file."""


class Stored(TypedDict):
    """A tensor's entry in the header; `data_offsets` count from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


_Header = dict[str, Stored]


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read every tensor of a file into CPU memory."""
    return safetensors.torch.load_file(path)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a tensor file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


class TensorFile:
    """A tensor file whose header has been checked; `content` is the whole file where it has been read already.

    Raises CheckpointError if it is not a safetensors file.
    """

    def __init__(self, path: Path, content: Content | None = None):
        self.path, self._content = path, content
        try:
            if content is None:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    length = _header_length(file.read(8), size)
                    header = file.read(length)
            else:
                size, length = len(content), _header_length(content[:8], len(content))
                header = content[8 : 8 + length]
            self._start = 8 + length
            stored = _parse(bytes(header), size - self._start)
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path} is not a safetensors file ({reason}); choose another checkpoint") from None
        self.tensors: dict[str, Stored] = {current_name(key): entry for key, entry in stored.items()}
        """By keys such as `exp_avg/NAME` with the parameter's current name."""

    def places(self) -> dict[str, Place]:
        """Return where the tensors are in the file."""
        return {
            key: {"offset": self._start + stored["data_offsets"][0], "shape": stored["shape"]}
            for key, stored in self.tensors.items()
        }

    def read(self, key: str) -> Tensor:
        """Return an fp32 tensor; it may share its memory with the file's content."""
        stored = self.tensors[key]
        start, end = (self._start + offset for offset in stored["data_offsets"])
        if self._content is None:
            part = bytearray(end - start)
            with open(self.path, "rb") as file:
                file.seek(start)
                if file.readinto(part) != len(part):
                    raise CheckpointError(f"{self.path} ends early; choose another checkpoint")
        else:
            part = memoryview(self._content)[start:end]
        if not part:
            return torch.empty(stored["shape"])
        flat = torch.frombuffer(part, dtype=torch.uint8)
        # Torch needs numbers at multiples of their size; files from elsewhere need not have them there.
        aligned = flat if flat.data_ptr() % 4 == 0 else flat.clone()
        return aligned.view(torch.float32).view(stored["shape"])


def read_whole(path: Path, keep: bool) -> tuple[str, Content | None]:
    """Return the sha256 of a file, and its bytes if `keep` and there is memory; it is opened once and read once."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        content = _memory(os.fstat(file.fileno()).st_size) if keep else None
        if content is None:
            while block := file.read(BLOCK):
                hasher.update(block)
            return hasher.hexdigest(), None
        view, end = memoryview(content), 0
        while count := file.readinto(view[end : end + BLOCK]):
            hasher.update(view[end : end + count])
            end += count
    return hasher.hexdigest(), content


def _memory(size: int) -> Content | None:
    """Return so many bytes, or None if there is no room for them.

    Processes that are forked do not get them: data loaders would keep them for as long as the run lasts.
    """
    if size == 0:
        return bytearray()
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _header_length(first: bytes | bytearray, size: int) -> int:
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise ValueError("its header is longer than the file")
    return length


def _parse(text: bytes, size: int) -> _Header:
    """Return the tensors of a header over `size` bytes of data; raises ValueError if one lies outside them."""
    header = parse_record(text, dict)
    header.pop("__metadata__", None)
    check_shape(header, _Header)
    for key, stored in header.items():
        begin_and_end = stored["data_offsets"]
        if len(begin_and_end) != 2 or not 0 <= begin_and_end[0] <= begin_and_end[1] <= size:
            raise ValueError(f"{key[:100]} lies outside of it")
        length = begin_and_end[1] - begin_and_end[0]
        if min(stored["shape"], default=1) < 0:
            raise ValueError(f"{key[:100]} has the shape {stored['shape']}")
        if stored["dtype"] == "F32" and 4 * math.prod(stored["shape"]) != length:
            raise ValueError(f"{key[:100]} has {length} bytes")
    return header
