"""The index of a checkpoint's tensors, and the assignment of files to the ranks that write and read
them.

Each file has tensors of one tensor-parallel rank. One rank reads the whole file, checks its sha256,
and sends the tensors to the other ranks. Imports no torch.
"""

import heapq
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from megatron_tape.errors import CheckpointError
from megatron_tape.io.records import read_record
from megatron_tape.io.safetensors import Place
from megatron_tape.model.names import AVERAGE, current_name

INDEX = "index.json"
_TENSORS = re.compile(r"tensors-tp([0-9]{2,9})-\w+\.safetensors", re.ASCII)

CHOOSE_ANOTHER = "choose another checkpoint"
FILE_BYTES = 1 << 30
"""Target size of a tensor file in bytes: a shard is divided into ceil(its size / FILE_BYTES) files.
"""
MAX_FILES = 512
"""Maximum number of tensor files of a checkpoint, if `checkpoint.writers` is not set."""


class Index(TypedDict):
    """The contents of `index.json`: the offset and shape of each tensor by file and key, such as
    `exp_avg/NAME`.
    """

    files: dict[str, dict[str, Place]]


def tensor_file(rank: int, number: int) -> str:
    """Return the name of tensor file `number` (from 0) of tensor-parallel rank `rank`."""
    return f"tensors-tp{rank:02d}-dp{number:05d}.safetensors"


def shard_of(name: str) -> int | None:
    """Return the tensor-parallel rank in the name of a tensor file, or None for any other file."""
    match = _TENSORS.fullmatch(name)
    return int(match[1]) if match else None


def read_index(checkpoint: Path, tensor_size: int) -> dict[str, dict[str, Place]]:
    """Read `index.json` of a checkpoint that was saved with tensor-parallel size `tensor_size`.

    The keys are those in the files, which contain other names in format 3 (see `split_key`).
    Raises ValueError if it is malformed.
    """
    path = checkpoint / INDEX
    files = read_record(path, Index)["files"]
    for name in files:
        shard = shard_of(name)
        if shard is None or shard >= tensor_size or not (checkpoint / name).is_file():
            problem = f"lists {name}, which is not a file of this checkpoint"
            raise CheckpointError(path, problem, CHOOSE_ANOTHER)
    return files


def split_key(key: str) -> tuple[str, str]:
    """Return the kind of a tensor and the current name of its parameter: of `exp_avg/NAME`,
    `exp_avg` and NAME.
    """
    kind, _, name = key.partition("/")
    return kind, current_name(name)


def check_average(checkpoint: Path, index: Mapping[str, Mapping[str, Place]]) -> None:
    """Raise CheckpointError if a checkpoint with this index has no averaged weights."""
    keys = itertools.chain(*index.values())
    if not any(key.startswith(f"{AVERAGE}/") for key in keys):
        fix = "omit --average, or train with train.average"
        raise CheckpointError(checkpoint, "has no averaged weights", fix)


def balance(sizes: Mapping[str, int], ranks: int, limit: int | None = None) -> dict[str, int]:
    """Distribute items of the given sizes evenly over `ranks` ranks; return the rank of each item.

    The total sizes of two ranks differ by at most the largest item. With `limit`, at most `limit`
    ranks have items. These ranks are spaced evenly, so that they are spread over the nodes.
    """
    count = min(len(sizes), ranks, limit or ranks)
    loads = [(0, number) for number in range(count)]
    assigned = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], number))
        assigned[name] = number * ranks // count
    return assigned


def writers(
    sizes: Mapping[str, int], shards: int, data_context_size: int, limit: int | None
) -> dict[str, int]:
    """Return which of the `data_context_size` ranks that hold the same shard of the model writes
    each of its tensors.

    `sizes` are the tensors' sizes in bytes. `shards` is the number of shards: the tensor-parallel
    size times the number of pipeline stages. `limit` is `checkpoint.writers`.
    """
    count = writer_count(sum(sizes.values()), shards, limit)
    return balance(sizes, data_context_size, count)


def writer_count(size: int, shards: int, limit: int | None) -> int:
    """Return how many ranks write a shard of `size` bytes, for a model with `shards` shards; see
    `writers`.
    """
    if limit is None:
        limit = min(MAX_FILES, shards * math.ceil(size / FILE_BYTES))
    return max(1, limit // shards)


def readers(
    sizes: Mapping[str, int],
    saved_size: int,
    tensor_size: int,
    data_context_size: int,
    pipeline_size: int = 1,
) -> dict[str, int]:
    """Return the rank that reads each file, among the `tensor_size` * `data_context_size` *
    `pipeline_size` ranks of a run.

    `sizes` are the files' sizes in bytes, and `saved_size` is the tensor-parallel size with which
    the checkpoint was saved. If that equals `tensor_size` and there is one pipeline stage, each
    file is read by a rank that needs its tensors. That rank sends them to the ranks with the same
    weights. Otherwise any rank may read a file; it sends the tensors to all ranks.
    """
    if saved_size != tensor_size or pipeline_size > 1:
        return balance(sizes, tensor_size * data_context_size * pipeline_size)

    shards: dict[int | None, dict[str, int]] = {}
    for name, size in sizes.items():
        shards.setdefault(shard_of(name), {})[name] = size
    assigned = balance(shards.pop(None, {}), tensor_size * data_context_size)
    for shard, files in shards.items():
        for name, replica in balance(files, data_context_size).items():
            # Consecutive ranks differ in their tensor-parallel rank.
            assigned[name] = replica * tensor_size + shard
    return assigned
