"""Rehearse a run: train a few steps as one rank of many, on fake tensors and with a fake process
group.

A rehearsal measures the memory and the collectives of the rank. It finds operations that would fail
on a GPU or in NCCL, and lines of code where the host would wait for the GPU. The fake GPU is
torch's device `meta:0`, on which autograd works on any machine. `FakeTensorMode` raises an error if
an operation mixes it with the CPU. Collectives of the fake process group return immediately.
torch's `MemTracker` counts the bytes of storages. `Tracker` also counts the bytes of collectives by
process group, which torch's `CommDebugMode` does not.

Code that checks for CUDA takes its CPU branch, except around fused kernels. Attention runs as SDPA
or in tiles or, if a backend averages [v | z] in one call, as that backend. Attention and norms save
the tensors of libraries' kernels. Triton kernels of the position update, the rotation and SwiGLU
launch nothing, but the functions around them allocate and save tensors. Not rehearsed: other
kernels, pinned memory, streams, evaluation, logging and checkpoints. Not counted: FLOPs, kernel
launches, the number of collectives, the allocator's rounding, and memory before the measured step.
torch, Megatron, DeepSpeed and this package remain patched, so a process can rehearse only one
layout.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from megatron_tape.config.schema import RunConfig, replace_settings
from megatron_tape.data.batches import Batches
from megatron_tape.errors import one_line
from megatron_tape.model.backend import FusedKernels
from megatron_tape.model.language_model import LanguageModel
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.ops import attention_inputs
from megatron_tape.ops.backends import choice, flash, lacks
from megatron_tape.parallel import layout as parallel_layout
from megatron_tape.parallel import megatron_patches
from megatron_tape.parallel.layout import ParallelLayout, initialize_distributed, prepare_cpu
from megatron_tape.parallel.partitions import allocate
from megatron_tape.planning import communication
from megatron_tape.planning.activations import averages_in_one_call
from megatron_tape.planning.memory import memory_of_pipeline_stage
from megatron_tape.planning.plan import Plan
from megatron_tape.position import attention_needs
from megatron_tape.run.watch import Watch
from megatron_tape.training import model_building
from megatron_tape.training.engine import Engine, zero_partition
from megatron_tape.training.gradients import replicated_parameters
from megatron_tape.training.model_building import build_model, freeze_parameters, parameter_filter

GPU = torch.device("meta", 0)
"""The fake GPU."""
FAKE = "cpu:fake,meta:fake"
"""The backend of process groups for each type of device: the fake one."""
STEPS = 4
"""The first steps allocate persistent tensors such as Adam's moments. The last one is measured."""
MICRO_BATCHES = 2
"""Micro-batches per step, for each pipeline stage. These suffice for the first stage to reach its
peak memory, when it has the gradients of all its layers; more would only repeat the measurement."""
TOLERANCE = 0.05
PEAK_TOLERANCE = 0.10
ANY = 1.0
"""Allowed relative differences between measurement and estimate; ANY compares nothing."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """One line of the report: the measured and the estimated bytes of a quantity."""

    name: str
    rehearsed: int
    estimated: int
    tolerance: float = TOLERANCE
    """The allowed relative difference."""

    @property
    def agrees(self) -> bool:
        """Whether measurement and estimate differ by at most `tolerance`."""
        larger = max(self.rehearsed, self.estimated)
        return abs(self.rehearsed - self.estimated) <= self.tolerance * larger

    def __str__(self) -> str:
        line = f"{self.name:<44}{self.rehearsed / 2**20:>14,.2f}{self.estimated / 2**20:>14,.2f}"
        if self.agrees:
            return line
        return f"{line}  DIFFERS"


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
        pipeline_rank = dist.get_rank() // parallel.ranks_per_pipeline_stage
        pipeline_stage = pipeline_rank % parallel.pipeline_model_parallel_size
        plan = Plan(self.config, dist.get_world_size(), pipeline_stage)
        expected = memory_of_pipeline_stage(plan)
        kept = expected.layer_activations + expected.output_gradient
        yield Row("weights", self.weights, expected.weights)
        yield Row("optimizer state", self.optimizer, expected.optimizer)
        yield Row("kept by a forward pass", self.activations, kept)
        yield Row("peak", self.peak, expected.peak, PEAK_TOLERANCE)

        planned = communication.communication(plan, self.replicated_share)
        # Traffic of less than a thousandth of the largest estimate hardly matters for the time of a
        # step, and is not compared.
        negligible = 0.001 * max(planned.values(), default=0)
        for group, kind in sorted({*self.traffic, *planned}):
            measured = self.traffic[group, kind]
            estimated = planned[group, kind]
            tolerance = TOLERANCE
            # The traffic of Muon is not estimated.
            by_muon = plan.muon_elements > 0 and kind == communication.ALL_GATHER
            if by_muon or max(measured, estimated) <= negligible:
                tolerance = ANY
            yield Row(f"{group}: {kind}", measured, estimated, tolerance)


def rehearse(config: RunConfig) -> Rehearsal:
    """Rehearse a valid `config` as the rank that `install_fake_world` set, which must be called
    first.

    Reads no data and no checkpoint, and writes nothing. An exception that ends the run is recorded
    in `faults`.
    """
    outcome = Rehearsal(_shortened(config))
    tracker = Tracker(outcome)
    try:
        with (
            # FakeTensorMode is active in this thread only, so the backward pass must run in it too.
            torch.autograd.set_multithreading_enabled(False),
            FakeTensorMode(allow_non_fake_inputs=True),
            tracker,
        ):
            _train(outcome.config, tracker)
    except Exception as error:  # any operation may fail on the fake GPU
        # Reversed, since the innermost frame is the last of a traceback.
        line = _code_line(reversed([*traceback.walk_tb(error.__traceback__)]))
        outcome.faults[f"{type(error).__name__}: {one_line(error)} at {line}"] += 1
    return outcome


def _train(config: RunConfig, tracker: "Tracker") -> None:
    """Train for `STEPS` steps as the trainer does, and fill `tracker.outcome` in the last one."""
    outcome = tracker.outcome
    parallel = config.parallel
    layout = initialize_distributed(
        parallel.tensor_model_parallel_size,
        parallel.uses_sequence_parallel,
        context_parallel_size=parallel.context_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
    )
    tracker.label_groups(layout)

    watch = Watch(None)  # without a timeout
    model = build_model(config, layout, watch)
    watch.close()
    freeze_parameters(model, parameter_filter(config.extension))
    allocate(model, layout.device, zero_partition(config, layout))
    engine = Engine(model, config, layout)
    tracker.observe_forward(model)

    # The values of the tokens have no effect on memory or collectives.
    tokens = torch.zeros(config.model.seq_length, dtype=torch.int64)
    samples = range(STEPS * config.train.global_batch_size)
    dataset: Any = [{"tokens": tokens, "labels": tokens} for _ in samples]
    batches = Batches(
        dataset,
        None,  # no validation data
        config,
        layout,
        0,  # id of the end-of-document token
        samples,
        STEPS,
    ).training()
    for step in range(1, STEPS):
        engine.train_step(batches, config.optimizer.lr, step)

    # Under ZeRO 3, `ds_tensor` is this rank's partition of a parameter. Under ZeRO 1 and 2, each
    # rank has the whole parameter, without this attribute.
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    # Only a `Pipeline` has `tied`, and only its first and last stage have the tied weight.
    tied = getattr(model, "tied", None)
    if tied is not None and tied.weight is not None:
        weights.append(tied.weight)
    outcome.weights = _bytes_of(weights)
    # Adam's state has the master weights as keys, and dictionaries of moments as values. A storage
    # that is also one of the weights counts as weights only.
    optimizer = [*engine.adam.state, *tree_leaves([*engine.adam.state.values()])]
    outcome.optimizer = _bytes_of([*weights, *optimizer]) - outcome.weights

    for parameter in replicated_parameters(engine.module):
        if hasattr(parameter, "ds_id"):  # under ZeRO 3
            outcome.replicated_share += parameter.partition_numel()
        # Under ZeRO 1 and 2, DeepSpeed maps a parameter to the fragment of it (hp: high precision,
        # lp: low precision) in this rank's partition, if there is one.
        elif parameter._hp_mapping is not None:
            outcome.replicated_share += parameter._hp_mapping.lp_fragment_address.numel

    # The recorded peak is removed, since earlier steps had allocations that happen only once.
    tracker._peak_mem.clear()
    tracker.measuring = True
    engine.train_step(batches, config.optimizer.lr, STEPS)
    outcome.peak = tracker._peak_mem[GPU]


def install_fake_world(world_size: int, rank: int) -> None:
    """Make this process rank `rank` of `world_size` with a fake GPU, until the process ends."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import linear
    from megatron.core import parallel_state

    def own_device() -> torch.device:
        """Replace the choice of this rank's device."""
        # Megatron asks torch for the device, so torch has to return the fake GPU too.
        torch.cuda.current_device = lambda: GPU
        return GPU

    def all_gather_own_object(
        gathered: list, own: object, group: dist.ProcessGroup | None = None
    ) -> None:
        """Fill `gathered` as if all ranks had this rank's object."""
        gathered[:] = [own] * len(gathered)

    nothing = lambda *_, **__: None  # noqa: E731
    # `prepare_cpu` comes first, since it must run before DeepSpeed compiles its operators for CPUs.
    prepare_cpu()
    parallel_layout._own_device = own_device
    # Megatron's buffers are on the fake GPU, whatever `device` Megatron asks for.
    zeros = lambda *sizes, device=None, **others: torch.zeros(*sizes, device=GPU, **others)  # noqa: E731
    megatron_patches._TorchOnCpu.zeros = staticmethod(zeros)

    # The replaced functions would exchange objects with other ranks, which do not exist.
    coordinator.assert_ints_same_as_other_ranks = dist.broadcast_object_list = nothing
    dist.all_gather_object = all_gather_own_object
    # All process groups are fake ones.
    create_group = parallel_state.create_group
    parallel_state.create_group = lambda ranks=None, **others: create_group(
        ranks, **others | {"backend": FAKE}
    )

    # Code for a GPU runs on the fake one, which is of the generation that a `Plan` assumes.
    choice.generation = lambda device: Plan.generation
    choice.unsupported = nothing  # so that every backend seems to be supported
    _install_flash_attention_4()
    F.scaled_dot_product_attention = _attention
    functional: Any = F
    functional.rms_norm = lambda x, shape, weight, eps=None: FusedRMSNorm.apply(x, weight)
    # Kernels are not compared with plain torch: they compute nothing. That of the loss requires
    # another package.
    _import_kernels()
    attention_inputs.supports_rotation_kernels = lambda x: True
    model_building.verified_kernels = lambda *_: FusedKernels(position_update=True, swiglu=True)
    Module._apply = _apply
    # Adam is fused, as on a GPU.
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers._get_fused_kernels_supported_devices = lambda: ["meta"]
    deepspeed.accelerator.set_accelerator(_Accelerator())
    # Autocast does not support the device meta, so these modules keep the accelerator of CPUs.
    linear.get_accelerator = torch_autocast.get_accelerator = CPU_Accelerator

    os.environ |= {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # required, but no connection is made
    }
    dist.init_process_group(FAKE, rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the fake GPU."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of the fake GPU."""
        return str(GPU)

    current_device_name = device_name


class FusedRMSNorm(torch.autograd.Function):
    """RMSNorm that saves the tensors of a GPU's fused kernel; torch's fallback for meta saves fp32
    copies instead.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        """Return a tensor like `x`, and save what the kernel saves."""
        scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)
        # This has the shape and dtype of the result; fake tensors have no values.
        return x * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors like the gradients of `x` and of the weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Kernel:
    """A Triton kernel that launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that takes the kernel's arguments."""
        return lambda *_, **__: None


def _import_kernels() -> None:
    """Import this project's kernels with a stand-in for Triton, which need not be installed. The
    functions around the kernels then allocate and save tensors as on a GPU.
    """
    language: Any = ModuleType("triton.language")
    language.constexpr = None
    triton: Any = ModuleType("triton")
    triton.language = language
    triton.jit = lambda function: _Kernel()
    triton.cdiv = lambda dividend, divisor: -(-dividend // divisor)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()

    # Other libraries need the installed Triton, if there is one.
    stand_ins = {"triton": triton, "triton.language": language}
    installed = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules |= stand_ins
    for name in ("triton_rotation", "triton_split", "triton_position_update", "triton_swiglu"):
        importlib.import_module(f"megatron_tape.ops.kernels.{name}")
    for name, module in installed.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


def _install_flash_attention_4() -> None:
    """Make FlashAttention-4 seem to be installed, with `FlashAttention4` as its function."""
    module: Any = ModuleType(choice.FLASH_ATTN[4])
    module.flash_attn_func = lambda q, k, v, **_: FlashAttention4.apply(q, k, v)
    module.has_our_tiles = True
    sys.modules[module.__name__] = module
    choice.flash_attn_version = flash.flash_attn_version = lambda device: 4


class FlashAttention4(torch.autograd.Function):
    """Attention of (B, S, H, D) or packed (tokens, H, D) that saves the tensors of
    FlashAttention-4, in its layouts.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a tensor like the averages, as wide as `v`, and save what the kernel saves."""
        output = q.new_empty(*q.shape[:-1], v.shape[-1])
        log_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, log_sums)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return tensors like the gradients of queries, keys and values."""
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _apply(module: Module, function: Callable, recurse: bool = True) -> Module:
    """Replace `Module._apply`: apply `function` to the data of parameters and buffers. The original
    would create new fake parameters, but other objects refer to the present ones.
    """
    for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
        with torch.no_grad():
            tensor.data = function(tensor)
    return module


def _attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Replace torch's `scaled_dot_product_attention`: call the operator that a GPU would select,
    because the saved tensors depend on the operator. Returns the outputs (B, H, S, D) for queries
    (B, H, S, D), and keys and values (B, G, S, D).
    """
    # The arguments after the mask are: whether to compute the log-sum-exp, dropout, and causality.
    # The first of the results is attention's output.
    if v.shape[-1] != q.shape[-1]:  # only cuDNN supports wider values
        return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, 0.0, is_causal)[0]
    # FlashAttention supports neither masks nor fp32.
    if attn_mask is None and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    # The memory-efficient operator supports neither grouped keys nor broadcast masks.
    repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeats, dim=1)
    v = v.repeat_interleave(repeats, dim=1)
    bias = attn_mask
    if bias is not None:
        bias = bias.expand(-1, q.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)[0]


def _shortened(config: RunConfig) -> RunConfig:
    """Return `config` for a few micro-batches on the CPU, without data or tokenizer."""
    train = config.train
    plan = Plan(config, dist.get_world_size())
    micro_batches = min(plan.micro_batches, MICRO_BATCHES * plan.pipeline_size)
    # Only libraries that average values and state in one call are rehearsed as such.
    backend = "torch"
    if any(averages_in_one_call(plan, layer) for layer in range(plan.model.num_layers)):
        backend = plan.attention.backend
    elif lacks("torch", attention_needs(plan.model)):
        backend = "tiled"
    changes = {
        "model.attention_backend": backend,
        "train.device": "cpu",
        "train.global_batch_size": train.global_batch_size // plan.micro_batches * micro_batches,
        "train.batch_ramp": None,
        "data.num_workers": 0,
        "data.stages": None,
    }
    return replace_settings(config, changes)


class Tracker(MemTracker):
    """Records collectives, synchronizations and memory.

    The caller sets `measuring` before the measured step, and calls `observe_forward` before it.
    """

    def __init__(self, outcome: Rehearsal):
        super().__init__()
        self.outcome = outcome
        self.measuring = False
        """Whether this is the measured step, where waiting for the GPU in a forward or backward
        pass is a fault.
        """
        self.group_labels: dict[tuple[int, ...], str] = {}
        """Labels of process groups by their ranks."""
        # While `_in_opt` is set, MemTracker counts new tensors as optimizer state. `_in_forward`
        # unsets it, so that only tensors of forward passes count as activations.
        self._in_opt = True
        # MemTracker's hooks for per-module figures support one micro-batch only, and would keep a
        # pipeline's tensors.
        self._mod_tracker._fw_pre_hook = self._mod_tracker._fw_post_hook = lambda *_: None

    def label_groups(self, layout: ParallelLayout) -> None:
        """Label the collectives of the layout's process groups."""
        groups = layout.groups
        # If several groups have the same ranks, the last of them in this list gives the label.
        labeled = (
            (dist.group.WORLD, "all ranks"),
            (groups.mp, "tensor and pipeline parallel"),
            (groups.tp_cp, communication.SEQUENCE),
            (groups.cp, communication.CONTEXT),
            (groups.embd, communication.PIPELINE),
            (groups.pp, communication.PIPELINE),
            (groups.tp, communication.TENSOR),
            (groups.dp_cp, communication.DATA),
        )
        for group, label in labeled:
            if group is not None:  # inner stages have no group for the embedding
                self.group_labels[tuple(dist.get_process_group_ranks(group))] = label

    def observe_forward(self, model: LanguageModel | Pipeline) -> None:
        """Record the activations at the end of every forward pass of `model`."""

        def end_forward(*_: Any) -> None:
            """Record the activations in the measured step."""
            if self.measuring:
                # Not activations: weights gathered by ZeRO 3, the output layer's gradient of the
                # previous micro-batch, and Megatron's permanent buffer for gathered inputs.
                excluded = [*model.parameters(), *get_global_memory_buffer().buffer.values()]
                excluded += [x.grad for x in model.parameters() if x.grad is not None]
                self.outcome.activations = self._activations(excluded)

        chunks: Iterable[Any] = [model]
        method = "forward"
        if isinstance(model, Pipeline):
            chunks = model.model_chunks
            method = "train_micro_batches"  # in it, pipeline stages also keep received tensors
        for chunk in chunks:
            chunk.register_forward_hook(end_forward)
        # Calls of the method run within the context, since a context manager is also a decorator.
        setattr(model, method, self._in_forward()(getattr(model, method)))

    @contextlib.contextmanager
    def _in_forward(self) -> Iterator[None]:
        """Within the context, count tensors created outside of backward passes as activations."""
        self._in_opt = False
        yield
        self._in_opt = True

    def _activations(self, excluded: list[Tensor]) -> int:
        """Return the bytes that MemTracker counts as activations, without those of `excluded`."""
        activations = self.get_tracker_snapshot("current")[GPU][_MemRefType.ACT]
        # Several tensors may view one storage.
        for storage in {x.untyped_storage() for x in excluded}:
            # MemTracker has a record and a weak reference for each storage that it has seen.
            record, _ = self._WINFO.get(storage, (None, None))
            if record is not None and record.reftype == _MemRefType.ACT:
                activations -= record.mem_consumed
        return activations

    def _register_global_optimizer_hook(self) -> None:
        """Register no hook, since `_in_forward` sets `_in_opt`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func` on fake tensors, and record collectives and synchronizations."""
        # The operator of `Tensor.item`.
        if func is aten._local_scalar_dense.default:
            if args[0].device == GPU:
                self._note_wait("item")
            # Fake tensors have no value. 1.0 passes checks for infinite numbers, and 0 is a valid
            # index.
            if args[0].is_floating_point():
                return 1.0
            return 0

        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            self._note_collective(func, args, inputs)
        result = super().__torch_dispatch__(func, types, args, kwargs)

        # In both operators of copies, the last tensor among the arguments is the source.
        copies = func in (aten._to_copy.default, aten.copy_.default)
        if copies and inputs[-1].device != result.device:
            target = "host" if inputs[-1].device == GPU else "GPU"
            self._note_wait(f"copy to the {target}")
        return result

    def _note_wait(self, reason: str) -> None:
        """Record that the host waits for the GPU: a fault in a forward or backward pass."""
        if not self.measuring:
            return
        phase = "forward"
        if self._mod_tracker.is_bw:
            phase = "backward"
        elif self._in_opt:
            phase = "update"
        wait = f"{phase} pass: {reason} at {_code_line(traceback.walk_stack(None))}"
        self.outcome.waits[wait] += 1
        if phase != "update":
            self.outcome.faults[f"the host waits for the GPU in the {wait}"] += 1

    def _note_collective(self, func: Any, args: tuple, inputs: list[Tensor]) -> None:
        """Record the bytes of a collective `func`, and tensors that NCCL would refuse."""
        name = func.__name__.partition(".")[0].replace("_", "")  # such as allgatherbase
        kinds = communication.KINDS
        kind = next((kind for kind in kinds if name.startswith(kind.replace("-", ""))), name)
        # Among the operator's arguments, the process group is a script object.
        objects = (x for x in args if isinstance(x, torch.ScriptObject))
        boxed = next(x for x in objects if "ProcessGroup" in str(x._type()))
        group = dist.ProcessGroup.unbox(boxed)

        if group.size() == 1 or kind == "barrier":
            return
        if not all(x.device == GPU and x.is_contiguous() for x in inputs):
            line = _code_line(traceback.walk_stack(None))
            fault = f"{kind} of a tensor on the CPU or not contiguous fails with NCCL, at {line}"
            self.outcome.faults[fault] += 1

        # A message counts on the rank that sends it, not on the one that receives it. Scalars, with
        # at most one element, are not counted.
        if not self.measuring or name.startswith("recv") or all(x.numel() <= 1 for x in inputs):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        label = self.group_labels.get(ranks, f"{len(ranks)} ranks")
        if kind == communication.SEND:
            label = communication.PIPELINE  # some are sent in the group of all ranks
        # `inputs` has all tensors among the arguments, the output too. The larger one is the whole
        # tensor.
        self.outcome.traffic[label, kind] += max(x.nbytes for x in inputs)


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of those `tensors` that are on the fake GPU."""
    on_gpu = [x.untyped_storage() for x in tensors if isinstance(x, Tensor) and x.device == GPU]
    # By address, so that a storage with several views counts once.
    return sum(storage.nbytes() for storage in {x._cdata: x for x in on_gpu}.values())


def _code_line(frames: Iterable[Any]) -> str:
    """Return file and line of the innermost frame that is in this project and not in this
    module.
    """
    root = Path(__file__).parents[2]
    # A virtual environment may be inside of the project's folder.
    for frame, line in frames:
        path = Path(frame.f_code.co_filename)
        in_project = path.is_relative_to(root) and "site-packages" not in path.parts
        if in_project and path != Path(__file__):
            return f"{path.relative_to(root)}:{line}"
    return "an unknown line"
