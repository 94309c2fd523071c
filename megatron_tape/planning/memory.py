"""GPU memory and disk space for checkpoints, calculated from the settings. Imports no torch.

Memory consists of the model state (weights, gradients and optimizer state, as the ZeRO stages of
DeepSpeed 0.19.8 store them) and the activations of the micro-batches in flight. The CUDA context,
NCCL's buffers and fragmentation take a few per cent more, which are not included.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from operator import attrgetter, itemgetter

from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends.table import CPU
from megatron_tape.parallel.launcher import local_world_size
from megatron_tape.planning.activations import Activations, activations
from megatron_tape.planning.hardware import host_memory
from megatron_tape.planning.parameters import parameter_count, parameters
from megatron_tape.planning.plan import Plan
from megatron_tape.text import byte_size, counted

LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters."""


@dataclass(frozen=True)
class ModelStateMemory:
    """Bytes of model state and of ZeRO's buffers on one GPU."""

    weights: int
    """Weights in the run's precision."""
    gradients: int
    """Accumulated gradients of the trained parameters. In `Memory`, those that exist at the peak:
    if all micro-batches of a step are in flight when its first backward pass begins, the memory may
    peak before all gradients exist."""
    optimizer: int
    """Master weights, moments and averaged weights of the trained parameters, in fp32."""
    buffers: int = 0
    """Gradient buckets and, with ZeRO 3, gathered weights."""
    bucket_copy: int = 0
    """Additional memory while a gradient bucket is averaged over data-parallel ranks."""
    update: int = 0
    """Additional memory during the optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Memory(ModelStateMemory):
    """Peak memory of one GPU by component, in bytes. `peak` is the sum without `bucket_copy` and
    `update`.
    """

    layer_activations: int
    """Tensors that the layers keep for the backward pass."""
    output_gradient: int
    """Gradient of the output layer's weight, which the loss keeps for the backward pass."""
    working: int
    """Additional memory at the peak, which is in the loss, the backward pass or the optimizer step.
    """

    @property
    def peak(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return state + self.layer_activations + self.output_gradient + self.buffers + self.working


def memory(plan: Plan) -> Memory:
    """Return the memory of a GPU on the pipeline stage that needs most, usually the first or the
    last.
    """
    return max(
        (memory_of_pipeline_stage(stage) for stage in plan.pipeline_stages()),
        key=lambda needed: needed.peak,
    )


def memory_of_pipeline_stage(plan: Plan) -> Memory:
    """Return the memory of a GPU on the plan's pipeline stage."""
    state = zero_state(plan)
    kept = activations(plan)
    buffers = 0
    if plan.copies_embedding:
        copied = plan.model.vocab_size // plan.tensor_size * plan.model.hidden_size
        gradients = state.gradients + 4 * copied * plan.trains_output
        state = replace(state, weights=state.weights + plan.width * copied, gradients=gradients)
    if plan.config.parallel.uses_sequence_parallel and (
        plan.trains_matrices or "output" in plan.trained_kinds
    ):
        # Megatron gathers the input of trained matrices into one permanent buffer.
        buffers = plan.matrix_tokens * plan.model.hidden_size * plan.width
    buffers += state.buffers
    # ZeRO 2 allocates its buckets at the first gradient, after the logits are freed.
    loss = kept.loss - (state.buffers if plan.zero_stage == 2 else 0)
    # When the first bucket is full, activations of the last layers and of other micro-batches are
    # already freed.
    left = 1 - min(1, plan.config.deepspeed.reduce_bucket_size / max(1, plan.trained_elements))
    reducing = (
        state.bucket_copy
        + int(left * (kept.layers / plan.in_flight + max(0, kept.backward)))
        - kept.saved
    )
    # The update begins after all activations and most buffers are freed.
    updating = state.update - kept.saved - buffers

    # Pairs of the gradients and the additional memory at each moment of a step when the memory may
    # peak.
    if plan.zero_stage < 3 and plan.micro_batches <= plan.in_flight:
        moments = [(0, loss), *_first_backward(plan, state, kept), (state.gradients, updating)]
        if plan.micro_batches > 1:
            later = kept.backward - int(kept.layers / plan.in_flight)
            moments += [(state.gradients, later), (state.gradients, reducing)]
    else:
        moments = [(state.gradients, extra) for extra in (loss, kept.backward, reducing, updating)]
    gradients, additional = max(moments, key=sum)
    # If the memory peaks in the update, the gradients take the place of activations that are freed
    # before it.
    working = max(0, additional)
    gradients += additional - working

    return Memory(
        **asdict(state) | {"buffers": buffers, "gradients": gradients},
        layer_activations=kept.layers,
        output_gradient=kept.output_gradient,
        working=working,
    )


def _first_backward(
    plan: Plan, state: ModelStateMemory, kept: Activations
) -> Iterator[tuple[int, int]]:
    """Yield the gradients and the additional memory during the first backward pass of a step, under
    ZeRO 1 and 2.

    All micro-batches are in flight when it begins, so activations are freed while gradients are
    allocated. A parameter group is allocated at its first gradient (see `training.gradients`). Its
    elements are contiguous, in the order of the model: embedding, layers, output layer.
    """
    trained = plan.trained_elements
    if not trained:
        return

    is_last = plan.micro_batches == 1  # so that each group is averaged as soon as it is complete
    allocated = 4 if plan.zero_stage == 1 else 0  # ZeRO 2's bucket is counted as a buffer
    averaged = 4 / plan.data_context_size
    if plan.zero_stage == 1 and not is_last:
        averaged = 4
    elif plan.zero_stage == 1 and plan.config.deepspeed.overlap_comm:
        averaged = plan.gradient_width

    layers_begin = _trained_elements(plan, "embeddings")
    layers_end = trained - _trained_elements(plan, "output")
    of_copied_embedding = state.gradients - zero_state(plan).gradients
    micro_batch = kept.layers / plan.in_flight

    # More than 256 groups hardly change the result.
    size = max(plan.config.deepspeed.reduce_bucket_size, trained // 256)
    for begin in range(0, trained, size):
        end = min(begin + size, trained)
        gradients = (
            int(allocated * (end - begin) + averaged * (trained - end)) + of_copied_embedding
        )
        left, left_after = (
            min(1, max(0, (place - layers_begin) / max(1, layers_end - layers_begin)))
            for place in (end, begin)
        )
        yield gradients, kept.backward - int((1 - left) * micro_batch)
        if is_last:
            layers_left = int(left_after * (micro_batch + max(0, kept.backward)))
            yield gradients, state.bucket_copy + layers_left - kept.saved


def _trained_elements(plan: Plan, kind: str) -> int:
    """Return the trained elements of one kind on the plan's pipeline stage."""
    kinds = {kind} & plan.trained_kinds
    return parameter_count(plan.model, plan.extension, kinds, plan.tensor_size, plan.contents)


def check_host_memory(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if a step on CPUs cannot fit in this process's share of the node's memory.

    The estimate for GPUs without ZeRO's buffers is a lower bound: norms and attention save more
    tensors on CPUs, and pages of the buffers that are never written take no memory. Of several
    pipeline stages, that with the lowest counts.
    """
    stages = map(
        memory_of_pipeline_stage, Plan(config, processes, generation=CPU).pipeline_stages()
    )
    least, needed = min(
        ((stage.peak - stage.buffers, stage) for stage in stages), key=itemgetter(0)
    )
    state = needed.weights + needed.gradients + needed.optimizer
    sharing = local_world_size()
    available = host_memory() // sharing
    key = "train.micro_batch_size"
    fix = "lower it"
    if state > available:
        key = "model.hidden_size"
        fix = "lower it or model.num_layers, or train on a node with more memory"
    elif config.train.micro_batch_size == 1:
        if config.train.recompute == "full":
            recompute = ""
        else:
            recompute = ", or set train.recompute to full"
        key = "model.seq_length"
        fix = f"lower it{recompute}"
    problem = (
        f"is {attrgetter(key)(config)}, with which a step needs at least {byte_size(least)} per"
        " process, "
    )
    problem += (
        f"but {byte_size(available)} are available to each of"
        f" {counted(sharing, 'process', 'processes')} here"
    )
    if least > available:
        raise ConfigError(key, problem, fix)


def zero_state(plan: Plan) -> ModelStateMemory:
    """Return the bytes of weights, gradients, optimizer state and buffers in DeepSpeed."""
    settings = plan.config.deepspeed
    stage = plan.zero_stage
    width = plan.width
    trained = plan.trained_elements
    weights = width * (-(-plan.elements // plan.data_context_size) if stage == 3 else plan.elements)
    partition = -(-trained // plan.data_context_size)
    state = (
        _moments(plan, plan.data_context_size) + 4 * partition
    )  # ZeRO has master weights even in fp32 runs
    gradients = 4 * (
        trained if stage == 1 else partition
    )  # accumulated in fp32 even if the run is in bf16
    if stage < 3:
        # The norm of each matrix is computed in float64.
        counts = parameters(plan.model, plan.extension, plan.contents)
        sizes = (x.shape.elements(plan.tensor_size) for x in counts if x.kind in plan.trained_kinds)
        largest = min(partition, max(sizes, default=0))
        return ModelStateMemory(
            weights,
            gradients,
            state,
            *_buckets(plan),
            update=4 * partition - gradients + 8 * largest,
        )
    # A bucket is in the communication precision. The optimizer step makes an fp32 copy of the
    # gradients.
    bucket = plan.gradient_width * settings.reduce_bucket_size
    if plan.data_context_size > 1:
        gathered = width * min(plan.elements, LIVE_PARAMETERS)
    else:
        gathered = 0
    return ModelStateMemory(
        weights, gradients, state, bucket + gathered, update=4 * partition + bucket
    )


def _moments(plan: Plan, ranks: int) -> int:
    """Return the bytes per rank of the optimizer's moments and the averaged weights, partitioned
    over `ranks`.
    """
    bytes_per_element = 8 if plan.config.train.average is None else 12
    return bytes_per_element * -(-plan.trained_elements // ranks) - 4 * -(
        -plan.muon_elements // ranks
    )


def _buckets(plan: Plan) -> tuple[int, int]:
    """Return the bytes of the gradient bucket of ZeRO 1 or 2, and the additional bytes while it is
    averaged.
    """
    trained = plan.trained_elements
    width = plan.gradient_width
    bucket = min(plan.config.deepspeed.reduce_bucket_size, trained)
    if plan.zero_stage == 1:
        # Buckets are views of the gradients. Averaging needs a copy if gradients are sent in bf16,
        # and a tensor for this rank's partition.
        return 0, (width if width != 4 else 0) * bucket + 4 * -(-bucket // plan.data_context_size)
    # The next bucket is filled at the same time.
    return width * bucket, width * min(bucket, trained - bucket)


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of the fp32 weights and the optimizer state in one checkpoint (see
    `checkpoint.frozen`).
    """
    stages = plan.pipeline_stages()
    trained = sum(stage.trained_elements for stage in stages)
    frozen = 4 * (sum(stage.elements for stage in stages) - trained) * plan.config.checkpoint.frozen
    return plan.tensor_size * (sum(_moments(stage, 1) for stage in stages) + 4 * trained + frozen)


def checkpoints_bytes(plan: Plan) -> int:
    """Return the bytes of disk space for a run's checkpoints: the newest `checkpoint.keep`, and the
    permanent ones.

    One more is counted, because the oldest is deleted only after the next save.
    """
    settings = plan.config.checkpoint
    return checkpoint_bytes(plan) * (
        settings.keep + 1 + settings.milestones(plan.config.train.steps)
    )
