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
    """Write a safetensors file and sync it to disk. Return its digest, and each tensor's offset and
    shape by name.

    The file is not written atomically, so write it within `atomic_directory`.

    Args:
        path: the file, which is replaced if it exists.
        announced: tensors by name, which define the dtypes and shapes in the file; they may be on
            the meta device.
        tensors: the tensors to write, in the order of `announced`, on any device and of any dtype.
            They may be created one at a time. Default: those of `announced`.
        metadata: strings for the header.

    Raises:
        UserError: if a value exceeds the range of fp16.
    """
    import torch

    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    end = 0
    for name, tensor in announced.items():
        start = end
        end = end + tensor.nbytes
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data_start = 8 + len(encoded)

    hasher = hashlib.sha256()
    with open(path, "wb") as file:

        def write(block) -> None:
            hasher.update(block)
            file.write(block)

        write(len(encoded).to_bytes(8, "little") + encoded)
        if tensors is None:
            tensors = announced.values()
        # `zip` takes the next tensor only if another one is announced.
        for (name, expected), tensor in zip(announced.items(), tensors):
            assert tensor.shape == expected.shape, (name, tensor.shape, expected.shape)
            converted = tensor.detach().to("cpu", expected.dtype).contiguous()
            if converted.dtype is torch.float16 and not torch.isfinite(converted).all():
                raise UserError(
                    name, "contains values beyond the range of fp16", "use bf16 or fp32"
                )
            # A view as bytes needs a stride of 1. A contiguous tensor of one element may have any
            # other stride.
            flat = converted.as_strided((converted.numel(),), (1,))
            write(flat.view(torch.uint8).numpy())

        assert file.tell() == data_start + end, f"{path} lacks announced tensors"
        file.flush()
        os.fsync(file.fileno())

    places: dict[str, Place] = {}
    for name in announced:
        offset = data_start + header[name]["data_offsets"][0]
        places[name] = {"offset": offset, "shape": header[name]["shape"]}
    return {"bytes": data_start + end, "sha256": hasher.hexdigest()}, places
