"""The one writer of safetensors files: a tensor at a time, with a digest of all that is written. Imports torch late.

The format: eight bytes with the header's length, a JSON header that gives every tensor's dtype, shape and place, and
the tensors' bytes without gaps. The library's own `save_file` needs all tensors in memory and returns no digest; files
are read with its `safe_open`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import TypedDict

from megatron_tape.errors import UserError
from megatron_tape.io.files import FileDigest

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES |= {"int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


class Place(TypedDict):
    """Where a tensor is: its first byte, counted from the beginning of the file, and its shape."""

    offset: Annotated[int, Field(ge=0)]
    shape: list[Annotated[int, Field(ge=0)]]


def write_safetensors(
    path: str | Path,
    announced: Mapping[str, Tensor],
    tensors: Iterable[Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[FileDigest, dict[str, Place]]:
    """Write a safetensors file and flush it to disk; return its digest, and where each tensor is in it.

    The file has its name from the start: write it into a directory that is published as a whole (`atomic_directory`).

    Args:
        path: the file; one that exists is replaced.
        announced: names with dtypes and shapes: the tensors themselves, or others in their place on the device meta.
        tensors: as many tensors as are announced, in that order, on any device and of any dtype; they may be made one
            at a time, and no more are taken. By default the announced ones.
        metadata: texts for the header.

    Raises:
        UserError: if a number does not fit fp16.
    """
    import torch

    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in announced.items():
        start, end = end, end + tensor.nbytes
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin, hasher = 8 + len(encoded), hashlib.sha256()
    with open(path, "wb") as file:

        def put(block) -> None:
            hasher.update(block)
            file.write(block)

        put(len(encoded).to_bytes(8, "little") + encoded)
        # `zip` asks for another tensor only if another one is announced.
        for (name, expected), tensor in zip(announced.items(), announced.values() if tensors is None else tensors):
            assert tensor.shape == expected.shape, (name, tensor.shape, expected.shape)
            converted = tensor.detach().to("cpu", expected.dtype).contiguous()
            if converted.dtype is torch.float16 and not torch.isfinite(converted).all():
                raise UserError(name, "holds numbers beyond the range of fp16", "use bf16 or fp32")
            put(converted.reshape(-1).view(torch.uint8).numpy())
        assert file.tell() == begin + end, f"{path} lacks announced tensors"
        file.flush()
        os.fsync(file.fileno())
    places: dict[str, Place] = {
        name: {"offset": begin + header[name]["data_offsets"][0], "shape": header[name]["shape"]} for name in announced
    }
    return {"bytes": begin + end, "sha256": hasher.hexdigest()}, places
