"""The index of a checkpoint's tensors, and the ranks that write and read each file. Imports no torch.

A file belongs to one tensor-parallel rank. One rank reads a whole file, checks its sha256, and sends its tensors to the
others, so that no byte is read twice.
"""

import heapq
import math
import re
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from megatron_tape.errors import CheckpointError
from megatron_tape.io.records import read_record
from megatron_tape.io.safetensors import Place
from megatron_tape.model.names import AVERAGE

INDEX = "index.json"
_TENSORS = re.compile(r"tensors-tp([0-9]{2,9})-\w+\.safetensors", re.ASCII)

CHOOSE_ANOTHER = "choose another checkpoint"
FILE_BYTES = 1 << 30
"""The largest file size, in bytes, at which no more writers are added."""
MAX_FILES = 512
"""The default limit on the number of tensor files (`checkpoint.writers`)."""


class Index(TypedDict):
    """The contents of `index.json`: by file, then by a key such as `exp_avg/NAME`."""

    files: dict[str, dict[str, Place]]


def tensor_file(rank: int, number: int) -> str:
    """Return the name of the file that writer `number` of tensor-parallel rank `rank` writes."""
    return f"tensors-tp{rank:02d}-dp{number:05d}.safetensors"


def shard_of(name: str) -> int | None:
    """Return the tensor-parallel rank of a tensor file, or None for another file."""
    match = _TENSORS.fullmatch(name)
    return int(match[1]) if match else None


def read_index(checkpoint: Path, tensor_size: int) -> dict[str, dict[str, Place]]:
    """Read `index.json` of a checkpoint that `tensor_size` tensor-parallel ranks saved.

    Raises ValueError if it is malformed, or a tensor's place is outside its file.
    """
    files = read_record(checkpoint / INDEX, Index)["files"]
    for name, places in files.items():
        shard = shard_of(name)
        if shard is None or shard >= tensor_size or not (checkpoint / name).is_file():
            raise CheckpointError(
                str(checkpoint / INDEX), f"names {name}, which is not a file of this checkpoint", CHOOSE_ANOTHER
            )
        size = (checkpoint / name).stat().st_size
        for key, place in places.items():
            start, shape = place["offset"], place["shape"]
            if start + 4 * math.prod(shape) > size:
                problem = f"says that {key} of shape {shape} begins at byte {start} of {name}, which has {size:,} bytes"
                raise CheckpointError(str(checkpoint / INDEX), problem, CHOOSE_ANOTHER)
    return files


def check_average(checkpoint: Path, index: Mapping[str, Mapping[str, Place]]) -> None:
    """Raise CheckpointError if a checkpoint with this index has no averaged weights."""
    if not any(key.startswith(f"{AVERAGE}/") for places in index.values() for key in places):
        fix = "leave out --average, or train with train.average"
        raise CheckpointError(str(checkpoint), "has no averaged weights", fix)


def share(sizes: Mapping[str, int], ranks: int, limit: int | None = None) -> dict[str, int]:
    """Assign each item to one of `ranks` ranks, so that the sums of `sizes` differ by at most the largest item.

    At most `limit` ranks take part; they are spread evenly over all ranks, and so over the nodes.
    """
    count = min(len(sizes), ranks if limit is None else min(ranks, limit))
    loads = [(0, number) for number in range(count)]
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], number))
        chosen[name] = number * ranks // count
    return chosen


def writers(sizes: Mapping[str, int], shards: int, ranks: int, limit: int | None) -> dict[str, int]:
    """Return the rank, among `ranks` ranks with the same weights, that writes each tensor.

    `sizes` are the bytes of this shard's tensors, `shards` is the number of tensor-parallel ranks times the number of
    pipeline stages, and `limit` is `checkpoint.writers`.
    """
    return share(sizes, ranks, writer_count(sum(sizes.values()), shards, limit))


def writer_count(size: int, shards: int, limit: int | None) -> int:
    """Return the number of ranks that write a shard of `size` bytes, one of `shards` shards."""
    if limit is None:
        limit = min(MAX_FILES, shards * math.ceil(size / FILE_BYTES))
    return max(1, limit // shards)


def readers(
    sizes: Mapping[str, int], saved_size: int, tensor_size: int, replicas: int, stages: int = 1
) -> dict[str, int]:
    """Return the rank, among `tensor_size` * `replicas` * `stages` ranks, that reads each file; `sizes` are in bytes.

    `saved_size` is the tensor-parallel size that the checkpoint was saved with. If it has not changed and there are no
    pipeline stages, a rank that needs the tensors reads the file and sends them to the ranks with the same weights.
    Otherwise any rank reads it and sends the tensors to all.
    """
    groups: dict[int | None, dict[str, int]] = {}
    for name, size in sizes.items():
        shard = shard_of(name)
        groups.setdefault(shard if (saved_size, stages) == (tensor_size, 1) else None, {})[name] = size
    chosen = {}
    for shard, files in groups.items():
        if shard is None:
            chosen |= share(files, tensor_size * replicas * stages)
        else:
            # The tensor-parallel ranks are numbered first.
            chosen |= {name: replica * tensor_size + shard for name, replica in share(files, replicas).items()}
    return chosen
