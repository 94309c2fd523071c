"""Memory of a GPU and disk space for checkpoints, by arithmetic from the settings alone. Imports no torch.

Memory consists of what stays (weights, gradients and optimizer state, as the ZeRO stages of DeepSpeed 0.19.8 hold them)
and what one micro-batch adds, or those that a pipeline stage has in flight (`activations`). The CUDA context, NCCL's
buffers and fragmentation, which take some per cent more, are not included.
"""

from dataclasses import asdict, dataclass, replace

from megatron_tape.planning.activations import activations
from megatron_tape.planning.parameters import parameters
from megatron_tape.planning.plan import Plan

LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters."""


@dataclass(frozen=True)
class State:
    """Bytes on one GPU that ZeRO holds during the whole step, and in parts of it."""

    weights: int
    """Weights in the precision of the run."""
    gradients: int
    """Gradients of the trained parameters, summed over the micro-batches."""
    optimizer: int
    """The moments of the trained parameters, their average and a copy, all in fp32."""
    buffers: int = 0
    """Buckets of gradients and, at stage 3, the weights gathered at any one time."""
    bucket_copy: int = 0
    """While a bucket is averaged: what is there beside it and the gradients."""
    update: int = 0
    """While the optimizer updates the weights."""


@dataclass(frozen=True, kw_only=True)
class Memory(State):
    """Bytes on the GPU that needs most: what ZeRO holds during the whole step, and these, add up to `peak`."""

    layer_activations: int
    """What the layers keep for the backward pass of one micro-batch."""
    logits: int
    """What the loss keeps."""
    working: int
    """Additional at the peak, in the backward pass or in the optimizer's step."""

    @property
    def peak(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return state + self.layer_activations + self.logits + self.buffers + self.working


def memory(plan: Plan) -> Memory:
    """Count the memory of the GPU that needs most: of pipeline stages, as a rule the first or the last."""
    return max((memory_of_stage(stage) for stage in plan.of_stages()), key=lambda found: found.peak)


def memory_of_stage(plan: Plan) -> Memory:
    """Count the memory of a GPU of the plan's pipeline stage."""
    state, kept, buffers = zero_state(plan), activations(plan), 0
    if plan.copies_embedding:
        copied = plan.model.vocab_size // plan.tensor_size * plan.model.hidden_size
        gradients = state.gradients + 4 * copied * plan.trains_output
        state = replace(state, weights=state.weights + plan.width * copied, gradients=gradients)
    if plan.config.parallel.uses_sequence_parallel and (plan.trains_matrices or "output" in plan.trained_kinds):
        # Megatron gathers the input of every trained matrix into one buffer, which it keeps.
        buffers = plan.matrix_tokens * plan.model.hidden_size * plan.width
    buffers += state.buffers
    # ZeRO 2 takes its buckets at the first gradient, when the logits are gone.
    loss = kept.loss - (state.buffers if plan.zero_stage == 2 else 0)
    # When the first bucket is full, what the layers above have kept is gone, and other micro-batches are, too.
    left = 1 - min(1, plan.config.deepspeed.reduce_bucket_size / max(1, plan.trained_elements))
    reducing = state.bucket_copy + int(left * (kept.layers / plan.in_flight + max(0, kept.backward))) - kept.saved
    # The update begins when all activations and most buffers are gone.
    updating = state.update - kept.saved - buffers
    return Memory(
        **asdict(state) | {"buffers": buffers},
        layer_activations=kept.layers,
        logits=kept.logits,
        working=max(loss, kept.backward, reducing, updating),
    )


def zero_state(plan: Plan) -> State:
    """Count what DeepSpeed holds of the weights, their gradients and Adam's state."""
    settings, stage, width, trained = plan.config.deepspeed, plan.zero_stage, plan.width, plan.trained_elements
    weights = width * (-(-plan.elements // plan.replicas) if stage == 3 else plan.elements)
    share = -(-trained // plan.replicas)
    state = _moments(plan, plan.replicas) + 4 * share
    gradients = 4 * (trained if stage == 1 else share)  # bf16 gradients are added up in fp32
    if stage < 3:
        # ZeRO copies the weights even if they already are fp32. Norms are taken of each matrix in float64.
        held = parameters(plan.model, plan.extension, plan.held)
        sizes = (one.shape.elements(plan.tensor_size) for one in held if one.kind in plan.trained_kinds)
        largest = min(share, max(sizes, default=0))
        return State(weights, gradients, state, *_scattering(plan), update=4 * share - gradients + 8 * largest)
    # The bucket is filled in the precision in which it is sent. The update takes an fp32 copy of the gradients.
    bucket = plan.gradient_width * settings.reduce_bucket_size
    gathered = width * min(plan.elements, LIVE_PARAMETERS) if plan.replicas > 1 else 0
    return State(weights, gradients, state, bucket + gathered, update=4 * share + bucket)


def _moments(plan: Plan, ranks: int) -> int:
    """Return the bytes of a rank's moments, and of what `train.average` keeps, if they are divided over `ranks`."""
    of_weight = 8 if plan.config.train.average is None else 12
    return of_weight * -(-plan.trained_elements // ranks) - 4 * -(-plan.muon_elements // ranks)


def _scattering(plan: Plan) -> tuple[int, int]:
    """Return the bucket that ZeRO 1 or 2 fills, and what is there beside it and the gradients while one is averaged."""
    trained, width = plan.trained_elements, plan.gradient_width
    bucket = min(plan.config.deepspeed.reduce_bucket_size, trained)
    if plan.zero_stage == 1:
        # The gradients of all micro-batches are the buckets. Until one is averaged, there are its copy, if it is sent
        # in bf16, and this rank's part of the average.
        return 0, (width if width != 4 else 0) * bucket + 4 * -(-bucket // plan.replicas)
    # The next bucket fills meanwhile.
    return width * bucket, width * min(bucket, trained - bucket)


def checkpoint_bytes(plan: Plan) -> int:
    """Return the size of one checkpoint: fp32 weights (without frozen ones, if they are left out) and state."""
    stages = plan.of_stages()
    trained = sum(stage.trained_elements for stage in stages)
    frozen = 4 * (sum(stage.elements for stage in stages) - trained) * plan.config.checkpoint.frozen
    return plan.tensor_size * (sum(_moments(stage, 1) for stage in stages) + 4 * trained + frozen)


def checkpoints_bytes(plan: Plan) -> int:
    """Return the disk space for the checkpoints kept and one more, as the oldest is removed only after a save.

    Those kept for good are counted although the newest may be among them.
    """
    settings = plan.config.checkpoint
    return checkpoint_bytes(plan) * (settings.keep + 1 + settings.milestones(plan.config.train.steps))
