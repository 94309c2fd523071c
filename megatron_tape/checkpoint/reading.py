"""Read the tensors of a checkpoint (`Checkpoint`), and distribute them to the ranks (`Reader`).

One rank reads each tensor and broadcasts it. The index contains each tensor's file and offset, so
the files' headers are not needed. All tensors are fp32.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_tape.checkpoint.directories import START_AGAIN, CheckpointState, read_manifest
from megatron_tape.checkpoint.index import (
    CHOOSE_ANOTHER,
    INDEX,
    current_key,
    read_index,
    readers,
    shard_of,
)
from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest
from megatron_tape.io.safetensors import Place
from megatron_tape.model.names import AVERAGE
from megatron_tape.model.weights import shard, unshard
from megatron_tape.parallel.layout import ParallelLayout

CACHED_BYTES = 1 << 31
"""Maximum bytes of files that a process keeps in memory from checking their checksums until it
loads them.
"""
_BLOCK = 1 << 22


def check_files(
    path: Path, files: Mapping[str, FileDigest], names: Iterable[str]
) -> tuple[dict[str, bytearray | mmap.mmap], list[str]]:
    """Compare the checksums of the files `names` with the manifest's `files`.

    Return the contents of tensor files, up to CACHED_BYTES in total, and a sentence for each
    damaged file. Raises CheckpointError if a file cannot be read, because of the disk or network.
    """
    free = CACHED_BYTES
    cached = {}
    problems = []
    for name in names:
        keep = shard_of(name) is not None and files[name]["bytes"] <= free
        try:
            sha256, content = _read_whole(path / name, files[name]["bytes"] if keep else 0)
        except OSError as error:
            raise CheckpointError(
                str(path / name), f"cannot be read ({error})", START_AGAIN
            ) from None
        if sha256 != files[name]["sha256"]:
            problems.append(f"{name} has sha256 {sha256} instead of {files[name]['sha256']}")
        elif keep:
            cached[name], free = content, free - len(content)
    return cached, problems


def _read_whole(path: Path, size: int) -> tuple[str, bytearray | mmap.mmap]:
    """Read a file once, and return its sha256 and its first `size` bytes."""
    hasher = hashlib.sha256()
    end = 0
    content: bytearray | mmap.mmap = bytearray()
    if size:
        memory = content = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(
            mmap.MADV_DONTFORK
        )  # otherwise forked data loaders would keep it until the run ends
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            content[end : min(size, end + len(block))] = block[: max(0, size - end)]
            end += len(block)
    return hasher.hexdigest(), content


@dataclass
class Checkpoint:
    """A complete checkpoint on disk, with this rank's cache of its files."""

    path: Path
    state: CheckpointState
    """The contents of `state.json`."""
    source: Checkpoint | None = None
    """The checkpoint with the frozen weights, if this one omits them."""
    cached: dict[str, bytearray | mmap.mmap] = field(default_factory=dict, repr=False)
    """Contents of the files that this rank read to compare their checksums. `release` clears it
    after loading.
    """

    @property
    def step(self) -> int:
        return self.state["step"]

    @cached_property
    def files(self) -> dict[str, FileDigest]:
        """The sizes and checksums of the files, from the manifest."""
        return read_manifest(self.path)["files"]

    @cached_property
    def index(self) -> dict[str, dict[str, Place]]:
        """The offset and shape of each tensor, by file and key. Raises CheckpointError if the index
        is invalid.
        """
        index = read_index(self.path, self.state["tensor_model_parallel_size"])
        if unlisted := sorted(index.keys() - self.files.keys()):
            problem = f"lists {unlisted[0]}, which the manifest does not list"
            raise CheckpointError(str(self.path / INDEX), problem, CHOOSE_ANOTHER)
        return {
            file: {current_key(key): place for key, place in places.items()}
            for file, places in index.items()
        }

    def read_records(self) -> None:
        """Read the manifest and the index now, so that ranks to which this object is sent do not
        read them again.
        """
        _ = self.files, self.index

    def places(self) -> dict[str, list[tuple[str, Place] | None]]:
        """Return, for each key, the file and index entry of each tensor-parallel rank's shard, or
        None if missing.
        """
        shards_of: dict[str, list[tuple[str, Place] | None]] = {}
        for file, places in self.index.items():
            for key, place in places.items():
                shards = shards_of.setdefault(
                    key, [None] * self.state["tensor_model_parallel_size"]
                )
                shards[shard_of(file)] = file, place
        return shards_of

    def weight_names(self) -> set[str]:
        """Return the names of all parameters with weights, those in the checkpoint `source`
        included.
        """
        keys = {key for places in self.index.values() for key in places}
        names = {key.partition("/")[2] for key in keys if key.startswith("weight/")}
        if self.source is None:
            return names
        return names | self.source.weight_names()

    def release(self) -> None:
        """Free the cached files. Tensors can still be read, from disk."""
        self.cached.clear()
        if self.source is not None:
            self.source.release()

    def read(self, file: str, place: Place) -> Tensor:
        """Return the fp32 tensor at `place` in a file. It may share memory with the cached file."""
        start = place["offset"]
        size = 4 * math.prod(place["shape"])
        data: memoryview | bytearray
        if file in self.cached:
            data = memoryview(self.cached[file])[start : start + size]
        else:
            data = bytearray(size)
            with open(self.path / file, "rb") as opened:
                opened.seek(start)
                del data[opened.readinto(data) :]
        if len(data) != size:
            problem = (
                f"has {start + len(data):,} bytes, but a tensor in it ends at byte {start + size:,}"
            )
            raise CheckpointError(str(self.path / file), problem, CHOOSE_ANOTHER)
        if not size:
            return torch.empty(place["shape"])
        return torch.frombuffer(data, dtype=torch.float32).view(place["shape"])


class Reader:
    """Returns this rank's shard of a tensor by its key, such as `exp_avg/NAME`.

    All ranks create a reader together, and call it together for the same keys in the same order.
    The NAMEs are those of `names`, the parameters of all pipeline stages. If the tensor-parallel
    size is that of the checkpoint and there is one pipeline stage, ranks receive their shards
    directly. Otherwise every rank receives all shards, merges them, and splits the tensor again.

    A rank that cannot read a tensor sends NaN instead, so that no rank waits forever. After the
    last tensor, call `check`, which raises the error on all ranks.
    """

    def __init__(
        self, checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], layout: ParallelLayout
    ):
        """Create a reader for this rank's `parameters` by name.

        Raises CheckpointError if a tensor in the checkpoint has another shape than its parameter.
        """
        self._checkpoint = checkpoint
        self._parameters = parameters
        self._layout = layout
        self._size = checkpoint.state["tensor_model_parallel_size"]
        self._places = checkpoint.places()
        sizes = {name: entry["bytes"] for name, entry in checkpoint.files.items()}
        self._readers = readers(
            sizes,
            self._size,
            layout.tensor_parallel_size,
            layout.replica_size,
            layout.pipeline_size,
        )
        self.names = list(itertools.chain(*layout.gather_pipeline_stages(list(parameters))))
        self._error: Exception | None = None
        self._check_shapes()
        if checkpoint.source is None:
            self._source_reader = None
        else:
            self._source_reader = Reader(checkpoint.source, parameters, layout)

    def _check_shapes(self) -> None:
        kinds = sorted({key.partition("/")[0] for key in self._places})
        for name, parameter in self._parameters.items():
            shape = list(
                getattr(parameter, "ds_shape", parameter.shape)
            )  # under ZeRO 3, `shape` is empty
            if getattr(parameter, "tensor_model_parallel", False):
                whole = shape[parameter.partition_dim] * self._layout.tensor_parallel_size
                shape[parameter.partition_dim] = whole // self._size
            for key in (f"{kind}/{name}" for kind in kinds):
                shards = self._places.get(key, [])
                if None in shards:
                    raise self._unusable(
                        f"has {key} for only some of its {self._size} tensor-parallel ranks"
                    )
                for _, place in shards:
                    if place["shape"] != shape:
                        raise self._unusable(
                            f"has {key} of shape {place['shape']}, but this model requires {shape}"
                        )

    def _unusable(self, problem: str) -> CheckpointError:
        return CheckpointError(str(self._checkpoint.path), problem, CHOOSE_ANOTHER)

    def __call__(self, key: str) -> Tensor | None:
        """Return the tensor on this rank's device, or None for a parameter of another pipeline
        stage.

        A missing average (`average/NAME`) starts as the weight. Frozen weights that the checkpoint
        omits are read from the checkpoint `source`. Raises CheckpointError if neither checkpoint
        has the tensor.
        """
        layout = self._layout
        if key not in self._places and key.startswith(f"{AVERAGE}/"):
            key = key.replace(AVERAGE, "weight", 1)
        if key not in self._places:
            if self._source_reader is None:
                raise self._unusable(f"has no {key}")
            return self._source_reader(key)
        shards = self._places[key]
        name = key.partition("/")[2]
        parameter = self._parameters.get(name)
        if self._size == layout.tensor_parallel_size and layout.pipeline_size == 1:
            return self._receive(*shards[layout.tensor_parallel_rank], layout.groups.dp_cp)  # type: ignore[call-arg]
        if name not in self._checkpoint.state["sharded"]:
            shards = shards[:1]
        received = [self._receive(*where, dist.group.WORLD) for where in shards]  # type: ignore[call-arg]
        if parameter is None:
            return None
        whole = unshard(received, parameter)
        return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

    def _receive(self, file: str, place: Place, group: dist.ProcessGroup) -> Tensor:
        source = self._readers[file]
        device = self._layout.device
        if source == self._layout.rank:
            tensor = self._read(file, place).to(device)
        else:
            tensor = torch.empty(place["shape"], dtype=torch.float32, device=device)
        if group.size() > 1:
            dist.broadcast(tensor, source, group)
        return tensor

    def _read(self, file: str, place: Place) -> Tensor:
        try:
            return self._checkpoint.read(file, place)
        except OSError as error:
            path = str(self._checkpoint.path / file)
            self._error = CheckpointError(path, f"cannot be read ({error})", START_AGAIN)
        except CheckpointError as error:
            self._error = error
        return torch.full(place["shape"], math.nan)

    def check(self) -> None:
        """Raise CheckpointError on all ranks if one of them could not read a tensor. All ranks call
        this together.
        """
        with RankErrors(self._layout) as errors:
            if self._error is not None:
                raise self._error
        errors.check(self._checkpoint.path, "cannot load a checkpoint")
        if self._source_reader is not None:
            self._source_reader.check()
