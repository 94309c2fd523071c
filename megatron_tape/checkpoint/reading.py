"""Hands every rank its share of a checkpoint's tensors, each of which one rank has read and sends to the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.directories import START_AGAIN
from megatron_tape.checkpoint.host_memory import memory_of_job, processes_of_host
from megatron_tape.checkpoint.index import Place, readers, shard_of
from megatron_tape.checkpoint.tensors import Content, TensorFile, read_whole
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest
from megatron_tape.model.weights import current_name, shard, unshard
from megatron_tape.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from megatron_tape.checkpoint.opening import Checkpoint

HELD_SHARE = 4
"""Files are held from their check to their use in at most one part in so many of the job's memory on a host."""


def check_files(
    path: Path, files: Mapping[str, FileDigest], names: Iterable[str]
) -> tuple[dict[str, Content], list[str]]:
    """Read files of a checkpoint and compare their checksums; return what they hold and what is wrong with them.

    Only as much is held as fits this process's share of the memory; the rest will be read again. Raises CheckpointError
    if a file cannot be read: that may be the fault of a disk or a network, and says nothing about the checkpoint.
    """
    left = memory_of_job() // HELD_SHARE // processes_of_host(torch.cuda.device_count())
    held, problems = {}, []
    for name in names:
        keep = shard_of(name) is not None and files[name]["bytes"] <= left
        try:
            sha256, content = read_whole(path / name, keep)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read ({error}); {START_AGAIN}") from None
        if sha256 != files[name]["sha256"]:
            problems.append(f"{name} has sha256 {sha256} instead of {files[name]['sha256']}")
        if content is not None:
            held[name], left = content, left - len(content)
    return held, problems


class Reader:
    """Returns this rank's share of a tensor by a key such as `exp_avg/NAME`.

    All ranks create one together, and call it together for the same keys in the same order. If the tensor-parallel size
    is the one that the checkpoint was saved with, a share goes unchanged to the ranks with the same weights; otherwise
    all of them go to every rank, which cuts its own from the whole tensor.

    If a rank cannot read a tensor, all get NaN in its place, so that none waits for it; `check` then raises an error.
    """

    def __init__(self, checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], layout: ParallelLayout):
        """Check the tensors of `parameters`. Raises CheckpointError if one's shape or type is not the model's."""
        self._checkpoint, self._parameters, self._layout = checkpoint, parameters, layout
        self._size = checkpoint.state["tensor_model_parallel_size"]
        self._places = places_by_key(checkpoint.index, self._size)
        sizes = {name: entry["bytes"] for name, entry in checkpoint.files.items()}
        self._readers = readers(sizes, self._size, layout.tensor_parallel_size, layout.replica_size)
        self._files: dict[str, TensorFile] = {}
        self._error: CheckpointError | None = None
        with Agreement(layout) as agreement:
            for name in checkpoint.index:
                if self._readers[name] == layout.rank:
                    self._files[name] = TensorFile(checkpoint.path / name, checkpoint.held.get(name))
            self._check()
        agreement.check("cannot load a checkpoint")
        self._left_out = None if checkpoint.source is None else checkpoint.source.reader(parameters, layout)

    def _check(self) -> None:
        path, sizes = self._checkpoint.path, (self._layout.tensor_parallel_size, self._size)
        kinds = sorted({key.partition("/")[0] for key in self._places})
        for name, parameter in self._parameters.items():
            shape = list(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO 3 `shape` is of an empty tensor
            if getattr(parameter, "tensor_model_parallel", False):
                shape[parameter.partition_dim] = shape[parameter.partition_dim] * sizes[0] // sizes[1]
            for key in (f"{kind}/{name}" for kind in kinds):
                places = self._places.get(key, [])
                if None in places:
                    raise CheckpointError(
                        f"{path} holds {key} for only some tensor-parallel ranks; choose another checkpoint"
                    )
                for file, indexed in places:
                    self._check_stored(key, path / file, indexed, shape)

    def _check_stored(self, key: str, path: Path, indexed: list[int], shape: list[int]) -> None:
        """Raise CheckpointError if the index or, where this rank reads the file, its header does not fit the model."""
        dtype, found = "F32", indexed
        if path.name in self._files:
            stored = self._files[path.name].tensors.get(key)
            if stored is None:
                raise CheckpointError(f"{path} holds no {key}; choose another checkpoint")
            dtype, found = stored["dtype"], stored["shape"]
        if (dtype, found) != ("F32", shape) or indexed != shape:
            raise CheckpointError(
                f"{path} holds {key} as {dtype} of shape {found}, and the model's is F32 of shape {shape}; choose "
                "another checkpoint"
            )

    def __call__(self, key: str) -> Tensor:
        """Return the tensor on this rank's device. Raises CheckpointError if the checkpoint does not hold it."""
        layout = self._layout
        if key not in self._places:
            if self._left_out is None:
                raise CheckpointError(f"{self._checkpoint.path} holds no {key}; choose another checkpoint")
            return self._left_out(key)
        places, parameter = self._places[key], self._parameters[key.partition("/")[2]]
        if self._size == layout.tensor_parallel_size:
            return self._receive(key, *places[layout.tensor_parallel_rank], layout.groups.dp_cp)
        if not getattr(parameter, "tensor_model_parallel", False):
            places = places[:1]
        whole = unshard([self._receive(key, *place, dist.group.WORLD) for place in places], parameter)
        return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

    def _receive(self, key: str, file: str, shape: list[int], group: dist.ProcessGroup) -> Tensor:
        source, device = self._readers[file], self._layout.device
        if source == self._layout.rank:
            tensor = self._read(key, file, shape).to(device)
        else:
            tensor = torch.empty(shape, dtype=torch.float32, device=device)
        if group.size() > 1:
            dist.broadcast(tensor, source, group)
        return tensor

    def _read(self, key: str, file: str, shape: list[int]) -> Tensor:
        try:
            return self._files[file].read(key)
        except OSError as error:
            self._error = CheckpointError(f"{self._checkpoint.path / file} cannot be read ({error}); {START_AGAIN}")
        except CheckpointError as error:
            self._error = error
        return torch.full(shape, math.nan)

    def check(self) -> None:
        """Raise CheckpointError on every rank if one could not read a tensor; all call it together after the last."""
        with Agreement(self._layout) as agreement:
            if self._error is not None:
                raise self._error
        agreement.check("cannot load a checkpoint")
        if self._left_out is not None:
            self._left_out.check()


def places_by_key(index: Mapping[str, Mapping[str, Place]], size: int) -> dict[str, list[tuple[str, list[int]] | None]]:
    """Return the file and the shape of each tensor-parallel rank's share, by keys with current names.

    None stands for a rank whose share is missing.
    """
    found: dict[str, list[tuple[str, list[int]] | None]] = {}
    for file, places in index.items():
        for stored, place in places.items():
            found.setdefault(current_name(stored), [None] * size)[shard_of(file)] = file, place["shape"]
    return found
