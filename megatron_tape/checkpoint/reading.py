"""Read the tensors of a checkpoint (`Checkpoint`), and distribute them to the ranks (`Reader`).

One rank reads each tensor and broadcasts it. The index contains each tensor's file and offset, so
the headers of the safetensors files are not read. All tensors are fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_tape.checkpoint.directories import START_AGAIN, CheckpointState, read_manifest
from megatron_tape.checkpoint.index import (
    CHOOSE_ANOTHER,
    INDEX,
    read_index,
    readers,
    shard_of,
    split_key,
)
from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest, digest
from megatron_tape.io.safetensors import Place
from megatron_tape.model.names import AVERAGE
from megatron_tape.model.weights import shard, unshard
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import is_sharded, shard_shape

Shard = tuple[str, Place]
"""A tensor-parallel rank's shard of a tensor: the file, and where it is in the file."""


@dataclass
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: CheckpointState
    """The contents of `state.json`."""
    source: Checkpoint | None = None
    """The checkpoint with the frozen weights, if this one omits them."""

    @property
    def step(self) -> int:
        return self.state["step"]

    @cached_property
    def files(self) -> dict[str, FileDigest]:
        """The sizes and checksums of the files, from the manifest."""
        return read_manifest(self.path)["files"]

    @cached_property
    def shards(self) -> dict[str, list[Shard | None]]:
        """The shards of each tensor by key, such as `exp_avg/NAME`.

        The list has an entry for each tensor-parallel rank with which the checkpoint was saved;
        None if the rank has no shard. Raises FileError or CheckpointError if the index is invalid.
        """
        size = self.state["tensor_model_parallel_size"]
        shards: dict[str, list[Shard | None]] = {}
        for file, places in read_index(self.path, size).items():
            # Without a checksum in the manifest, damage of the file would not be noticed.
            if file not in self.files:
                raise CheckpointError(
                    self.path / INDEX,
                    f"lists {file}, which the manifest does not list",
                    CHOOSE_ANOTHER,
                )
            for saved_key, place in places.items():
                key = "/".join(split_key(saved_key))
                shards.setdefault(key, [None] * size)[shard_of(file)] = file, place
        return shards

    def read_records(self) -> None:
        """Read the manifest and the index, and keep them.

        The object is then sent to other ranks, which do not read them again.
        """
        # Cached properties are computed when they are read.
        _ = self.files, self.shards

    def readers(self, layout: ParallelLayout) -> dict[str, int]:
        """Return the global rank that reads each file, by the file's name."""
        return readers(
            {name: entry["bytes"] for name, entry in self.files.items()},
            self.state["tensor_model_parallel_size"],
            layout.tensor_parallel_size,
            layout.replica_size,
            layout.pipeline_size,
        )

    def damage(self, names: Iterable[str]) -> list[str]:
        """Compare the checksums of the files `names` with the manifest.

        Return a sentence for each damaged file. Raises CheckpointError if a file cannot be read,
        because of the disk or network.
        """
        problems = []
        for name in names:
            try:
                sha256 = digest(self.path / name)["sha256"]
            # Also for a missing file. Rank 0 has seen it, so this node's file system is to blame.
            except OSError as error:
                raise CheckpointError(
                    str(self.path / name), f"cannot be read ({error})", START_AGAIN
                ) from None
            expected = self.files[name]["sha256"]
            if sha256 != expected:
                problems.append(f"{name} has sha256 {sha256} instead of {expected}")
        return problems

    def weight_names(self) -> set[str]:
        """Return the names of all parameters with weights in this checkpoint or in `source`."""
        keys = map(split_key, self.shards)
        names = {name for kind, name in keys if kind == "weight"}
        if self.source is not None:
            names |= self.source.weight_names()
        return names

    def read(self, file: str, place: Place) -> Tensor:
        """Return the fp32 tensor at `place` in the file named `file`.

        Raises CheckpointError if the file is too short, and OSError if it cannot be read.
        """
        num_bytes = 4 * math.prod(place["shape"])
        # `torch.frombuffer` refuses an empty buffer.
        if not num_bytes:
            return torch.empty(place["shape"])

        data = bytearray(num_bytes)
        with open(self.path / file, "rb") as opened:
            opened.seek(place["offset"])
            if opened.readinto(data) < num_bytes:
                raise CheckpointError(
                    self.path / file,
                    f"ends within the tensor at byte {place['offset']:,}",
                    CHOOSE_ANOTHER,
                )
        return torch.frombuffer(data, dtype=torch.float32).view(place["shape"])


class Reader:
    """A function that returns this rank's shard of a tensor, given its key such as `exp_avg/NAME`.

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
        self._saved_size = checkpoint.state["tensor_model_parallel_size"]
        self._readers = checkpoint.readers(layout)
        """The global rank that reads each file, by the file's name."""
        self.names = list(itertools.chain(*layout.gather_pipeline_stages(list(parameters))))
        self._error: Exception | None = None
        """The last error of this rank in reading a tensor, which `check` raises."""
        self._check_shapes()
        # Reads the frozen weights that `checkpoint` omits; None if it omits none.
        self._source_reader = None
        if checkpoint.source is not None:
            self._source_reader = Reader(checkpoint.source, parameters, layout)

    def _check_shapes(self) -> None:
        """Raise CheckpointError if the checkpoint's shards do not fit this rank's parameters."""
        for key, shards in self._checkpoint.shards.items():
            _, name = split_key(key)
            parameter = self._parameters.get(name)
            if parameter is None:  # it belongs to another pipeline stage
                continue
            if None in shards:
                raise self._unusable(f"has {key} for only some of its {self._saved_size} ranks")

            # Compute the shape that a shard has in the checkpoint, which may have been saved with
            # another tensor-parallel size.
            shape = list(shard_shape(parameter))
            if is_sharded(parameter):
                whole = shape[parameter.partition_dim] * self._layout.tensor_parallel_size
                shape[parameter.partition_dim] = whole // self._saved_size
            for _, place in shards:  # type: ignore[misc]
                if place["shape"] != shape:
                    raise self._unusable(
                        f"has {key} of shape {place['shape']}, but this model requires {shape}"
                    )

    def _unusable(self, problem: str) -> CheckpointError:
        """Return an error about this checkpoint, to be raised."""
        return CheckpointError(self._checkpoint.path, problem, CHOOSE_ANOTHER)

    def __call__(self, key: str) -> Tensor | None:
        """Return the tensor on this rank's device, or None for a parameter of another pipeline
        stage.

        A missing average (`average/NAME`) starts as the weight. Frozen weights that the checkpoint
        omits are read from the checkpoint `source`. Raises CheckpointError if neither checkpoint
        has the tensor.
        """
        layout = self._layout
        saved = self._checkpoint.shards
        # The run may not have had `train.average` when the checkpoint was saved.
        if key not in saved and key.startswith(f"{AVERAGE}/"):
            key = key.replace(AVERAGE, "weight", 1)
        if key not in saved:
            if self._source_reader is None:
                raise self._unusable(f"has no {key}")
            return self._source_reader(key)

        shards = saved[key]
        if self._saved_size == layout.tensor_parallel_size and layout.pipeline_size == 1:
            return self._receive(shards[layout.tensor_parallel_rank], layout.groups.dp_cp)

        _, name = split_key(key)
        # The shards of a replicated parameter are equal, so the first one is enough.
        if name not in self._checkpoint.state["sharded"]:
            shards = shards[:1]
        received = [self._receive(shard_on_disk, dist.group.WORLD) for shard_on_disk in shards]
        parameter = self._parameters.get(name)
        if parameter is None:
            return None
        whole = unshard(received, parameter)
        return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

    def _receive(self, shard_on_disk: Shard | None, group: dist.ProcessGroup) -> Tensor:
        """Return a shard, read by one rank of `group` and broadcast to the others."""
        assert shard_on_disk is not None  # `_check_shapes` has raised
        file, place = shard_on_disk
        reading_rank = self._readers[file]
        device = self._layout.device
        if reading_rank == self._layout.rank:
            tensor = self._read(file, place).to(device)
        else:
            tensor = torch.empty(place["shape"], dtype=torch.float32, device=device)
        if group.size() > 1:
            dist.broadcast(tensor, reading_rank, group)
        return tensor

    def _read(self, file: str, place: Place) -> Tensor:
        """Return a tensor on the CPU. After an error, keep it for `check`, and return NaN."""
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
