"""The index of a checkpoint's tensors, and the assignment of files to the ranks that write and read
them. Imports no torch.

Each file has tensors of one tensor-parallel rank. One rank reads the whole file, checks its sha256,
and sends the tensors to the other ranks.
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
# Matches names such as `tensors-tp01-dp00000.safetensors`; the group is the tensor-parallel rank.
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
    """Return the name of tensor file `number` (from 0) of tensor-parallel rank `rank`.

    The number is called `dp` in the name, but counts the ranks of all pipeline stages that write.
    """
    return f"tensors-tp{rank:02d}-dp{number:05d}.safetensors"


def shard_of(name: str) -> int | None:
    """Return the tensor-parallel rank in the name of a tensor file, or None for any other file."""
    match = _TENSORS.fullmatch(name)
    return int(match[1]) if match else None


def read_index(checkpoint: Path, tensor_size: int) -> dict[str, dict[str, Place]]:
    """Return the place of each tensor by file and key, from `index.json` of a checkpoint.

    `tensor_size` is the tensor-parallel size with which the checkpoint was saved. The keys are
    those in the files, which have the parameters' old names in format 3. Raises FileError if the
    index is malformed; its subclass CheckpointError if it lists a file that is not a tensor file of
    this checkpoint.
    """
    path = checkpoint / INDEX
    files = read_record(path, Index)["files"]
    for name in files:
        tensor_rank = shard_of(name)
        # Only names of tensor files are looked up: `is_file` raises OSError for a very long name.
        if tensor_rank is None or tensor_rank >= tensor_size or not (checkpoint / name).is_file():
            raise CheckpointError(
                path,
                f"lists {name}, which is not a file of this checkpoint",
                CHOOSE_ANOTHER,
            )
    return files


def split_key(key: str) -> tuple[str, str]:
    """Split a key such as `exp_avg/NAME` into the kind `exp_avg` and the parameter's current name.

    The name differs from NAME in checkpoints of format 3.
    """
    kind, _, name = key.partition("/")
    return kind, current_name(name)


def check_average(checkpoint: Path, index: Mapping[str, Mapping[str, Place]]) -> None:
    """Raise CheckpointError if a checkpoint has no averaged weights.

    `index` has the place of each tensor by file and key.
    """
    keys = itertools.chain(*index.values())
    if not any(key.startswith(f"{AVERAGE}/") for key in keys):
        raise CheckpointError(
            checkpoint,
            "has no averaged weights",
            "omit --average, or train with train.average",
        )


def balance(sizes: Mapping[str, int], ranks: int, limit: int | None = None) -> dict[str, int]:
    """Distribute items of the given sizes evenly over `ranks` ranks; return the rank of each item.

    The total sizes of two ranks differ by at most the largest item. With `limit`, at most `limit`
    ranks have items. These ranks are spaced evenly, so that they are spread over the nodes.
    """
    used_ranks = min(len(sizes), ranks, limit or ranks)
    # A heap of (total size, number of a used rank): each item goes to the smallest total.
    loads = [(0, number) for number in range(used_ranks)]
    assigned = {}
    # Largest first, for an even distribution; by name, so that all ranks compute the same one.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[name], number))
        # Space the used ranks evenly: number 1 of 2 is rank 4 of 8, for example.
        assigned[name] = number * ranks // used_ranks
    return assigned


def writers(
    sizes: Mapping[str, int], shards: int, data_context_size: int, limit: int | None
) -> dict[str, int]:
    """Return the rank that writes each tensor of one shard of the model.

    Args:
        sizes: the tensors' sizes in bytes, by name.
        shards: the number of shards: the tensor-parallel size times the number of pipeline stages.
        data_context_size: the number of ranks that hold the same shard. The result counts these
            ranks from 0.
        limit: `checkpoint.writers`, the maximum number of writing ranks for all shards.
    """
    shard_writers = writer_count(sum(sizes.values()), shards, limit)
    return balance(sizes, data_context_size, limit=shard_writers)


def writer_count(size: int, shards: int, limit: int | None) -> int:
    """Return how many ranks write one shard of `size` bytes, at least 1.

    `shards` is the number of shards of the model. `limit` is `checkpoint.writers`, the maximum for
    all shards together; if it is None, the limit follows from FILE_BYTES and MAX_FILES.
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
    """Return the global rank that reads each file of a checkpoint.

    If the tensor-parallel size has not changed and there is one pipeline stage, each file is read
    by a rank that needs its tensors. That rank sends them to the ranks with the same weights.
    Otherwise any rank may read a file; it sends the tensors to all ranks.

    Args:
        sizes: the files' sizes in bytes, by name.
        saved_size: the tensor-parallel size with which the checkpoint was saved.
        tensor_size: the run's tensor-parallel size.
        data_context_size: the number of the run's ranks that hold the same shard of the model.
        pipeline_size: the number of the run's pipeline stages.
    """
    if saved_size != tensor_size or pipeline_size > 1:
        return balance(sizes, tensor_size * data_context_size * pipeline_size)

    # The files' sizes by tensor-parallel rank. The key None stands for files that all ranks need,
    # such as state.json.
    shards: dict[int | None, dict[str, int]] = {}
    for name, size in sizes.items():
        shards.setdefault(shard_of(name), {})[name] = size
    assigned = balance(shards.pop(None, {}), tensor_size * data_context_size)
    for tensor_rank, shard_sizes in shards.items():
        for name, replica in balance(shard_sizes, data_context_size).items():
            # Consecutive global ranks differ in their tensor-parallel rank.
            assigned[name] = replica * tensor_size + tensor_rank
    return assigned
