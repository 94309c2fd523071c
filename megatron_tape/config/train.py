"""The section `train`: settings of the training loop."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, Decay, NotNegativeInt, Positive, Size

EVALUATIONS = ("validation_loss", "sample", "position_norms", "gradient_norms")
"""Default of `train.evaluations`."""
ON_VALIDATION_DATA = frozenset({"validation_loss"})
"""Entries of `train.evaluations` that read validation data. Without them, the validation split is
not indexed.
"""


@dataclass(frozen=True, kw_only=True)
class BatchRampSettings:
    """Batch size warm-up: increase the batch size linearly to global_batch_size. The learning rate
    is not affected.
    """

    from_: Count
    """Number of sequences in the first step. All batch sizes are multiples of it, also
    global_batch_size.
    """
    over_samples: Count
    """Number of sequences until the batch size reaches global_batch_size."""


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """Detect spikes: steps with a loss or gradient norm far above that of recent updates."""

    action: Literal["warn", "skip", "rewind"] = "warn"
    """What to do after a spike. warn logs it. skip also skips the update of this step. rewind exits
    with status 75; after a restart, the run continues from its newest checkpoint with the data that
    follows the spike."""
    window: Annotated[int, Field(ge=3, le=10_000)] = 100
    """Number of previous updates that a step is compared with. Detection starts after this number
    of updates.
    """
    threshold: Positive = 6.0
    """A loss or gradient norm is a spike if it exceeds the median of the last `window` updates by
    more than this number of standard deviations. The standard deviation is estimated from the
    median absolute deviation."""
    limit: Count = 10
    """Maximum number of skipped steps or rewinds in a run. The next spike ends the run with an
    error.
    """


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """Keep an average of the weights, in fp32 and sharded like the optimizer state. It is saved in
    checkpoints, evaluated as validation/loss_averaged_weights, and exported with --average."""

    kind: Literal["ema", "last"]
    """ema: exponential moving average over all updates. last: mean of the weights at several steps
    at the end.
    """
    decay: Decay = 0.999
    """Decay per update of kind ema; skipped steps do not count. If (1 + updates) / (10 + updates)
    is smaller, it is used instead, so that the initial weights decay quickly."""
    count: Count = 10
    """Number of steps whose weights are averaged by kind last. The last of them is the last step of
    the run.
    """
    every: Count = 100
    """Number of steps from one averaged step of kind last to the next. Skipped steps count."""

    def share(self, step: int, steps: int, updates: int, skipped: bool = False) -> float:
        """Return the fraction s in the update of the average, average = (1 - s) average + s
        weights, after a step.

        Args:
            step: the step that has just ended, counted from 1.
            steps: number of steps of the whole run.
            updates: number of updates so far, without skipped steps.
            skipped: whether `step` skipped its update.
        """
        if self.kind == "ema":
            if skipped:
                return 0.0
            return 1 - min(self.decay, (1 + updates) / (10 + updates))
        # Kind last averages the weights after fixed steps: the last one of the run, and every
        # `every`-th before it. Whether such a step skipped its update makes no difference.
        first_step = steps - (self.count - 1) * self.every
        averaged_before, remainder = divmod(step - first_step, self.every)
        # Before the first of these steps, `averaged_before` is negative, and the average equals the
        # current weights.
        if averaged_before < 0:
            return 1.0
        if remainder:
            return 0.0
        # The running mean: the weights of the n-th averaged step are added with a factor of 1 / n.
        return 1 / (averaged_before + 1)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Trace steps with PyTorch's profiler. Traces are written to logging.directory/profile; open
    them in ui.perfetto.dev. The signal SIGUSR2 traces the next two steps."""

    steps: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """First and last step of the trace, such as [10, 12]. Default: trace only after SIGUSR2."""
    ranks: Annotated[list[NotNegativeInt], Field(min_length=1)] = field(default_factory=lambda: [0])
    """Ranks to trace. Each rank writes its own file."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch sizes, precision and evaluations of training, and its reactions to failures."""

    steps: Size
    """Number of optimizer steps of the whole run."""
    micro_batch_size: Size = 1
    """Number of sequences in one forward pass of a model replica."""
    global_batch_size: Size
    """Number of sequences per optimizer step, over all GPUs. It must be a multiple of
    micro_batch_size times the data-parallel size; the quotient is the number of accumulated
    micro-batches."""
    batch_ramp: BatchRampSettings | None = None
    """Batch size warm-up. Disabled by default."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of the forward and backward passes. With bf16, the optimizer keeps fp32 weights."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of weight initialization and data shuffling."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto uses the GPUs, or the CPU if there are none. With auto or cuda,
    there must be one process for each visible GPU of a node."""
    allow_slow_attention: bool = False
    """Use attention in plain PyTorch if the fast kernels do not work on the GPU, instead of exiting
    with an error.
    """
    deterministic: bool = False
    """Use only deterministic kernels, so that a run that is repeated on the same GPUs has the same
    losses. This makes training slower. Runs on CPUs are always deterministic. On GPUs, PyTorch has
    no deterministic kernel for the cumulative sums of model.position.increments (except fixed) and
    of the encodings fox, path_fox, selective_rope, selective_rope_fox and cope."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing, which saves memory. full recomputes every layer in the backward
    pass, a third more computation. selective stores the output of attention and recomputes the rest
    of each layer."""
    eval_interval: NotNegativeInt | None = None
    """Steps between evaluations. They also run after the last step, and by default only then. 0
    disables them. By default, a run without validation data is not an error."""
    evaluations: list[str] = field(default_factory=lambda: list(EVALUATIONS))
    """Evaluations to run. At the steps of eval_interval: validation_loss, and sample, which logs
    text that continues logging.sample_prompt. At every logged step: position_norms, the distance of
    TAPE from RoPE by layer, and gradient_norms of the embeddings, attention, MLPs, the positional
    encoding and norms."""
    eval_steps: Size = 10
    """Number of global batches per evaluation of validation_loss."""
    max_bad_steps: Count = 5
    """Stop the run after this many consecutive steps with a non-finite loss or gradient. Their
    updates are skipped.
    """
    spikes: SpikeSettings | None = None
    """Detect spikes of the loss or gradient norm. Disabled by default."""
    average: AverageSettings | None = None
    """Keep an average of the weights. Disabled by default."""
    profile: ProfileSettings = ProfileSettings()
    """Trace steps with PyTorch's profiler."""
    hang_timeout: Positive | None = 1800.0
    """Seconds without progress (a step, an evaluation batch or a save) after which each process
    writes its stack traces and exits with status 77. During start-up, the timeout is at least an
    hour. null disables the timeout."""

    def batch_size_keys(self) -> dict[str, int]:
        """Return the configured batch sizes by the keys of their settings: the global batch size
        and, with `batch_ramp`, that of the first step.
        """
        sizes = {"train.global_batch_size": self.global_batch_size}
        if self.batch_ramp is not None:
            sizes["train.batch_ramp.from"] = self.batch_ramp.from_
        return sizes

    def batch_size(self, samples: int) -> int:
        """Return the global batch size of the step that follows the first `samples` sequences of
        the run.
        """
        ramp = self.batch_ramp
        if ramp is None or samples >= ramp.over_samples:
            return self.global_batch_size
        size = ramp.from_ + (self.global_batch_size - ramp.from_) * samples // ramp.over_samples
        # Round down to a multiple of the first size, which can be divided over the data-parallel
        # ranks.
        return size - size % ramp.from_

    def batch_sizes(self, samples: int, steps: int) -> Iterator[int]:
        """Yield the global batch sizes of the `steps` steps that follow the first `samples`
        sequences of the run.
        """
        for _ in range(steps):
            size = self.batch_size(samples)
            yield size
            samples += size

    @property
    def validates(self) -> bool:
        """Whether the run evaluates validation data, if there is any."""
        return self.eval_interval != 0 and bool(ON_VALIDATION_DATA & set(self.evaluations))

    def evaluates(self, step: int) -> bool:
        """Return whether evaluations run after `step` (from 1), according to `eval_interval`."""
        if self.eval_interval == 0:
            return False
        # The interval is None by default: evaluate after the last step only.
        return step == self.steps or step % (self.eval_interval or self.steps) == 0

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return the total number of sequences after the first `samples` sequences and `steps`
        further steps.
        """
        # Count step by step only as long as the batch size grows. A run may have millions of steps.
        while steps and self.batch_size(samples) < self.global_batch_size:
            samples += self.batch_size(samples)
            steps -= 1
        return samples + steps * self.global_batch_size
