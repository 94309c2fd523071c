"""A wrapper of DeepSpeed ZeRO: train a step, evaluate, and save or load the training state.

The state consists of whole tensors by parameter name, gathered over the data-parallel ranks. It is independent of
ZeRO's partitions, so a run can continue with another ZeRO stage or number of ranks.
"""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor

from megatron_tape.config.schema import RunConfig
from megatron_tape.model.layers import PositionTransformerLayer
from megatron_tape.model.names import AVERAGE
from megatron_tape.model.pipeline import TIED
from megatron_tape.parallel import deepspeed_patches
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.training import zero_partitions
from megatron_tape.training.average import WeightAverage
from megatron_tape.training.gradients import ScatteredGradients, replicated_parameters, sum_replicated
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
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step; `skipped` if its loss or gradient was not finite, or by the skip predicate."""

    loss: float
    grad_norm: float
    skipped: bool
    z_loss: float | None = None
    """The term that `optimizer.z_loss` adds to the training objective; not included in `loss`."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def deepspeed_config(config: RunConfig, layout: ParallelLayout) -> dict:
    """Return DeepSpeed's configuration, which counts a sequence once for each of its context-parallel ranks."""
    stage = config.deepspeed.zero_stage
    zero = {
        "stage": stage,
        "reduce_bucket_size": config.deepspeed.reduce_bucket_size,
        "overlap_comm": config.deepspeed.overlap_comm,
        "contiguous_gradients": True,
    }
    micro = config.train.micro_batch_size
    in_bf16 = config.train.precision == "bf16"
    # With fp32 accumulation, stage 1 would use DeepSpeed's `BF16_Optimizer`, which does not skip steps with gradients
    # that are not finite. `ScatteredGradients` accumulates in fp32 there.
    accumulates_in_fp32 = in_bf16 and stage > 1
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": config.train.global_batch_size // (micro * layout.data_parallel_size),
        "train_batch_size": config.train.global_batch_size * layout.context_parallel_size,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": zero,
        "bf16": {"enabled": in_bf16},
        "communication_data_type": config.deepspeed.communication_precision,
        "data_types": {"grad_accum_dtype": "fp32" if accumulates_in_fp32 else None},
        "steps_per_print": None,
        # DeepSpeed's throughput timer, enabled by default, synchronizes the device twice in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def zero_partition(config: RunConfig, layout: ParallelLayout) -> Callable[[torch.nn.Parameter], None] | None:
    """Return a function that keeps only this rank's ZeRO 3 partition of a parameter; None for other stages.

    `parallel.partitions.allocate` calls it for each parameter before it allocates the next one.
    """
    if config.deepspeed.zero_stage < 3:
        return None
    with _torch_launcher_variables(layout):
        # If a module is given, even an empty one, DeepSpeed replaces torch's linear function, which would otherwise
        # save gathered weights for the backward pass.
        zero = deepspeed.zero.Init(
            module=torch.nn.Module(),
            data_parallel_group=layout.mpu.get_data_parallel_group(),
            config_dict_or_path=deepspeed_config(config, layout),
            mpu=layout.mpu,
        )

    def partition(parameter: torch.nn.Parameter) -> None:
        # If the parameter's own module were given, DeepSpeed would broadcast weights that are not loaded yet.
        zero._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return partition


def step_rng(seed: int, step: int) -> np.random.Generator:
    """Return the random generator of a training step, identical on all ranks and independent of the data's."""
    return np.random.Generator(np.random.Philox(counter=[0, 0, 0, 1], key=[seed, step]))


class Engine:
    """A model under training. All ranks call every method together.

    DeepSpeed copies the weights in the constructor, so `model` must already have them. With ZeRO 3, they may be
    partitioned (see `zero_partition`).
    """

    def __init__(self, model: torch.nn.Module, config: RunConfig, layout: ParallelLayout):
        self.layout = layout
        self._seed = config.train.seed
        self._has_z_loss = config.optimizer.z_loss > 0
        self._average = None
        self._uses_muon = config.optimizer.kind == "muon"
        self.zero_stage = config.deepspeed.zero_stage
        self.clock = StepClock(layout.device)
        self.module = model.to(layout.device)
        self.names = dict(model.named_parameters())
        self.trained = {name: parameter for name, parameter in self.names.items() if parameter.requires_grad}
        self.adam = build_optimizer(model, config, layout)
        deepspeed_patches.accept_optimizer(type(self.adam))
        with _torch_launcher_variables(layout):
            self.deepspeed_engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.adam,
                config=deepspeed_config(config, layout),
                mpu=layout.mpu,
                dist_init_required=False,
            )
        if config.train.average is not None:
            self._average = WeightAverage(config.train, self.adam, self._masters(), self._update_weights)
        if self._uses_muon:
            dtype = next(model.parameters()).dtype
            self.adam.matrices = Matrices(self.trained, config.model, layout, dtype, self.deepspeed_engine.optimizer)
        self._tied = model.tied if layout.pipeline_size > 1 else None
        if self.zero_stage == 3:
            deepspeed_patches.vectorize_zero3_collectives(self.clock.waiting)
            _gather_for_whole_layers(model)
        else:
            deferred = None if self._tied is None else self.trained.get(TIED)
            zero, overlap = self.deepspeed_engine.optimizer, config.deepspeed.overlap_comm
            self._scattered = ScatteredGradients(zero, overlap, deferred, self.clock.waiting)
        self.micro_batches = self.deepspeed_engine.gradient_accumulation_steps()
        self.optimizer_steps = 0
        """Number of updates; skipped steps do not count."""
        self.before_update: Callable[[], None] | None = None
        """Called in every step after the gradients are averaged and before they are clipped."""
        if self._tied is not None:
            self._tied.start(layout.device)
        self._replicated = replicated_parameters(model)
        self._loss_sum = torch.zeros((), device=layout.device)
        """Sum of the losses of a step's micro-batches so far."""
        self._skipped_norm: float | None = None
        """Gradient norm of a step that the predicate skipped."""

    def set_skip_predicate(self, predicate: Callable[[float, float], bool]) -> None:
        """Skip updates for which `predicate(loss, gradient norm)` returns true on any rank."""

        def skips(norm: float) -> bool:
            if not math.isfinite(norm) or not self.layout.any_rank(predicate(self._mean_loss(), norm)):
                return False
            self._skipped_norm = norm
            return True

        deepspeed_patches.skip_updates(self.deepspeed_engine.optimizer, skips)

    def close(self) -> None:
        """Release the model, to which DeepSpeed's hooks have cyclic references that Python cannot collect."""
        self.deepspeed_engine.destroy()

    def set_batch_size(self, sequences: int) -> None:
        """Set the global batch size of the following steps."""
        if sequences * self.layout.context_parallel_size != self.deepspeed_engine.train_batch_size():
            self.deepspeed_engine.set_train_batch_size(sequences * self.layout.context_parallel_size)
            self.deepspeed_engine.micro_steps = 0  # DeepSpeed divides it to find a step's last micro-batch
            self.micro_batches = self.deepspeed_engine.gradient_accumulation_steps()

    def train_step(self, batches: Iterable[Batch], lr: float, step: int = 0) -> StepResult:
        """Perform one update from `micro_batches` batches, each the keyword arguments of the model's forward.

        The learning rate of a parameter group is `lr` times its `lr_scale`. Random positions depend on `step` and the
        seed.
        """
        for group in self.deepspeed_engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.deepspeed_engine.train()
        run = self._run if self.layout.pipeline_size == 1 else self._run_pipeline
        self._loss_sum, self._skipped_norm = torch.zeros((), device=self.layout.device), None
        run(itertools.islice(batches, self.micro_batches), step)
        with self.clock.phase(COMMUNICATION):
            loss = self._mean_loss()
        z_loss = self._z_loss() if self._has_z_loss else None
        norm = self.deepspeed_engine.get_global_grad_norm()
        norm = math.nan if norm is None else float(norm)
        skipped = not self.deepspeed_engine.was_step_applied()
        self.optimizer_steps += not skipped
        if self.averages:
            self._average.add(step, self.optimizer_steps, skipped)
        norm = math.nan if skipped and math.isfinite(norm) else norm
        return StepResult(loss, norm if self._skipped_norm is None else self._skipped_norm, skipped, z_loss)

    @property
    def averages(self) -> bool:
        """Whether there is an average of the weights."""
        return self._average is not None and self.optimizer_steps > 0

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Swap in the averaged weights within the context, in which the model must not be trained."""
        return self._average.swapped_in()

    def _update_weights(self) -> None:
        """Copy the fp32 weights of `_masters` to the model, as after a step."""
        zero = self.deepspeed_engine.optimizer
        if self.zero_stage < 3:
            zero.update_lp_params()
        else:
            zero._partition_all_parameters()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        if self._tied is not None:
            self._tied.share()

    def _masters(self) -> list[Tensor]:
        """Return the fp32 tensors that the optimizer updates, which are this rank's shard."""
        zero = self.deepspeed_engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.zero_stage == 3 else zero.single_partition_of_fp32_groups

    def _mean_loss(self) -> float:
        return self.layout.tokens.average(self._loss_sum / self.micro_batches).item()

    def _z_loss(self) -> float:
        total = torch.zeros((), device=self.layout.device) + self.module.take_z_loss()
        return self.layout.tokens.average(self.layout.broadcast_from_last_stage(total) / self.micro_batches).item()

    def _run(self, batches: Iterable[Batch], step: int) -> None:
        """Accumulate the losses and gradients of all micro-batches, and update."""
        for batch in self.clock.each(DATA, batches):
            with self.clock.phase(FORWARD):
                loss = self.deepspeed_engine(**batch, positions=self._positions(batch, step))
                self._loss_sum += loss.detach()
            with self.clock.phase(BACKWARD):
                self.deepspeed_engine.backward(_scaled(loss))
            if self.deepspeed_engine.is_gradient_accumulation_boundary():
                with self.clock.phase(COMMUNICATION):
                    sum_replicated(self._replicated, self.zero_stage, self.layout.groups.tp)
                self._call_before_update()
            with self.clock.phase(OPTIMIZER):
                self.deepspeed_engine.step()

    def _run_pipeline(self, batches: Iterable[Batch], step: int) -> None:
        """Do the same with Megatron's pipeline schedule, which calls the model itself.

        DeepSpeed's hooks still accumulate gradients and average them during the last backward pass, except that of a
        tied embedding, a part of which comes from the last stage.
        """
        micro_batches, engine = list(self.clock.each(DATA, batches)), self.deepspeed_engine
        positions = self._positions(micro_batches[0], step)
        with self.clock.phase(FORWARD_BACKWARD):
            total = self.module.train_micro_batches(micro_batches, positions, _scaled, self._accumulating)
        tied_trains = self._tied is not None and self._tied.trained
        with self.clock.phase(COMMUNICATION):
            if tied_trains and (gradient := self._tied.gradient()) is not None:
                self._scattered.add_to_deferred(gradient)
            self._loss_sum = self.layout.broadcast_from_last_stage(total)
            engine.allreduce_gradients()
            sum_replicated(self._replicated, self.zero_stage, self.layout.groups.tp)
        self._call_before_update()
        with self.clock.phase(OPTIMIZER):
            engine.step()
            engine.optimizer.clear_backward_seen_flag()
            if tied_trains:
                self._tied.share()

    def _call_before_update(self) -> None:
        if self.before_update is not None:
            self.before_update()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Make DeepSpeed only accumulate gradients within the context; afterwards, they are the last micro-batch's."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        yield
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def _positions(self, batch: Batch, step: int) -> Tensor:
        return self.module.token_positions(batch["tokens"], step_rng(self._seed, step))

    @torch.no_grad()
    def _forward(self, *arguments: Tensor, **keywords: Any) -> Tensor:
        self.deepspeed_engine.eval()
        model = self.deepspeed_engine if self.layout.pipeline_size == 1 else self.module
        result = model(*arguments, **keywords)
        self.deepspeed_engine.train()
        return result

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss of the batches over all data-parallel ranks."""
        losses = [self._forward(**batch) for batch in batches]
        return self.layout.tokens.average(self.layout.broadcast_from_last_stage(torch.stack(losses).mean())).item()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) of token ids (B, S), the same on all ranks."""
        return self.layout.broadcast_from_last_stage(self._forward(tokens))

    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (B, S) in nats of `labels` (B, S), the token ids that follow `tokens` (B, S)."""
        return self.layout.broadcast_from_last_stage(self._forward(tokens, labels, by_token=True))

    def training_state(self, owner: Callable[[str], int] = lambda key: 0, frozen: bool = True) -> dict[str, Tensor]:
        """Return copies, on the CPU, of this tensor-parallel rank's fp32 weights and optimizer moments.

        Args:
            owner: maps a key to the replica rank that returns its tensor; the other replicas send it their shards.
            frozen: whether to include frozen parameters, which have the precision of training and no moments.

        Returns:
            The tensors by `weight/NAME`, `exp_avg/NAME` and so on. There are no moments before the first update.
        """
        self._link_moments()
        me, state, shards = self.layout.replica_rank, {}, []
        partitioned = zero_partitions.partitionings(self.deepspeed_engine.optimizer, self._partitioned_parameters())
        for key, parameter in self._state_keys(frozen):
            kind, _, name = key.partition("/")
            if name in partitioned:
                trained = functools.partial(zero_partitions.local_elements, parameter, kind)
                local = trained if parameter.requires_grad else functools.partial(getattr, parameter, "ds_tensor")
                shape = getattr(parameter, "ds_shape", parameter.shape)
                shards.append(zero_partitions.Shard(key, shape, partitioned[name], owner(key), local))
            elif owner(key) == me:  # frozen, and replicated on every rank
                state[key] = parameter.detach().to("cpu", torch.float32).clone().contiguous()
        for key, tensor in zero_partitions.gather_to_owners(shards, self.layout.groups.dp_cp, self.layout.device):
            state[key] = tensor.to("cpu").contiguous()
        return state

    def _partitioned_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that ZeRO partitions: all with ZeRO 3, otherwise the trained ones."""
        return self.names if self.zero_stage == 3 else self.trained

    def state_sizes(self, frozen: bool = True) -> dict[str, int]:
        """Return the size in bytes of each tensor of `training_state`."""
        return {key: 4 * getattr(p, "ds_numel", p.numel()) for key, p in self._state_keys(frozen)}

    def _state_keys(self, frozen: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.names.items():
            if frozen or name in self.trained:
                for key in self._keys_of(name, name in self.trained):
                    yield f"{key}/{name}", parameter

    def _keys_of(self, name: str, trained: bool) -> tuple[str, ...]:
        """Return the kinds of tensors that the state has of a parameter: `weight`, and moments if it was updated."""
        moments = self._moments(self._uses_muon and is_matrix(name)) if trained and self.optimizer_steps else ()
        return ("weight", *moments)

    def load_training_state(
        self, read: Callable[[str], Tensor | None], optimizer_steps: int, names: Iterable[str] | None = None
    ) -> None:
        """Load the state of the trained parameters.

        The model must have the checkpoint's weights when the engine is created, since ZeRO copies them then.

        Args:
            read: returns this rank's tensor of a key, or None if it belongs to another pipeline stage.
            optimizer_steps: the number of updates so far.
            names: the trained parameters of all pipeline stages, for which `read` is called; by default this stage's.
        """
        self.optimizer_steps = optimizer_steps
        if optimizer_steps:
            self._create_moments(optimizer_steps)
        for name in self.trained if names is None else names:
            for key in self._keys_of(name, trained=True):
                if (value := read(f"{key}/{name}")) is not None:
                    self._set(self.trained[name], key, value)

    def _set(self, parameter: torch.nn.Parameter, key: str, value: Tensor) -> None:
        value = value.to(self.layout.device)
        if key == "weight":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def _create_moments(self, steps: int) -> None:
        """Create the optimizer's state, which torch creates only at the first step, and link it to ZeRO."""
        of_muon = {tensor for group in self.adam.param_groups if group.get("muon") for tensor in group["params"]}
        for tensor in self._masters():
            keys = self._moments(tensor in of_muon)
            state = {key: torch.zeros_like(tensor, memory_format=torch.preserve_format) for key in keys}
            if tensor not in of_muon:
                state["step"] = torch.tensor(float(steps), device=tensor.device)
            self.adam.state[tensor] = state
        self._link_moments()

    def _moments(self, of_muon: bool) -> tuple[str, ...]:
        """Return the keys of a tensor's optimizer state, which includes the weight average."""
        moments = (MOMENTUM_BUFFER,) if of_muon else MOMENTS
        return moments if self._average is None else (*moments, AVERAGE)

    def _link_moments(self) -> None:
        if self.zero_stage < 3 and self.optimizer_steps:
            deepspeed_patches.link_optimizer_states(self.deepspeed_engine.optimizer)


def _scaled(loss: Tensor) -> Tensor:
    """Return the loss, or NaN if it is not finite, so that its gradient is NaN too and the step is skipped."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def _gather_for_whole_layers(model: torch.nn.Module) -> None:
    """Make ZeRO 3 gather the encoding's parameters together with each layer.

    By default, it gathers them for `LayerPosition.forward` only, but attention already computes biases from them.
    """
    for layer in model.modules():
        if isinstance(layer, PositionTransformerLayer):
            for parameter in layer.position.parameters():
                deepspeed.zero.register_external_parameter(layer, parameter)


@contextlib.contextmanager
def _torch_launcher_variables(layout: ParallelLayout) -> Iterator[None]:
    """Set torchrun's variables, which DeepSpeed reads even if a single process has initialized its own group."""
    local_rank = layout.device.index or 0 if layout.device.type == "cuda" else layout.rank
    values = {"RANK": layout.rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": layout.world_size}
    added = {key: str(value) for key, value in values.items() if key not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
