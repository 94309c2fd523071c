"""A wrapper of DeepSpeed ZeRO: train a step, evaluate, and save or load the training state.

The training state consists of the fp32 weights and the optimizer's moments by parameter name,
merged from ZeRO's partitions. A run can therefore continue with another ZeRO stage or number of
ranks. Axes: B batch, S sequence, V vocabulary.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_tape.config.schema import RunConfig
from megatron_tape.model.layers import PositionTransformerLayer
from megatron_tape.model.names import AVERAGE, EMBEDDING
from megatron_tape.parallel import deepspeed_patches
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import shard_shape
from megatron_tape.training import zero_partitions
from megatron_tape.training.average import WeightAverage
from megatron_tape.training.gradients import (
    ScatteredGradients,
    gradient_norm,
    replicated_parameters,
    sum_replicated,
)
from megatron_tape.training.muon import MOMENTUM_BUFFER, Matrices, is_matrix
from megatron_tape.training.optimizer import build_optimizer
from megatron_tape.training.step_clock import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    FORWARD_BACKWARD,
    OPTIMIZER,
    StepClock,
)

Batch = dict[str, Tensor]
"""Keyword arguments of `LanguageModel.forward`: `tokens`, `labels` and so on."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of Adam's moments in the optimizer's state."""


@dataclass(frozen=True)
class StepResult:
    """The result of a training step."""

    loss: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    skipped: bool
    """Whether the update was skipped, by the skip predicate or because the loss or gradient was not
    finite.
    """
    z_loss: float | None = None
    """The term that `optimizer.z_loss` adds to the training objective; not included in `loss`."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def deepspeed_config(config: RunConfig, layout: ParallelLayout) -> dict:
    """Return DeepSpeed's configuration of a run, as for `deepspeed.initialize`.

    To DeepSpeed, context-parallel ranks are data-parallel ranks. Its `train_batch_size` therefore
    counts a sequence once for each context-parallel rank.
    """
    zero_stage = config.deepspeed.zero_stage
    micro_batch_size = config.train.micro_batch_size
    global_batch_size = config.train.global_batch_size
    in_bf16 = config.train.precision == "bf16"
    # With fp32 accumulation, DeepSpeed would use its `BF16_Optimizer` in stage 1, which does not
    # skip steps with gradients that are not finite. In stage 1, `ScatteredGradients` accumulates in
    # fp32 instead.
    accumulation_dtype = "fp32" if in_bf16 and zero_stage > 1 else None
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": global_batch_size
        // (micro_batch_size * layout.data_parallel_size),
        "train_batch_size": global_batch_size * layout.context_parallel_size,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": config.deepspeed.reduce_bucket_size,
            "overlap_comm": config.deepspeed.overlap_comm,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": in_bf16},
        "communication_data_type": config.deepspeed.communication_precision,
        "data_types": {"grad_accum_dtype": accumulation_dtype},
        "steps_per_print": None,
        # DeepSpeed's throughput timer, enabled by default, synchronizes the device twice in every
        # micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def zero_partition(config: RunConfig, layout: ParallelLayout) -> Callable[[Parameter], None] | None:
    """Return a function that replaces a parameter by this rank's ZeRO 3 partition of it.

    Return None for ZeRO 1 and 2, which do not partition parameters. `parallel.partitions.allocate`
    calls the function for each parameter before it allocates the next one.
    """
    if config.deepspeed.zero_stage < 3:
        return None
    with _torch_launcher_variables(layout):
        # Without a `module`, DeepSpeed keeps torch's linear function, which would save gathered
        # weights for the backward pass. The module is empty, because DeepSpeed would broadcast the
        # weights of the model, which are not loaded yet.
        zero_init = deepspeed.zero.Init(
            module=Module(),
            data_parallel_group=layout.mpu.get_data_parallel_group(),
            config_dict_or_path=deepspeed_config(config, layout),
            mpu=layout.mpu,
        )

    def partition(parameter: Parameter) -> None:
        zero_init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return partition


def step_rng(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of a training step, which is the same on all ranks."""
    # The last word of the counter is 1. It is 0 in `synthetic.generator.sample_random`, so a step
    # and a synthetic sample never share random numbers, even with equal keys.
    bits = np.random.Philox(counter=[0, 0, 0, 1], key=[seed, step])
    return np.random.Generator(bits)


class Engine:
    """A model with its optimizer, trained by DeepSpeed. All ranks call every method together.

    DeepSpeed copies the weights in the constructor, so `model` must already have them. With ZeRO 3,
    they may be partitioned (see `zero_partition`).
    """

    def __init__(self, model: Module, config: RunConfig, layout: ParallelLayout):
        self.layout = layout
        self.zero_stage = config.deepspeed.zero_stage
        self.clock = StepClock(layout.device)
        """Measures the phases of each step, for the hook `StepTimes`."""
        self._seed = config.train.seed
        self._has_z_loss = config.optimizer.z_loss > 0
        self._uses_muon = config.optimizer.kind == "muon"

        self.module = model.to(layout.device)
        self.parameters = dict(model.named_parameters())
        """This pipeline stage's parameters by name, frozen ones included."""
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """Those of `parameters` that are not frozen."""
        self.adam = build_optimizer(model, config, layout)
        """The optimizer of the fp32 weights; with Muon, it also updates the matrices."""
        deepspeed_patches.accept_optimizer(type(self.adam))
        with _torch_launcher_variables(layout):
            self.deepspeed_engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.adam,
                config=deepspeed_config(config, layout),
                mpu=layout.mpu,
                dist_init_required=False,
            )
        self.micro_batches = self.deepspeed_engine.gradient_accumulation_steps()
        """Number of micro-batches of a step, on each rank."""
        self._zero = self.deepspeed_engine.optimizer
        """DeepSpeed's ZeRO optimizer, which wraps `adam`."""

        self._average: WeightAverage | None = None
        if config.train.average is not None:
            self._average = WeightAverage(
                config.train, self.adam, self._master_weights(), self._copy_masters_to_model
            )

        if self._uses_muon:
            self.adam.matrices = Matrices(
                self.trained,
                config.model,
                layout,
                next(model.parameters()).dtype,
                self._zero,
            )

        # The first and last pipeline stages share the embedding's weight and add up its gradients.
        # A `model.pipeline.TiedWeight`; None if no other stage has a copy of the weight.
        self._tied = None
        tied_weight = None
        if layout.pipeline_size > 1 and model.tied is not None:
            self._tied = model.tied
            self._tied.start(layout.device)
            # None if the weight is frozen, and in other stages than the first, which has it.
            tied_weight = self.trained.get(EMBEDDING)

        self._replicated = replicated_parameters(model)
        """Parameters whose gradients are summed over the tensor-parallel ranks."""
        deepspeed_patches.replace_gradient_norm(self._zero, self._norm_or_infinity)
        if self.zero_stage == 3:
            deepspeed_patches.vectorize_zero3_collectives(self.clock.waiting)
            _gather_for_whole_layers(model)
        else:
            self._scattered = ScatteredGradients(
                self._zero,
                config.deepspeed.overlap_comm,
                tied_weight,
                self.clock.waiting,
            )

        self.optimizer_steps = 0
        """Number of updates so far; skipped steps do not count."""
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step after the gradients are averaged and before they are clipped."""
        self._loss_sum = torch.zeros((), device=layout.device)
        """Sum of the losses of a step's micro-batches so far."""
        self._skip_predicate: Callable[[float, float], bool] | None = None
        """The argument of `set_skip_predicate`; None before its first call."""
        self._skipped_norm: float | None = None
        """Gradient norm of the current step if the predicate has skipped its update; None
        otherwise.
        """

    def set_skip_predicate(self, predicate: Callable[[float, float], bool]) -> None:
        """Skip each update for which `predicate(loss, gradient norm)` returns true on any rank."""
        self._skip_predicate = predicate

    def _norm_or_infinity(self) -> Tensor:
        """Return the gradient norm, or infinity if the skip predicate skips the update.

        DeepSpeed calls this before the update, which it skips if the result is not finite.
        """
        norm = gradient_norm(
            self.trained.values(),
            self.zero_stage,
            self.layout,
        )
        if self._skip_predicate is None:
            return norm

        norm_value = norm.item()
        # DeepSpeed skips this step in any case.
        if not math.isfinite(norm_value):
            return norm

        skips_here = self._skip_predicate(self._mean_loss(), norm_value)
        if not self.layout.any_rank(skips_here):
            return norm

        self._skipped_norm = norm_value
        return torch.full_like(norm, math.inf)

    def close(self) -> None:
        """Free the model's memory. Otherwise DeepSpeed's hooks would keep it until the process
        ends.
        """
        self.deepspeed_engine.destroy()

    def set_batch_size(self, sequences: int) -> None:
        """Set the global batch size of the following steps, in sequences."""
        # DeepSpeed counts a sequence once for each context-parallel rank.
        size = sequences * self.layout.context_parallel_size
        if size != self.deepspeed_engine.train_batch_size():
            self.deepspeed_engine.set_train_batch_size(size)
            # DeepSpeed recognizes a step's last micro-batch by the remainder of this counter
            # divided by the number of micro-batches, which has just changed.
            self.deepspeed_engine.micro_steps = 0
            self.micro_batches = self.deepspeed_engine.gradient_accumulation_steps()

    def train_step(
        self,
        batches: Iterable[Batch],
        lr: float,
        step: int = 0,
    ) -> StepResult:
        """Train on the next `micro_batches` batches, and update the weights once.

        The learning rate of a parameter group is `lr` times its `lr_scale`. `step` and `train.seed`
        seed the encodings that draw random positions.
        """
        for group in self._zero.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.deepspeed_engine.train()

        self._loss_sum = torch.zeros((), device=self.layout.device)
        self._skipped_norm = None
        # Both functions run the step's forward and backward passes, and update the weights.
        run = self._run_pipeline
        if self.layout.pipeline_size == 1:
            run = self._run
        run(itertools.islice(batches, self.micro_batches), step)

        # Averaging the loss over the ranks includes waiting for slower ranks.
        with self.clock.phase(COMMUNICATION):
            loss = self._mean_loss()
        z_loss = None
        if self._has_z_loss:
            z_loss = self._z_loss()
        skipped = not self.deepspeed_engine.was_step_applied()
        self.optimizer_steps += not skipped
        if self.has_average:
            self._average.add(step, self.optimizer_steps, skipped)

        norm = self._skipped_norm
        if norm is None:
            norm = self.deepspeed_engine.get_global_grad_norm()
            # If DeepSpeed itself skipped this step, it may return None or an earlier step's norm.
            if norm is None or skipped and math.isfinite(norm):
                norm = math.nan
        return StepResult(loss, float(norm), skipped, z_loss)

    @property
    def has_average(self) -> bool:
        """Whether the weights have an average: with `train.average`, after the first update."""
        return self._average is not None and self.optimizer_steps > 0

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Give the model the averaged weights within the context. Do not train in this context."""
        return self._average.swapped_in()

    def _copy_masters_to_model(self) -> None:
        """Copy the fp32 master weights to the model, as DeepSpeed does after a step."""
        zero = self._zero
        if self.zero_stage < 3:
            zero.update_lp_params()
        else:
            # Parameters that are gathered now would keep their old values.
            zero._partition_all_parameters()
            # For each group, copy this rank's fp32 partition to the model's partition.
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            # DeepSpeed keeps these small parameters gathered between steps.
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        if self._tied is not None:
            self._tied.send_weight()

    def _master_weights(self) -> list[Tensor]:
        """Return the flat fp32 tensors that this rank's optimizer updates: its partition of each
        parameter group.
        """
        if self.zero_stage == 3:
            return self._zero.fp32_partitioned_groups_flat
        return self._zero.single_partition_of_fp32_groups

    def _mean_loss(self) -> float:
        """Return the mean of the step's loss over micro-batches and ranks. Collective."""
        local_mean = self._loss_sum / self.micro_batches
        return self.layout.token_layout.average(local_mean).item()

    def _z_loss(self) -> float:
        """Return the mean of the step's z-loss over micro-batches and ranks. Collective."""
        # Only the last pipeline stage has a z-loss. In the others, `take_z_loss` returns the number
        # 0.0, which the addition turns into a tensor.
        total = torch.zeros((), device=self.layout.device) + self.module.take_z_loss()
        total = self.layout.broadcast_from_last_pipeline_stage(total)
        return self.layout.token_layout.average(total / self.micro_batches).item()

    def _run(self, batches: Iterable[Batch], step: int) -> None:
        """Sum the losses and gradients of the micro-batches, and update the weights.

        DeepSpeed updates them in the `step` of the last micro-batch.
        """
        for batch in self.clock.each(DATA, batches):
            with self.clock.phase(FORWARD):
                loss = self.deepspeed_engine(**batch, positions=self._positions(batch, step))
                self._loss_sum += loss.detach()
            with self.clock.phase(BACKWARD):
                self.deepspeed_engine.backward(_nan_unless_finite(loss))
            # The graph of the loss refers to recomputed layers and so to the masks of their
            # attention, which the next forward pass would keep in addition to its own.
            del loss
            if self.deepspeed_engine.is_gradient_accumulation_boundary():
                self._finish_gradients()
            with self.clock.phase(OPTIMIZER):
                self.deepspeed_engine.step()

    def _run_pipeline(self, batches: Iterable[Batch], step: int) -> None:
        """Sum the losses and gradients of the micro-batches, and update the weights. Megatron's
        pipeline schedule calls the model.

        DeepSpeed's hooks still accumulate the gradients, and average them during the last backward
        pass. The gradient of a tied embedding is averaged afterwards, because the last pipeline
        stage sends a part of it to the first one.
        """
        micro_batches = list(self.clock.each(DATA, batches))
        engine = self.deepspeed_engine
        # All micro-batches have the same positions, which depend only on the step and the length.
        positions = self._positions(micro_batches[0], step)
        with self.clock.phase(FORWARD_BACKWARD):
            loss_sum = self.module.train_micro_batches(
                micro_batches,
                positions,
                _nan_unless_finite,
                self._accumulating,
            )
        tied_is_trained = self._tied is not None and self._tied.trained
        with self.clock.phase(COMMUNICATION):
            self._loss_sum = self.layout.broadcast_from_last_pipeline_stage(loss_sum)
            gradient = self._tied.send_gradient() if tied_is_trained else None
            if gradient is not None:  # only the first stage receives it
                self._scattered.add_to_deferred(gradient)
            # Calls `ScatteredGradients._finish`, which averages the tied weight's group.
            engine.allreduce_gradients()
        self._finish_gradients()
        with self.clock.phase(OPTIMIZER):
            engine.step()
            # DeepSpeed clears this flag in its `forward`, which Megatron's schedule does not call.
            engine.optimizer.clear_backward_seen_flag()
            if tied_is_trained:
                self._tied.send_weight()

    def _finish_gradients(self) -> None:
        """Sum the averaged gradients of replicated parameters, and call `before_update`."""
        with self.clock.phase(COMMUNICATION):
            sum_replicated(self._replicated, self.zero_stage, self.layout.groups.tp)
        self.before_update()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Make DeepSpeed only accumulate gradients within the context, without averaging them.

        Megatron's schedule leaves the context before the step's last backward pass. In that pass,
        DeepSpeed averages the accumulated gradients.
        """
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        yield
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def _positions(self, batch: Batch, step: int) -> Tensor:
        """Return the positions (S,) of a micro-batch's tokens in training step `step`."""
        rng = step_rng(self._seed, step)
        return self.module.token_positions(batch["tokens"], rng)

    @torch.no_grad()
    def _forward(self, *arguments: Tensor, **keywords: Any) -> Tensor:
        """Return the result of the model's forward pass in evaluation mode, without gradients.

        With several pipeline stages, only the last one returns a result; the others return
        uninitialized memory.
        """
        # With pipeline stages, call the model itself instead of DeepSpeed's engine, as
        # `_run_pipeline` does.
        model = self.module
        if self.layout.pipeline_size == 1:
            model = self.deepspeed_engine
        self.deepspeed_engine.eval()
        result = model(*arguments, **keywords)
        self.deepspeed_engine.train()
        return result

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss of all batches of all data-parallel ranks."""
        losses = torch.stack([self._forward(**batch) for batch in batches])
        # In all pipeline stages but the last one, `losses` is uninitialized memory.
        loss = self.layout.broadcast_from_last_pipeline_stage(losses.mean())
        return self.layout.token_layout.average(loss).item()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of token ids (B, S), on all pipeline stages."""
        logits = self._forward(tokens)
        return self.layout.broadcast_from_last_pipeline_stage(logits)

    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (B, S) in nats of `labels` (B, S), the token ids that follow `tokens`
        (B, S).
        """
        losses = self._forward(tokens, labels, by_token=True)
        return self.layout.broadcast_from_last_pipeline_stage(losses)

    def training_state(
        self, owner: Callable[[str], int] = lambda key: 0, frozen: bool = True
    ) -> dict[str, Tensor]:
        """Return copies on the CPU of the fp32 weights and optimizer moments of this rank's
        tensor-parallel shard. All ranks call this together.

        Args:
            owner: maps a key to the rank that returns the tensor, as an index into the ranks with
                the same shard (`ParallelLayout.replica_rank`).
            frozen: whether to include frozen weights, which are rounded to the precision of
                training.

        Returns:
            The tensors by key: `weight/NAME`, `exp_avg/NAME` and so on. There are no moments before
                the first update.
        """
        self._link_moments()
        state = {}
        for key, parameter in self._state_keys(frozen):
            kind, _, _ = key.partition("/")
            # All ranks with the same shard must call this, not only the owner of the tensor.
            whole = zero_partitions.whole_tensor(parameter, kind)
            if owner(key) == self.layout.replica_rank:
                state[key] = whole.to("cpu")
        return state

    def state_sizes(self, frozen: bool = True) -> dict[str, int]:
        """Return the size in bytes of each tensor of `training_state`, by key.

        Each element is in fp32, which has 4 bytes.
        `frozen` is whether to include frozen weights.
        """
        return {key: 4 * shard_shape(p).numel() for key, p in self._state_keys(frozen)}

    def _state_keys(self, frozen: bool) -> Iterator[tuple[str, Parameter]]:
        """Yield the keys of `training_state`, such as `exp_avg/NAME`, each with its parameter.

        `frozen` is whether to include frozen parameters.
        """
        for name, parameter in self.parameters.items():
            if frozen or name in self.trained:
                for kind in self._kinds_of(name):
                    yield f"{kind}/{name}", parameter

    def _kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the first parts of a parameter's keys in the training state.

        They are `weight` and, after the first update, the names of its moments. `name` may be a
        trained parameter of another pipeline stage.
        """
        is_frozen = name in self.parameters and name not in self.trained
        if is_frozen or not self.optimizer_steps:
            return ("weight",)
        by_muon = self._uses_muon and is_matrix(name)
        return ("weight", *self._moments(by_muon))

    def load_training_state(
        self,
        read: Callable[[str], Tensor | None],
        optimizer_steps: int,
        names: Iterable[str] | None = None,
    ) -> None:
        """Load the training state of the trained parameters.

        The model must have had the checkpoint's weights when the engine was created, because ZeRO
        copied them then.

        Args:
            read: returns this rank's tensor of a key, or None if it belongs to another pipeline
                stage.
            optimizer_steps: the number of updates so far.
            names: names of the trained parameters of all pipeline stages, in the order in which
                `read` is called. Default: those of this stage.
        """
        self.optimizer_steps = optimizer_steps
        if optimizer_steps:
            self._create_moments(optimizer_steps)
        for name in names or self.trained:
            for kind in self._kinds_of(name):
                value = read(f"{kind}/{name}")
                if value is None:
                    continue
                value = value.to(self.layout.device)
                parameter = self.trained[name]
                zero_partitions.set_local_elements(parameter, kind, value)

    def _create_moments(self, steps: int) -> None:
        """Create the optimizer's state as zeros, so that the moments of a checkpoint can be loaded.

        Torch would create the state only in the first step. `steps` is the number of updates so
        far, on which Adam's bias correction depends.
        """
        # Under ZeRO 1 and 2, `params` of a group is its flat fp32 tensor, one of `_master_weights`.
        # Muon does not support ZeRO 3.
        muon_tensors: set[Tensor] = set()
        for group in self.adam.param_groups:
            if group["muon"]:
                muon_tensors.update(group["params"])

        for tensor in self._master_weights():
            by_muon = tensor in muon_tensors
            state = {key: torch.zeros_like(tensor) for key in self._moments(by_muon)}
            if not by_muon:
                # The fused AdamW requires this counter in fp32 on the device.
                state["step"] = torch.tensor(float(steps), device=tensor.device)
            self.adam.state[tensor] = state
        self._link_moments()

    def _moments(self, by_muon: bool) -> tuple[str, ...]:
        """Return the keys of a tensor's optimizer state: the moments and the average of the
        weights.

        `by_muon` is whether Muon updates the tensor; otherwise Adam does.
        """
        moments: tuple[str, ...] = MOMENTS
        if by_muon:
            moments = (MOMENTUM_BUFFER,)
        if self._average is None:
            return moments
        return (*moments, AVERAGE)

    def _link_moments(self) -> None:
        """Make the moments accessible from the parameters, as `zero_partitions` requires.

        ZeRO 3 needs no links, and there are no moments before the first update.
        """
        if self.zero_stage < 3 and self.optimizer_steps:
            deepspeed_patches.link_optimizer_states(self._zero)


def _nan_unless_finite(loss: Tensor) -> Tensor:
    """Return the loss, multiplied by NaN if it is not finite.

    All gradients are then NaN, so DeepSpeed skips the step. Without this, an infinite loss could
    have finite gradients.
    """
    is_finite = torch.isfinite(loss.detach())
    return loss * torch.where(is_finite, 1.0, math.nan)


def _gather_for_whole_layers(model: Module) -> None:
    """Make ZeRO 3 gather a layer's parameters of the positional encoding before the layer.

    By default, it gathers them before `LayerEncoding.forward`, which the layer calls after
    attention. Some encodings use them in attention.
    """
    for layer in model.modules():
        if isinstance(layer, PositionTransformerLayer):
            for parameter in layer.position.parameters():
                deepspeed.zero.register_external_parameter(layer, parameter)


@contextlib.contextmanager
def _torch_launcher_variables(layout: ParallelLayout) -> Iterator[None]:
    """Set torchrun's environment variables within the context, unless torchrun has set them.

    DeepSpeed reads these variables, even in a single process that no launcher has started.
    """
    local_rank = layout.rank
    if layout.device.type == "cuda":
        local_rank = layout.device.index or 0  # no index means GPU 0
    values = {"RANK": layout.rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": layout.world_size}
    added = {key: str(value) for key, value in values.items() if key not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
