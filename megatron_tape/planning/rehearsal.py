"""Rehearse a run: train a few steps as one rank of many, on fake tensors and with a fake process
group.

A rehearsal measures the memory and the collectives of the rank. It finds operations that would fail
on a GPU or in NCCL, and lines of code where the host would wait for the GPU. The fake GPU is
torch's device `meta:0`, on which autograd works on any machine. `FakeTensorMode` raises an error if
an operation mixes it with the CPU. Collectives of the fake process group return immediately.
torch's `MemTracker` counts the bytes of storages. `Tracker` also counts the bytes of collectives by
process group, which torch's `CommDebugMode` does not.

Code that checks for CUDA takes its CPU branch: attention runs as SDPA or in tiles, and norms save
the tensors of a fused kernel. Not rehearsed: Triton kernels and those of other libraries, pinned
memory, streams, evaluation, logging and checkpoints. Not counted: FLOPs, kernel launches, the
number of collectives, the allocator's rounding, and memory before the measured step. torch,
Megatron and DeepSpeed remain patched, so a process can rehearse only one layout.
"""

import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from megatron_tape.config.evaluation import EvaluationConfig
from megatron_tape.config.schema import RunConfig, replace_settings
from megatron_tape.config.train import AverageSettings
from megatron_tape.data.batches import Batches
from megatron_tape.model import initialization
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.ops.backends import choice, lacks
from megatron_tape.parallel import layout as parallel_layout
from megatron_tape.parallel import megatron_patches
from megatron_tape.parallel.layout import ParallelLayout, prepare_cpu
from megatron_tape.planning import communication as sent
from megatron_tape.planning.memory import memory_of_pipeline_stage
from megatron_tape.planning.plan import Plan
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.watch import Watch
from megatron_tape.training import trainer as training
from megatron_tape.training.engine import Engine
from megatron_tape.training.gradients import replicated_parameters

GPU = torch.device("meta", 0)
FAKE = "cpu:fake,meta:fake"
STEPS = 5
MEASURED = 4
"""The first steps allocate persistent tensors such as Adam's moments. The fourth step is measured
and ends the run.
"""
MICRO_BATCHES = 2
"""Micro-batches per step, for each pipeline stage. These suffice for the first stage to reach its
peak memory, when it has the gradients of all its layers; more would only repeat the measurement."""
TOLERANCE = 0.05
PEAK_TOLERANCE = 0.10
ANY = 1.0
"""Allowed relative differences between measurement and estimate; ANY compares nothing."""
KINDS = (
    sent.ALL_GATHER,
    sent.REDUCE_SCATTER,
    sent.ALL_TO_ALL,
    sent.ALL_REDUCE,
    sent.BROADCAST,
    sent.SEND,
)
aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """One line of the report: the measured and the estimated bytes of a quantity."""

    name: str
    rehearsed: int
    estimated: int
    tolerance: float
    """The allowed relative difference."""

    @property
    def agrees(self) -> bool:
        return abs(self.rehearsed - self.estimated) <= self.tolerance * max(
            self.rehearsed, self.estimated
        )

    def __str__(self) -> str:
        figures = "".join(
            f"{figure / 2**20:>14,.2f}" for figure in (self.rehearsed, self.estimated)
        )
        return f"{self.name:<44}{figures}{'' if self.agrees else '  DIFFERS'}"


@dataclass
class Rehearsal:
    """Measurements of one rank. Sizes are in bytes, and from the measured step only."""

    config: RunConfig
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of collectives by process group and kind. Scalars are not counted."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waits for the GPU, by pass, reason and line of code."""
    faults: Counter[str] = field(default_factory=Counter)
    """The number of operations in all steps that would fail or stall on a GPU, by description."""
    weights: int = 0
    optimizer: int = 0
    """Adam's moments and master weights."""
    activations: int = 0
    """Memory that the step's last forward pass keeps for the backward pass."""
    peak: int = 0
    replicated_share: int = 0
    """Elements in this rank's optimizer partition that are replicated over the tensor-parallel
    ranks.
    """

    def rows(self) -> Iterator[Row]:
        """Yield each measurement with its estimate for the same shortened run."""
        parallel = self.config.parallel
        stage = (
            dist.get_rank()
            // parallel.ranks_per_pipeline_stage
            % parallel.pipeline_model_parallel_size
        )
        plan = Plan(self.config, dist.get_world_size(), stage)
        expected = memory_of_pipeline_stage(plan)
        yield Row("weights", self.weights, expected.weights, TOLERANCE)
        yield Row("optimizer state", self.optimizer, expected.optimizer, TOLERANCE)
        kept = expected.layer_activations + expected.output_gradient
        yield Row("kept by a forward pass", self.activations, kept, TOLERANCE)
        yield Row("peak", self.peak, expected.peak, PEAK_TOLERANCE)
        planned = sent.communication(plan, self.replicated_share)
        negligible = 0.001 * max(planned.values(), default=0)
        for group, kind in sorted({*self.traffic, *planned}):
            pair = self.traffic[group, kind], planned[group, kind]
            by_muon = plan.muon_elements > 0 and kind == sent.ALL_GATHER  # Muon's are not estimated
            yield Row(
                f"{group}: {kind}", *pair, ANY if max(pair) <= negligible or by_muon else TOLERANCE
            )


def rehearse(config: RunConfig) -> Rehearsal:
    """Rehearse a valid `config` as the rank that `install_fake_world` set, which must be called
    first.

    Reads no data and no checkpoint, and writes only to a temporary directory. An exception that
    ends the run is recorded in `faults`.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as home:
        outcome = Rehearsal(_shortened(config, home))
        watch = Watch(None)
        tracker = Tracker(outcome)
        config = outcome.config
        directories = config.logging.directory, config.checkpoint.directory
        watch.attach(Attempt.claim(*directories, {"processes": dist.get_world_size()}), 0)
        try:
            with (
                mock.patch.multiple(
                    training,
                    build_batches=_random_batches,
                    Engine=partial(_observed_engine, tracker),
                ),
                torch.autograd.set_multithreading_enabled(False),
                FakeTensorMode(allow_non_fake_inputs=True),
                tracker,
            ):
                training.Trainer(config, watch).run()
        except _Measured:
            pass
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            line = _code_line(reversed([*traceback.walk_tb(error.__traceback__)]))
            outcome.faults[f"{type(error).__name__}: {first_line} at {line}"] += 1
        finally:
            watch.close()
    return outcome


def install_fake_world(world_size: int, rank: int) -> None:
    """Make this process rank `rank` of `world_size` with a fake GPU, until the process ends."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import linear
    from megatron.core import parallel_state

    def own_device() -> torch.device:
        torch.cuda.current_device = lambda: GPU
        return GPU

    def all_gather_own_object(
        gathered: list, own: object, group: dist.ProcessGroup | None = None
    ) -> None:
        gathered[:] = [own] * len(gathered)

    nothing = lambda *_, **__: None  # noqa: E731
    prepare_cpu()  # before DeepSpeed compiles its operators for CPUs
    parallel_layout._own_device = own_device
    zeros = lambda *sizes, device=None, **others: torch.zeros(*sizes, device=GPU, **others)  # noqa: E731
    megatron_patches._TorchOnCpu.zeros = staticmethod(zeros)
    # These would exchange objects with other ranks.
    coordinator.assert_ints_same_as_other_ranks = dist.broadcast_object_list = nothing
    dist.all_gather_object = all_gather_own_object
    create_group = parallel_state.create_group
    parallel_state.create_group = lambda ranks=None, **others: create_group(
        ranks, **others | {"backend": FAKE}
    )
    choice.unsupported = nothing
    initialization.CHUNKS["meta"] = 2**62  # all numbers of a weight at once
    F.scaled_dot_product_attention = _attention
    F.rms_norm = lambda x, shape, weight, eps=None: _FusedRMSNorm.apply(x, weight)
    torch.nn.Module._apply = _apply
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers._get_fused_kernels_supported_devices = lambda: ["meta"]
    deepspeed.accelerator.set_accelerator(_Accelerator())
    linear.get_accelerator = torch_autocast.get_accelerator = (
        CPU_Accelerator  # autocast does not support meta
    )
    os.environ |= {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group(FAKE, rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the fake GPU."""

    def device_name(self, device_index: int | None = None) -> str:
        return str(GPU)

    current_device_name = device_name


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm that saves the tensors of a GPU's fused kernel; torch's fallback for meta saves fp32
    copies instead.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _apply(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """Replace `Module._apply`, which would create new fake parameters: other objects refer to the
    present ones.
    """
    for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
        with torch.no_grad():
            tensor.data = function(tensor)
    return module


def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Replace SDPA: call the operator that a GPU would select, because the saved tensors depend on
    the operator.
    """
    if v.shape[-1] != q.shape[-1]:  # only cuDNN supports wider values
        return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, 0.0, is_causal)[0]
    if attn_mask is None and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is None:
        bias = None
    else:
        bias = attn_mask.expand(-1, q.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)[0]


def _shortened(config: RunConfig, home: str) -> RunConfig:
    """Return `config` with few steps and micro-batches, without data or tokenizer, and with its
    output in `home`.
    """
    data_size = dist.get_world_size() // config.parallel.ranks_per_sequence
    train = config.train
    schedule = config.schedule
    assumed = Plan(config, dist.get_world_size())
    micro_batches = MICRO_BATCHES * config.parallel.pipeline_model_parallel_size
    able = "tiled" if lacks("torch", assumed.encoding.needs) else "torch"
    changed = {
        "model.attention_backend": "torch_wide"
        if assumed.attention.backend == "torch_wide"
        else able,
        "train.device": "cpu",
        "train.global_batch_size": min(
            train.global_batch_size, micro_batches * train.micro_batch_size * data_size
        ),
        "train.batch_ramp": None,
        "train.average": None
        if train.average is None
        else AverageSettings(kind="ema"),  # all kinds have the same size
        "train.steps": STEPS,
        "train.eval_interval": 0,
        "train.evaluations": [],
        "schedule.warmup_steps": 1,
        "schedule.decay_steps": None if schedule.decay_steps is None else 1,
        "data.tokenizer": None,
        "data.num_workers": 0,
        "data.stages": None,
        "checkpoint.directory": f"{home}/checkpoints",
        "checkpoint.resume": "none",
        "checkpoint.frozen": True,
        "logging.directory": home,
        "logging.tensorboard": False,
        "logging.wandb": None,
    }
    return replace_settings(dataclasses.replace(config, evaluation=EvaluationConfig()), changed)


class _RandomTokens(Dataset):
    """A practically unlimited dataset of random tokens."""

    def __init__(self, config: RunConfig):
        self._model = config.model

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            key: torch.randint(self._model.vocab_size, (self._model.seq_length,))
            for key in ("tokens", "labels")
        }


def _random_batches(config: RunConfig, layout: ParallelLayout, *_: object) -> Batches:
    tokens = _RandomTokens(config)
    samples = range(config.train.steps * config.train.global_batch_size)
    return Batches(tokens, tokens, config, layout, 0, samples, config.train.steps)


class _Measured(Exception):
    """Raised after the measured step to end the run."""


class Tracker(MemTracker):
    """Records collectives, synchronizations and memory.

    The caller sets `steady` at the measured step, and runs forward passes within `forward`.
    """

    def __init__(self, outcome: Rehearsal):
        super().__init__()
        self.outcome = outcome
        self.steady = False
        """Whether this is the measured step, where waiting for the GPU in a forward or backward
        pass is a fault.
        """
        self.names: dict[object, str] = {}
        """Labels of process groups, by the name and by the ranks of the group."""
        self._in_opt = True
        # MemTracker's hooks for per-module figures support one micro-batch only, and would keep a
        # pipeline's tensors.
        self._mod_tracker._fw_pre_hook = self._mod_tracker._fw_post_hook = lambda *_: None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Within the context, count tensors created outside of backward passes as activations."""
        self._in_opt = False
        yield
        self._in_opt = True

    def activations(self, others: list[Tensor]) -> int:
        """Return the bytes that MemTracker counts as activations, except the tensors `others`."""
        known = (self._WINFO.get(storage) for storage in {x.untyped_storage() for x in others})
        of_others = sum(
            found[0].mem_consumed
            for found in known
            if found and found[0].reftype == _MemRefType.ACT
        )
        return self.get_tracker_snapshot("current")[GPU][_MemRefType.ACT] - of_others

    def _register_global_optimizer_hook(self) -> None:
        """Register no hook: `forward` sets `_in_opt`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func` on fake tensors, and record collectives and synchronizations."""
        if (
            func is aten._local_scalar_dense.default
        ):  # fake tensors have no value: 1.0 is finite, 0 a valid index
            if args[0].device == GPU:
                self._note_wait("item")
            if args[0].is_floating_point():
                return 1.0
            return 0
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            self._note_collective(func, args, inputs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if (
            func in (aten._to_copy.default, aten.copy_.default)
            and inputs[-1].device != result.device
        ):
            self._note_wait("copy to the host" if inputs[-1].device == GPU else "copy to the GPU")
        return result

    def _note_wait(self, reason: str) -> None:
        if self._mod_tracker.is_bw:
            phase = "backward"
        elif self._in_opt:
            phase = "update"
        else:
            phase = "forward"
        if self.steady:
            wait = f"{phase} pass: {reason} at {_code_line(traceback.walk_stack(None))}"
            self.outcome.waits[wait] += 1
            if phase != "update":
                self.outcome.faults[f"the host waits for the GPU in the {wait}"] += 1

    def _note_collective(self, func: Any, args: tuple, inputs: list[Tensor]) -> None:
        name = func.__name__.replace("_", "")  # such as allgatherbase
        kind = next(
            (kind for kind in KINDS if name.startswith(kind.replace("-", ""))),
            name.partition(".")[0],
        )
        boxed = next(
            x
            for x in args
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        )
        group = dist.ProcessGroup.unbox(boxed)
        if group.size() == 1 or kind == "barrier":
            return
        if not all(x.device == GPU and x.is_contiguous() for x in inputs):
            line = _code_line(traceback.walk_stack(None))
            self.outcome.faults[
                f"{kind} of a tensor on the CPU or not contiguous fails with NCCL, at {line}"
            ] += 1
        if self.steady and not name.startswith("recv") and any(x.numel() > 1 for x in inputs):
            ranks = tuple(dist.get_process_group_ranks(group))
            named = self.names.get(group.group_name) or self.names.get(
                ranks, f"{len(ranks)} other ranks"
            )
            # Some tensors between two stages are sent in the group of all ranks.
            self.outcome.traffic[sent.PIPELINE if kind == sent.SEND else named, kind] += max(
                x.nbytes for x in inputs
            )


def _observed_engine(
    tracker: Tracker, model: Any, config: RunConfig, layout: ParallelLayout
) -> Engine:
    """Return an engine that fills `tracker.outcome` in the measured step, and raises _Measured
    after it.
    """
    groups = layout.groups
    outcome = tracker.outcome
    for group, name in (
        (dist.group.WORLD, "all ranks"),
        (groups.mp, "tensor and pipeline parallel"),
        (groups.tp_cp, sent.SEQUENCE),
        (groups.cp, sent.CONTEXT),
        (groups.embd, sent.PIPELINE),
        (groups.pp, sent.PIPELINE),
        (groups.tp, sent.TENSOR),
        (groups.dp_cp, sent.DATA),
    ):
        if group is not None:  # inner stages have no group for the embedding
            tracker.names[tuple(dist.get_process_group_ranks(group))] = (
                name  # later groups override WORLD's label
            )
            tracker.names |= {} if group is dist.group.WORLD else {group.group_name: name}
    engine = Engine(model, config, layout)
    train_step = engine.train_step
    steps = itertools.count(1)

    def observed_step(*arguments: Any) -> Any:
        if next(steps) != MEASURED:
            return train_step(*arguments)
        weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        tied = model.tied if isinstance(model, Pipeline) else None
        if tied is not None and tied.weight is not None:  # on the first and the last stage
            weights.append(tied.weight)
        adam = [
            x
            for p, state in engine.adam.state.items()
            for x in (p, *state.values())
            if isinstance(x, Tensor)
        ]
        outcome.weights = _bytes_of(weights)
        outcome.optimizer = _bytes_of([*weights, *adam]) - outcome.weights
        for parameter in replicated_parameters(engine.module):
            if hasattr(parameter, "ds_id"):  # under ZeRO 3
                outcome.replicated_share += parameter.partition_numel()
            elif parameter._hp_mapping is not None:
                outcome.replicated_share += parameter._hp_mapping.lp_fragment_address.numel
        tracker._peak_mem.clear()
        tracker.steady = True
        train_step(*arguments)
        outcome.peak = tracker._peak_mem[GPU]
        raise _Measured

    def end_forward(*_: Any) -> None:
        if tracker.steady:
            # Not activations: weights gathered by ZeRO 3, the output layer's gradient of the
            # previous micro-batch, and Megatron's permanent buffer for gathered inputs.
            gradients = [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]
            others = [*model.parameters(), *gradients, *get_global_memory_buffer().buffer.values()]
            outcome.activations = tracker.activations(others)

    engine.train_step = observed_step
    for chunk in model.model_chunks if isinstance(model, Pipeline) else [model]:
        chunk.register_forward_hook(end_forward)
    # In a pipeline's schedule, stages also keep received tensors.
    if isinstance(model, Pipeline):
        name = "train_micro_batches"
    else:
        name = "forward"
    setattr(model, name, tracker.forward()(getattr(model, name)))
    return engine


def _bytes_of(tensors: Any) -> int:
    """Return the bytes of the storages of those `tensors` that are on the fake GPU."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors if x.device == GPU}
    return sum(storage.nbytes() for storage in storages.values())


def _code_line(frames: Any) -> str:
    """Return file and line of the innermost frame that is in this project and not in this
    module.
    """
    root = Path(__file__).parents[2]
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        if (
            path != Path(__file__)
            and path.is_relative_to(root)
            and "site-packages" not in path.parts
        ):
            return f"{path.relative_to(root)}:{line}"
    return "an unknown line"
