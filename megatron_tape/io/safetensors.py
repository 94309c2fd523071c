"""Write safetensors files one tensor at a time, with a digest of the file. Does not import torch
until used.

The format: eight bytes with the header's length, a JSON header with each tensor's dtype, shape and
offsets, and the tensors' bytes without gaps. The library's own `save_file` needs all tensors in
memory and returns no digest. Files are read with its `safe_open`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from megatron_tape.errors import UserError
from megatron_tape.io.files import FileDigest

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES |= {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


class Place(TypedDict):
    """Where a tensor is in a file: its byte offset from the beginning, and its shape."""

    offset: int
    shape: list[int]


def write_safetensors(
    path: str | Path,
    announced: Mapping[str, Tensor],
    tensors: Iterable[Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[FileDigest, dict[str, Place]]:
    """Write a safetensors file and sync it to disk. Return the file's size and sha256, and each
    tensor's offset and shape by name.

    The file is not written atomically, so write it within `atomic_directory`.

    Args:
        path: the file, which is replaced if it exists.
        announced: tensors by name, which define the dtypes and shapes in the file; they may be on
            the meta device.
        tensors: the tensors to write, in the order of `announced`, on any device and of any dtype.
            They are converted to the announced dtypes. An iterator may create them one at a time,
            so that memory holds only one. Default: the values of `announced`.
        metadata: strings for the header.

    Raises:
        UserError: if a value exceeds the range of fp16.
    """
    import torch

    header, size = _header(announced, metadata)
    places: dict[str, Place] = {}
    hasher = hashlib.sha256()
    with open(path, "wb") as file:
        # Hash while writing, since reading a large file again takes minutes.
        def write(block) -> None:
            hasher.update(block)
            file.write(block)

        write(header)
        if tensors is None:
            tensors = announced.values()
        # `announced` comes first, so that `zip` takes no tensor beyond the last announced one. The
        # iterator `tensors` may continue with the tensors of the next file.
        for (name, expected), tensor in zip(announced.items(), tensors):
            assert tensor.shape == expected.shape, (name, tensor.shape, expected.shape)
            converted = tensor.detach().to("cpu", expected.dtype).contiguous()
            # Only fp16 has a smaller range than fp32, so other dtypes are not checked.
            if converted.dtype is torch.float16 and not torch.isfinite(converted).all():
                raise UserError(
                    name, "contains values beyond the range of fp16", "use bf16 or fp32"
                )
            # A view as bytes needs a stride of 1. A contiguous tensor of one element may have any
            # other stride.
            flat = converted.as_strided((converted.numel(),), (1,))
            places[name] = {"offset": file.tell(), "shape": list(tensor.shape)}
            write(flat.view(torch.uint8).numpy())

        # If `tensors` has too few, `zip` ends without an error, and the file is too short.
        assert file.tell() == size, f"{path} lacks announced tensors"
        file.flush()
        os.fsync(file.fileno())

    return {"bytes": size, "sha256": hasher.hexdigest()}, places


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    """Return the bytes of a file before its first tensor, and the size of the whole file."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }

    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with spaces, so that the tensors are aligned to 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    beginning = len(encoded).to_bytes(8, "little") + encoded
    return beginning, len(beginning) + end
