"""The section `train`: the training loop."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, Decay, NotNegativeInt, Positive

EVALUATIONS = ("validation_loss", "sample", "position_norms", "gradient_norms")
"""Default of `train.evaluations`."""
ON_VALIDATION_DATA = frozenset({"validation_loss"})
"""Entries of `train.evaluations` that need the validation split, which is indexed only for them."""


@dataclass(frozen=True, kw_only=True)
class BatchRampSettings:
    """Batch size warm-up: increase the batch size to global_batch_size. The learning rate is not affected."""

    from_: Count
    """Sequences in the first step. Later batch sizes are multiples of it."""
    over_samples: Count
    """Number of sequences over which the batch size increases."""


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """Detect spikes: steps with a loss or gradient norm far above that of recent updates."""

    action: Literal["warn", "skip", "rewind"] = "warn"
    """warn logs the spike. skip also skips the update. rewind exits with status 75; after a restart, the run continues
    from its newest checkpoint and skips the data since then."""
    window: Annotated[int, Field(ge=3, le=10_000)] = 100
    """Number of previous updates to compare a step with. No spikes are detected before there are enough."""
    threshold: Positive = 6.0
    """Standard deviations above the median of the last `window` updates from which a loss or gradient norm is a spike.
    The deviation is estimated from the median absolute deviation."""
    limit: Count = 10
    """Maximum number of skipped steps or rewinds; the next spike ends the run."""


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """Keep an average of the weights, in fp32 and sharded like the optimizer state. It is saved in checkpoints,
    evaluated as validation/loss_averaged_weights, and exported with --average."""

    kind: Literal["ema", "last"]
    """ema is an exponential moving average over all updates. last is the mean of several weights from the end of the
    run."""
    decay: Decay = 0.999
    """Decay of the moving average per update; skipped steps do not count. Early updates use (1 + updates) /
    (10 + updates) if that is smaller, so that the initial weights decay quickly."""
    count: Count = 10
    """Number of weights in the mean of kind last, up to the last step of the run."""
    every: Count = 100
    """Steps between the weights of kind last, including skipped steps."""

    def share(self, step: int, steps: int, updates: int, skipped: bool = False) -> float:
        """Return the weight that the model after `step` has in the new average; the old average has the rest.

        Args:
            step: the step that has just ended, from 1.
            steps: the steps of the whole run.
            updates: the updates so far.
            skipped: whether `step` skipped its update.
        """
        if self.kind == "ema":
            return 0.0 if skipped else 1 - min(self.decay, (1 + updates) / (10 + updates))
        # Skipped steps count, since the mean is taken at fixed steps.
        number, rest = divmod(step - (steps - (self.count - 1) * self.every), self.every)
        # Before the first of these steps, the average equals the current weights.
        return 1.0 if number < 0 else 0.0 if rest else 1 / (number + 1)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Trace steps with PyTorch's profiler. Traces are written to logging.directory/profile, for ui.perfetto.dev. The
    signal SIGUSR2 traces the next two steps."""

    steps: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """First and last step of the trace. Default: trace only after a signal."""
    ranks: Annotated[list[NotNegativeInt], Field(min_length=1)] = field(default_factory=lambda: [0])
    """Ranks that are traced, one file each."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    steps: Annotated[int, Field(ge=1, le=10**8)]
    """Optimizer steps of the whole run."""
    micro_batch_size: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Sequences per GPU in one forward pass."""
    global_batch_size: Annotated[int, Field(ge=1, le=10**6)]
    """Sequences per optimizer step over all GPUs."""
    batch_ramp: BatchRampSettings | None = None
    """Batch size warm-up. Disabled by default."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of the forward and backward passes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of weight initialization and data shuffling."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto uses the GPUs, or the CPU if there are none. With auto or cuda, there must be one
    process for each visible GPU of a node."""
    allow_slow_attention: bool = False
    """Train with attention in plain PyTorch on GPUs on which the kernels do not work, instead of exiting with an
    error."""
    deterministic: bool = False
    """Use only deterministic kernels, at some cost in speed, so that a run repeated on the same GPUs gives the same
    losses. Runs on CPUs are always deterministic. On GPUs, PyTorch has no deterministic kernel for the cumulative sums
    of increments, fox, path_fox and cope."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing. full recomputes every layer in the backward pass, which costs a third more computation.
    selective recomputes everything but attention, whose outputs are stored."""
    eval_interval: Count | None = None
    """Steps between evaluations. Disabled by default."""
    evaluations: list[str] = field(default_factory=lambda: list(EVALUATIONS))
    """Evaluations to run. At every eval_interval: validation_loss, and sample, text that continues
    logging.sample_prompt. At every logged step: position_norms, TAPE's distance from RoPE by layer, and gradient_norms
    of the embeddings, attention, MLPs, the positional encoding and norms."""
    eval_steps: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Global batches per evaluation."""
    max_bad_steps: Count = 5
    """Number of consecutive steps with a non-finite loss or gradient after which the run stops."""
    spikes: SpikeSettings | None = None
    """Detect spikes of the loss or gradient norm. Disabled by default."""
    average: AverageSettings | None = None
    """Keep an average of the weights. Disabled by default."""
    profile: ProfileSettings = ProfileSettings()
    """Trace steps with PyTorch's profiler."""
    hang_timeout: Positive | None = 1800.0
    """Seconds without progress (a step, an evaluation batch or a save) after which a process writes its stack traces
    and ends the run's attempt. Start-up may take at least an hour. null disables the timeout."""

    def batch_size_keys(self) -> dict[str, int]:
        """Return the configured batch sizes by the keys of their settings."""
        sizes = {"train.global_batch_size": self.global_batch_size}
        return sizes if self.batch_ramp is None else sizes | {"train.batch_ramp.from": self.batch_ramp.from_}

    def batch_size(self, samples: int) -> int:
        """Return the batch size of the next step after `samples` sequences."""
        ramp = self.batch_ramp
        if ramp is None or samples >= ramp.over_samples:
            return self.global_batch_size
        grown = ramp.from_ + (self.global_batch_size - ramp.from_) * samples // ramp.over_samples
        return grown - grown % ramp.from_

    def batch_sizes(self, samples: int, steps: int) -> Iterator[int]:
        """Yield the batch sizes of the next `steps` steps after `samples` sequences."""
        for _ in range(steps):
            yield (size := self.batch_size(samples))
            samples += size

    @property
    def validates(self) -> bool:
        """Whether the run uses the validation split."""
        return self.eval_interval is not None and bool(ON_VALIDATION_DATA & set(self.evaluations))

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return the number of sequences seen `steps` steps after `samples` sequences."""
        while steps and (size := self.batch_size(samples)) < self.global_batch_size:  # only within the warm-up
            steps, samples = steps - 1, samples + size
        return samples + steps * self.global_batch_size
