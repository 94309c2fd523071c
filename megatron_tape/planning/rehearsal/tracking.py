"""What one rank does on its GPU: allocated memory by phase, collectives, waits of the host, and what would fail."""

import contextlib
import traceback
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_tape.planning.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PIPELINE,
    REDUCE_SCATTER,
    SEND,
    Traffic,
)

aten = torch.ops.aten
KINDS = {
    "allgather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "alltoall": ALL_TO_ALL,
    "allreduce": ALL_REDUCE,
    "broadcast": BROADCAST,
    "send": SEND,
}
"""The collectives, by the beginning of their names in torch; a receive is another rank's send."""
BLOCK = 512
"""CUDA's allocator rounds up to multiples of this, in bytes."""
_COPIES = {aten._to_copy.default, aten.copy_.default}
_PASSED_THROUGH = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    contextlib.__file__,
    typing_extensions.__file__,
)


@dataclass
class Record:
    """What the tracker saw while this was its record."""

    peak: int = 0
    """Bytes on the GPU."""
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    """The same bytes, by the phase in which they were allocated."""
    peak_phase: str = ""
    """The phase in which the peak was reached."""
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    """By group and collective."""
    single_elements: Counter = field(default_factory=Counter)
    """How many collectives moved one number only, by group and collective."""
    waits: Counter = field(default_factory=Counter)
    """How often the host waits for the GPU, by phase, reason and place."""
    launches: Counter = field(default_factory=Counter)
    """Kernels of our own, by name."""


class Tracker(TorchDispatchMode):
    """Sees every operator of forward and backward passes, and fills `record` and `faults`.

    The caller sets `phase` and `steady`. Memory counts under the phase in which it was allocated. In the forward and
    backward passes of steady steps, a wait of the host for the GPU is a fault.
    """

    active: ClassVar["Tracker | None"] = None

    def __init__(self):
        super().__init__()
        self.phase = "setup"
        self.steady = False
        """Whether the current step is like all that follow."""
        self.record = Record()
        self.faults: Counter[str] = Counter()
        """How often each fault occurred: something that a GPU would refuse, or that would make it wait."""
        self.allocated: dict[int, tuple[int, str]] = {}
        """Bytes and phase of every storage on the GPU, by the storage's address."""
        self.live: Counter[str] = Counter()
        self._total = 0
        self._pinned: set[int] = set()
        self._group_names: dict[str, str] = {}
        self._names_by_ranks: dict[tuple[int, ...], str] = {}

    def __enter__(self):
        Tracker.active = self
        return super().__enter__()

    def __exit__(self, *error):
        Tracker.active = None
        return super().__exit__(*error)

    def name_group(self, group: dist.ProcessGroup, name: str) -> None:
        """Name a process group; that of all ranks, and groups without a name, have the last one with their ranks."""
        self._names_by_ranks[tuple(dist.get_process_group_ranks(group))] = name
        if group is not dist.group.WORLD:
            self._group_names[group.group_name] = name

    def begin_record(self) -> Record:
        """Return the record so far, and begin another."""
        before, self.record = self.record, Record()
        self._note_peak()
        return before

    @staticmethod
    def note_wait(reason: str) -> None:
        """Note that the host waits for the GPU here."""
        if tracker := Tracker.active:
            place, phase = _place(), tracker._phase_now()
            tracker.record.waits[phase, reason, place] += 1
            if tracker.steady and phase in ("forward", "backward"):
                tracker.faults[f"the host waits for the GPU in the {phase} pass: {reason} at {place}"] += 1

    @staticmethod
    def note_launch(kernel: str) -> None:
        if tracker := Tracker.active:
            tracker.record.launches[kernel] += 1

    @staticmethod
    def pin(tensor: Tensor, *_) -> Tensor:
        """Return a copy of a host tensor in page-locked memory."""
        pinned = tensor.clone()
        if tracker := Tracker.active:
            storage = pinned.untyped_storage()
            tracker._pinned.add(storage._cdata)
            weakref.finalize(storage, tracker._pinned.discard, storage._cdata)
        return pinned

    def bytes_of(self, tensors: list[Tensor], phase: str | None = None) -> int:
        """Return the bytes of these tensors' storages on the GPU; with `phase`, only of those allocated in it."""
        held = [self.allocated.get(key, (0, "")) for key in {t.untyped_storage()._cdata for t in tensors}]
        return sum(size for size, phase_of in held if phase in (None, phase_of))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func` on fake tensors, and note its inputs and outputs."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            self._note_collective(func, args, inputs)
        elif func not in _COPIES:
            self._check_devices(func, inputs)
        if func is aten.nonzero.default and _on_gpu(inputs[0]):
            self.note_wait("nonzero")
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if func in _COPIES:
            self._note_copy(
                inputs, outputs, kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,))
            )
        for tensor in outputs:
            self._book(tensor)
        return result

    def _phase_now(self) -> str:
        # Recomputed layers run forward inside the backward pass.
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    def _read(self, tensor: Tensor) -> Any:
        """Return a value for `.item()`, which fake tensors do not have: 1.0 is finite, and 0 is a valid index."""
        if _on_gpu(tensor):
            self.note_wait("item")
        with contextlib.suppress(Exception):
            return aten._local_scalar_dense.default(tensor)
        return 1.0 if tensor.is_floating_point() else 0

    def _check_devices(self, func, inputs: list[Tensor]) -> None:
        if not any(_on_gpu(x) for x in inputs):
            return
        # A single number on the CPU may take part in an operation on the GPU.
        if any(not _on_gpu(x) and x.dim() > 0 for x in inputs):
            self.faults[f"{func.__name__} mixes tensors on the GPU and the CPU at {_place()}"] += 1

    def _note_copy(self, inputs: list[Tensor], outputs: list[Tensor], non_blocking: bool) -> None:
        to_gpu = any(_on_gpu(x) for x in outputs)
        source = inputs[-1]
        if _on_gpu(source) == to_gpu or source.numel() == 0:
            return
        if not to_gpu:
            if not non_blocking:
                self.note_wait("copy to the host")
        elif source.untyped_storage()._cdata not in self._pinned:
            self.note_wait("copy from pageable memory")
        elif not non_blocking:
            self.note_wait("blocking copy to the GPU")

    def _note_collective(self, func, args: tuple, inputs: list[Tensor]) -> None:
        name = func.__name__.strip("_")
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), name.split(".")[0])
        boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
        process_group = dist.ProcessGroup.unbox(boxed)
        if process_group.size() == 1:
            return
        # Two stages send each other some tensors in the group of all ranks, which then do not wait for the others.
        group = PIPELINE if kind == SEND else self._group_name(process_group)
        if kind != "barrier" and not all(_on_gpu(x) and x.is_contiguous() for x in inputs):
            self.faults[f"NCCL refuses {kind} of a tensor that is on the CPU or not contiguous at {_place()}"] += 1
        if kind != "barrier" and all(x.numel() == 1 for x in inputs):
            self.record.single_elements[group, kind] += 1
            return
        if name.startswith("recv"):
            return
        traffic = self.record.traffic.setdefault((group, kind), Traffic())
        traffic.calls += 1
        traffic.bytes += 0 if kind == "barrier" else max(x.nbytes for x in inputs)

    def _group_name(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._group_names:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._group_names[group.group_name] = self._names_by_ranks.get(ranks, f"{len(ranks)} other ranks")
        return self._group_names[group.group_name]

    def _book(self, tensor: Tensor) -> None:
        if not _on_gpu(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        held, phase = self.allocated.get(key, (None, None))
        if held == size:
            return
        if held is None:
            phase, held = self._phase_now(), 0
            weakref.finalize(storage, self._release, key)
        self.allocated[key] = size, phase
        self.live[phase] += size - held
        self._total += size - held
        if self._total > self.record.peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self.record.peak, self.record.peak_by_phase = self._total, dict(self.live)
        self.record.peak_phase = self._phase_now()

    def _release(self, key: int) -> None:
        size, phase = self.allocated.pop(key)
        self.live[phase] -= size
        self._total -= size


def _on_gpu(tensor: Tensor) -> bool:
    # Asking a fake tensor for `is_cuda` costs as much as an operator.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def _place() -> str:
    """Return file and line of the innermost caller outside torch and this package."""
    return _innermost(list(traceback.walk_stack(None))[::-1])


def place_of(error: BaseException) -> str:
    """Return file and line outside torch and this package that an error came from."""
    return _innermost(list(traceback.walk_tb(error.__traceback__)))


def _innermost(frames: list) -> str:
    frame, line = next(
        ((f, n) for f, n in reversed(frames) if not f.f_code.co_filename.startswith(_PASSED_THROUGH)), frames[-1]
    )
    path = Path(frame.f_code.co_filename)
    root = next((parent for parent in path.parents if parent.name == "site-packages"), Path(__file__).parents[3])
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{line}"
