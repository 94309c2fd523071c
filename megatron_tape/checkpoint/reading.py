"""An open checkpoint, and a reader that gives every rank its shard of the tensors.

One rank reads each tensor and broadcasts it. The index says where a tensor is, so no header is read. Opening a
checkpoint compares the index and the files' bytes with the manifest. All tensors are fp32.
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

from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.directories import START_AGAIN, State, read_manifest
from megatron_tape.checkpoint.index import CHOOSE_ANOTHER, INDEX, read_index, readers, shard_of
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest
from megatron_tape.io.safetensors import Place
from megatron_tape.model.names import AVERAGE
from megatron_tape.model.weights import shard, unshard
from megatron_tape.parallel.layout import ParallelLayout

CACHED_BYTES = 1 << 31
"""The most bytes that a process keeps in memory between checking files and loading them."""
_BLOCK = 1 << 22


def check_files(
    path: Path, files: Mapping[str, FileDigest], names: Iterable[str]
) -> tuple[dict[str, bytearray | mmap.mmap], list[str]]:
    """Read files of a checkpoint and compare their checksums; return the contents of tensor files, and the problems.

    At most CACHED_BYTES are returned; other files are read again later. Raises CheckpointError if a file cannot be
    read, which may be the fault of a disk or a network rather than of the checkpoint.
    """
    left, cached, problems = CACHED_BYTES, {}, []
    for name in names:
        keep = shard_of(name) is not None and files[name]["bytes"] <= left
        try:
            sha256, content = _read_whole(path / name, files[name]["bytes"] if keep else 0)
        except OSError as error:
            raise CheckpointError(str(path / name), f"cannot be read ({error})", START_AGAIN) from None
        if sha256 != files[name]["sha256"]:
            problems.append(f"{name} has sha256 {sha256} instead of {files[name]['sha256']}")
        elif keep:
            cached[name], left = content, left - len(content)
    return cached, problems


def _read_whole(path: Path, kept: int) -> tuple[str, bytearray | mmap.mmap]:
    """Return the sha256 of a file and its first `kept` bytes, reading it once."""
    hasher, end = hashlib.sha256(), 0
    content: bytearray | mmap.mmap = bytearray()
    if kept:
        memory = content = mmap.mmap(-1, kept, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # otherwise forked data loaders would keep it until the run ends
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            content[end : min(kept, end + len(block))] = block[: max(0, kept - end)]
            end += len(block)
    return hasher.hexdigest(), content


@dataclass
class Checkpoint:
    """A complete checkpoint on disk, opened for this rank."""

    path: Path
    state: State
    source: Checkpoint | None = None
    """The checkpoint with the weights of the frozen parameters, if this one leaves them out."""
    cached: dict[str, bytearray | mmap.mmap] = field(default_factory=dict, repr=False)
    """The bytes of files that this rank read to check them; `release` clears it after loading."""

    @property
    def step(self) -> int:
        return self.state["step"]

    @cached_property
    def files(self) -> dict[str, FileDigest]:
        """The entries of the manifest."""
        return read_manifest(self.path)["files"]

    @cached_property
    def index(self) -> dict[str, dict[str, Place]]:
        """The places of the tensors by file. Raises CheckpointError if the index is invalid."""
        index = read_index(self.path, self.state["tensor_model_parallel_size"])
        if others := sorted(index.keys() - self.files.keys()):
            raise CheckpointError(
                str(self.path / INDEX), f"names {others[0]}, which the manifest does not", CHOOSE_ANOTHER
            )
        return index

    def read_records(self) -> None:
        """Read the manifest and the index now, so that ranks that receive this object need not."""
        _ = self.files, self.index

    def places(self) -> dict[str, list[tuple[str, Place] | None]]:
        """Return, for each key, the file and place of every tensor-parallel rank's shard; None for a missing one."""
        found: dict[str, list[tuple[str, Place] | None]] = {}
        for file, places in self.index.items():
            for key, place in places.items():
                shares = found.setdefault(key, [None] * self.state["tensor_model_parallel_size"])
                shares[shard_of(file)] = file, place
        return found

    def weight_names(self) -> set[str]:
        """Return the names of the parameters whose weights are here or in the checkpoint with the frozen weights."""
        keys = {key for places in self.index.values() for key in places}
        names = {key.partition("/")[2] for key in keys if key.startswith("weight/")}
        return names if self.source is None else names | self.source.weight_names()

    def release(self) -> None:
        """Free the cached files; reading another tensor reads its file again."""
        self.cached.clear()
        if self.source is not None:
            self.source.release()

    def read(self, file: str, place: Place) -> Tensor:
        """Return an fp32 tensor of a file; it may share its memory with the cached file."""
        start, size = place["offset"], 4 * math.prod(place["shape"])
        part: memoryview | bytearray
        if file in self.cached:
            part = memoryview(self.cached[file])[start : start + size]
        else:
            part = bytearray(size)
            with open(self.path / file, "rb") as opened:
                opened.seek(start)
                del part[opened.readinto(part) :]
        if len(part) != size:
            raise CheckpointError(str(self.path / file), "ends early", CHOOSE_ANOTHER)
        if not size:
            return torch.empty(place["shape"])
        return torch.frombuffer(part, dtype=torch.float32).view(place["shape"])


class Reader:
    """Returns this rank's shard of a tensor by a key such as `exp_avg/NAME`.

    All ranks create one together and call it together, for the same keys in the same order: those of `names`, the
    parameters of all pipeline stages. With the tensor-parallel size of the checkpoint and without stages, a shard goes
    unchanged to the ranks with the same weights. Otherwise every rank receives all shards and cuts its own from the
    whole tensor.

    If a rank cannot read a tensor, all ranks get NaN in its place, so that none waits; `check` then raises an error.
    """

    def __init__(self, checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter], layout: ParallelLayout):
        """Check the shapes of the tensors. Raises CheckpointError if one is not that of its parameter."""
        self._checkpoint, self._parameters, self._layout = checkpoint, parameters, layout
        self._size, self._places = checkpoint.state["tensor_model_parallel_size"], checkpoint.places()
        sizes = {name: entry["bytes"] for name, entry in checkpoint.files.items()}
        self._readers = readers(
            sizes, self._size, layout.tensor_parallel_size, layout.replica_size, layout.pipeline_size
        )
        self.names = list(itertools.chain(*layout.gather_stages(list(parameters))))
        self._error: Exception | None = None
        self._check_shapes()
        self._source_reader = None if checkpoint.source is None else Reader(checkpoint.source, parameters, layout)

    def _check_shapes(self) -> None:
        kinds = sorted({key.partition("/")[0] for key in self._places})
        for name, parameter in self._parameters.items():
            shape = list(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO 3, `shape` is empty
            if getattr(parameter, "tensor_model_parallel", False):
                whole = shape[parameter.partition_dim] * self._layout.tensor_parallel_size
                shape[parameter.partition_dim] = whole // self._size
            for key in (f"{kind}/{name}" for kind in kinds):
                shares = self._places.get(key, [])
                if None in shares:
                    raise self._unusable(f"has {key} for only some tensor-parallel ranks")
                for _, place in shares:
                    if place["shape"] != shape:
                        raise self._unusable(f"has {key} of shape {place['shape']}, and the model's is {shape}")

    def _unusable(self, problem: str) -> CheckpointError:
        return CheckpointError(str(self._checkpoint.path), problem, CHOOSE_ANOTHER)

    def __call__(self, key: str) -> Tensor | None:
        """Return the tensor on this rank's device, or None for a parameter of another pipeline stage.

        Raises CheckpointError if the checkpoint does not have it.
        """
        layout = self._layout
        if key not in self._places and key.startswith(f"{AVERAGE}/"):  # the run averages weights from now on
            key = key.replace(AVERAGE, "weight", 1)
        if key not in self._places:
            if self._source_reader is None:
                raise self._unusable(f"has no {key}")
            return self._source_reader(key)
        shares, name = self._places[key], key.partition("/")[2]
        parameter = self._parameters.get(name)
        if self._size == layout.tensor_parallel_size and layout.pipeline_size == 1:
            return self._receive(*shares[layout.tensor_parallel_rank], layout.groups.dp_cp)  # type: ignore[call-arg]
        if name not in self._checkpoint.state["sharded"]:
            shares = shares[:1]
        received = [self._receive(*share, dist.group.WORLD) for share in shares]  # type: ignore[call-arg]
        if parameter is None:
            return None
        whole = unshard(received, parameter)
        return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

    def _receive(self, file: str, place: Place, group: dist.ProcessGroup) -> Tensor:
        source, device = self._readers[file], self._layout.device
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
        """Raise CheckpointError on every rank if one could not read a tensor; all ranks call it together at the end."""
        with Agreement(self._layout) as agreement:
            if self._error is not None:
                raise self._error
        agreement.check(self._checkpoint.path, "cannot load a checkpoint")
        if self._source_reader is not None:
            self._source_reader.check()
