"""GPU memory and disk space for checkpoints, calculated from the settings. Imports no torch.

Memory consists of the model state (weights, gradients and optimizer state, as the ZeRO stages of
DeepSpeed 0.19.8 store them) and the activations of the micro-batches in flight. The CUDA context,
NCCL's buffers and fragmentation take a few per cent more, which are not included.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends.table import CPU
from megatron_tape.parallel.launcher import local_world_size
from megatron_tape.planning.activations import Activations, activations
from megatron_tape.planning.hardware import host_memory
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
        """Peak memory in bytes."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.layer_activations + self.output_gradient + self.buffers + self.working


def memory(plan: Plan) -> Memory:
    """Return the memory of a GPU on the pipeline stage that needs most, usually the first or the
    last.
    """
    return max(map(memory_of_pipeline_stage, plan.pipeline_stages()), key=attrgetter("peak"))


def memory_of_pipeline_stage(plan: Plan) -> Memory:
    """Return the memory of a GPU on the plan's pipeline stage."""
    state = model_state_memory(plan)
    activation_bytes = activations(plan)
    weights = state.weights
    gradients = state.gradients
    buffers = state.buffers

    if plan.copies_embedding:
        # The copy's gradient is in fp32.
        copied_elements = plan.vocabulary * plan.model.hidden_size
        weights += plan.width * copied_elements
        gradients += 4 * copied_elements * plan.trains_output
    trains_any_matrix = plan.trains_matrices or "output" in plan.trained_kinds
    if trains_any_matrix and plan.config.parallel.uses_sequence_parallel:
        # Megatron gathers the input of trained matrices into one permanent buffer.
        buffers += plan.matrix_tokens * plan.model.hidden_size * plan.width

    # Additional memory at the moments of a step when the memory may peak.
    micro_batch_bytes = activation_bytes.layers / plan.in_flight  # activations of one micro-batch
    loss = activation_bytes.loss
    if plan.zero_stage == 2:
        loss -= state.buffers  # allocated at the first gradient, after the logits are freed
    # When the first bucket is full and reduced, the backward pass has already freed the activations
    # of the last layers and of all other micro-batches. `share_reduced` is the part of the trained
    # elements in this bucket, and so about the part of the layers whose activations are freed.
    share_reduced = min(1, plan.config.deepspeed.reduce_bucket_size / max(1, plan.trained_elements))
    layers_left = int((1 - share_reduced) * (micro_batch_bytes + max(0, activation_bytes.backward)))
    reducing = state.bucket_copy + layers_left - activation_bytes.saved
    # The update begins after all activations and most buffers are freed.
    updating = state.update - activation_bytes.saved - buffers

    # Pairs of the gradients and the additional memory at these moments.
    moments = [
        (gradients, extra) for extra in (loss, activation_bytes.backward, reducing, updating)
    ]
    # If all micro-batches are in flight when the first backward pass begins, no gradients exist in
    # the forward passes, and only some of them in the first backward pass.
    if plan.zero_stage < 3 and plan.micro_batches <= plan.in_flight:
        copy_gradients = gradients - state.gradients
        first_backward = _first_backward(plan, state, activation_bytes, copy_gradients)
        moments = [(0, loss), *first_backward, (gradients, updating)]
        if plan.micro_batches > 1:
            # In later backward passes, one micro-batch less is in flight.
            later_backward = activation_bytes.backward - int(micro_batch_bytes)
            moments += [(gradients, later_backward), (gradients, reducing)]
    # The memory peaks at the moment with the largest sum of both.
    gradients, additional = max(moments, key=sum)
    # `additional` is negative if the memory peaks in the update and the update needs less than the
    # activations that are freed before it. `gradients` is then lowered, so that `peak` is right.
    working = max(0, additional)
    return Memory(
        weights=weights,
        gradients=gradients + additional - working,
        optimizer=state.optimizer,
        buffers=buffers,
        bucket_copy=state.bucket_copy,
        update=state.update,
        layer_activations=activation_bytes.layers,
        output_gradient=activation_bytes.output_gradient,
        working=working,
    )


def _first_backward(
    plan: Plan, state: ModelStateMemory, activation_bytes: Activations, copy_gradients: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs of the bytes of gradients and of additional memory during the first backward pass
    of a step, under ZeRO 1 and 2. `copy_gradients` are the bytes of a copied embedding's gradients.

    All micro-batches are in flight when it begins, so activations are freed while gradients are
    allocated. The gradients of a parameter group are allocated at its first gradient. A group's
    elements are contiguous, in the order of the model: embedding, layers, output layer.
    """
    trained = plan.trained_elements
    # In the last backward pass of a step, each group is averaged as soon as it is complete. This
    # first backward pass is also the last one if the step has a single micro-batch.
    is_last = plan.micro_batches == 1
    micro_batch_bytes = activation_bytes.layers / plan.in_flight

    # Bytes per element of a group's gradients, before and after they are averaged.
    allocated = 0  # ZeRO 2's bucket is counted as a buffer
    averaged = 4 / plan.data_context_size
    if plan.zero_stage == 1:
        allocated = 4
        if not is_last:
            averaged = 4
        elif plan.config.deepspeed.overlap_comm:
            averaged = plan.gradient_width

    # The indices among the trained elements at which the layers begin and end.
    layers_begin = plan.elements_of({"embeddings"} & plan.trained_kinds)
    layers_end = trained - plan.elements_of({"output"} & plan.trained_kinds)

    def share_before(element: int) -> float:
        """Return the fraction (0 to 1) of the layers' elements that come before `element`."""
        layer_elements = max(1, layers_end - layers_begin)
        return min(1, max(0, (element - layers_begin) / layer_elements))

    # At most about 256 groups are examined, since more hardly change the result.
    group_size = max(plan.config.deepspeed.reduce_bucket_size, trained // 256)
    for begin in range(0, trained, group_size):
        end = min(begin + group_size, trained)
        # The backward pass comes from the end of the model. So the groups of later elements are
        # already averaged, and the activations of their layers freed.
        gradients = int(allocated * (end - begin) + averaged * (trained - end))
        gradients += copy_gradients
        freed = int((1 - share_before(end)) * micro_batch_bytes)
        yield gradients, activation_bytes.backward - freed
        if is_last:
            layers_left = int(
                share_before(begin) * (micro_batch_bytes + max(0, activation_bytes.backward))
            )
            yield gradients, state.bucket_copy + layers_left - activation_bytes.saved


def check_host_memory(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if a step on CPUs cannot fit in this process's share of the node's memory.

    The estimate for GPUs without ZeRO's buffers is a lower bound: norms and attention save more
    tensors on CPUs, and pages of the buffers that are never written take no memory. Of several
    pipeline stages, the one with the lowest estimate counts.
    """
    stages = Plan(config, processes, generation=CPU).pipeline_stages()
    stage_memory = min(map(memory_of_pipeline_stage, stages), key=_without_buffers)
    required = _without_buffers(stage_memory)
    processes_here = local_world_size()
    available = host_memory() // processes_here
    if required <= available:
        return

    # A smaller batch does not help if the model state alone is too large.
    key = "train.micro_batch_size"
    fix = "lower it"
    if stage_memory.weights + stage_memory.gradients + stage_memory.optimizer > available:
        key = "model.hidden_size"
        fix = "lower it or model.num_layers, or train on a node with more memory"
    elif config.train.micro_batch_size == 1:
        key = "model.seq_length"
        if config.train.recompute != "full":
            fix = "lower it, or set train.recompute to full"
    raise ConfigError(
        key,
        f"is {attrgetter(key)(config)}, with which a step needs at least {byte_size(required)} per"
        f" process, but {byte_size(available)} are available to each of"
        f" {counted(processes_here, 'process', 'processes')} here",
        fix,
    )


def _without_buffers(stage_memory: Memory) -> int:
    """Return the peak without ZeRO's buffers, in bytes."""
    return stage_memory.peak - stage_memory.buffers


def model_state_memory(plan: Plan) -> ModelStateMemory:
    """Return the bytes of weights, gradients, optimizer state and buffers in DeepSpeed."""
    ranks = plan.data_context_size
    trained = plan.trained_elements
    partition = -(-trained // ranks)  # rounded up
    # ZeRO has master weights even in fp32 runs.
    optimizer = _moment_bytes(plan, ranks) + 4 * partition
    if plan.zero_stage == 3:
        # A bucket is in the communication precision. The optimizer step makes an fp32 copy of the
        # gradients.
        bucket = plan.gradient_width * plan.config.deepspeed.reduce_bucket_size
        gathered = 0  # bytes of weights gathered from all ranks
        if ranks > 1:
            gathered = plan.width * min(plan.elements, LIVE_PARAMETERS)
        return ModelStateMemory(
            weights=plan.width * -(-plan.elements // ranks),
            gradients=4 * partition,
            optimizer=optimizer,
            buffers=bucket + gathered,
            update=4 * partition + bucket,
        )

    gradients = 4 * partition  # accumulated in fp32 even if the run is in bf16
    if plan.zero_stage == 1:
        gradients = 4 * trained
    buffers, bucket_copy = _bucket_bytes(plan)
    # In the update, a rank needs only the gradients of its partition, so the memory of all others
    # is subtracted.
    return ModelStateMemory(
        weights=plan.width * plan.elements,
        gradients=gradients,
        optimizer=optimizer,
        buffers=buffers,
        bucket_copy=bucket_copy,
        update=4 * partition - gradients,
    )


def _moment_bytes(plan: Plan, ranks: int) -> int:
    """Return the bytes per rank of the optimizer's moments and the averaged weights, partitioned
    over `ranks`.
    """
    # Two moments and, for averaged weights, half as many bytes; all in fp32.
    moments = 8 * -(-plan.trained_elements // ranks)
    if plan.config.train.average is not None:
        moments += moments // 2
    # Muon has one moment, so the second one of its elements is subtracted.
    return moments - 4 * -(-plan.muon_elements // ranks)


def _bucket_bytes(plan: Plan) -> tuple[int, int]:
    """Return the bytes of the gradient bucket of ZeRO 1 or 2, and the additional bytes while it is
    averaged.
    """
    trained = plan.trained_elements
    width = plan.gradient_width
    bucket = min(plan.config.deepspeed.reduce_bucket_size, trained)
    if plan.zero_stage == 2:
        # The next bucket is filled at the same time.
        return width * bucket, width * min(bucket, trained - bucket)
    # Buckets are views of the gradients. Averaging needs a tensor for this rank's partition, and a
    # copy if gradients are sent in bf16.
    copied = 4 * -(-bucket // plan.data_context_size)
    if width < 4:
        copied += width * bucket
    return 0, copied


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of the fp32 weights and the optimizer state in one checkpoint. Frozen
    weights are included if `checkpoint.frozen` is true.
    """
    total = 0
    for stage in plan.pipeline_stages():
        # The moments of all data-parallel ranks together (as if one rank had them), and the master
        # weights.
        total += _moment_bytes(stage, ranks=1) + 4 * stage.trained_elements
        if plan.config.checkpoint.frozen:
            total += 4 * (stage.elements - stage.trained_elements)
    # Each tensor-parallel rank has a shard of this size.
    return plan.tensor_size * total


def checkpoints_bytes(plan: Plan) -> int:
    """Return the bytes of disk space for a run's checkpoints: the newest `checkpoint.keep`, and the
    permanent ones.

    One more is counted, because the oldest is deleted only after the next save.
    """
    settings = plan.config.checkpoint
    permanent = settings.milestones(plan.config.train.steps)
    return checkpoint_bytes(plan) * (settings.keep + 1 + permanent)
