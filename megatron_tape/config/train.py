"""The section `train`: the training loop."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, Decay, NotNegativeInt, Positive

EVALUATIONS = ("validation_loss", "sample", "position_norms", "gradient_norms")
"""What `train.evaluations` names by default."""
ON_VALIDATION_DATA = frozenset({"validation_loss"})
"""Those of `train.evaluations` that read the validation split; without any of them it is not indexed."""


@dataclass(frozen=True, kw_only=True)
class BatchRampSettings:
    """Begin with smaller steps, which grow to global_batch_size. The learning rate does not depend on it."""

    from_: Count
    """Sequences of the first step; every later step takes a multiple of them."""
    over_samples: Count
    """Sequences over which the steps grow."""


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """Look for steps whose loss or gradient norm is far above that of the last updates, and do something about them."""

    action: Literal["warn", "skip", "rewind"] = "warn"
    """Say so; or leave the update out; or end the process with status 75: started again, the run continues from its
    newest checkpoint and skips the data since then."""
    window: Annotated[int, Field(ge=3, le=10_000)] = 100
    """How many updates a step is compared with; the first ones are compared with nothing."""
    threshold: Positive = 6.0
    """How many standard deviations above the median, estimated from the median deviation, a spike is."""
    limit: Count = 10
    """After so many skipped steps or rewinds, the next spike ends the run."""


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """Also keep an average of the weights, in fp32 and divided as the optimizer's state is. It is saved, evaluated as
    validation/loss_averaged_weights, and exported with --average."""

    kind: Literal["ema", "last"]
    """An exponential moving average over all updates, or the mean of the last weights of the run."""
    decay: Decay = 0.999
    """Decay of the moving average per update; skipped steps do not update it. Early updates use (1 + updates) /
    (10 + updates) if that is smaller, so that the initial weights are soon forgotten."""
    count: Count = 10
    """How many weights the mean is of, the last of which are those after the last step."""
    every: Count = 100
    """Steps between them, skipped ones included."""

    def share(self, step: int, steps: int, updates: int, skipped: bool = False) -> float:
        """Return the share of the weights after `step`, of `steps`, in the new average; the rest is the old one's.

        There were so many `updates`, none of them in `step` if that was `skipped`.
        """
        if self.kind == "ema":
            return 0.0 if skipped else 1 - min(self.decay, (1 + updates) / (10 + updates))
        # Skipped steps count, since the mean is of weights at fixed steps.
        number, rest = divmod(step - (steps - (self.count - 1) * self.every), self.every)
        # Before the first of them, the average is the weights themselves.
        return 1.0 if number < 0 else 0.0 if rest else 1 / (number + 1)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Trace steps with torch's profiler, for ui.perfetto.dev, to logging.directory/profile. SIGUSR2 traces the next two
    steps, on the same ranks."""

    steps: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """The first and the last step of the trace; null profiles only after a signal."""
    ranks: Annotated[list[NotNegativeInt], Field(min_length=1)] = field(default_factory=lambda: [0])
    """Ranks that write a trace each."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    steps: Annotated[int, Field(ge=1, le=10**8)]
    """Optimizer steps of the whole run."""
    micro_batch_size: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Sequences per GPU and forward pass."""
    global_batch_size: Annotated[int, Field(ge=1, le=10**6)]
    """Sequences per optimizer step over all GPUs."""
    batch_ramp: BatchRampSettings | None = None
    """Begin with smaller steps; null begins with global_batch_size."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the forward and backward pass."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the weights and of the order of the data."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute: auto is the GPUs, and the CPU on a machine without any. With auto or cuda, every GPU that a
    process sees on its node must get one."""
    allow_slow_attention: bool = False
    """Train with attention in plain torch on GPUs where the kernels do not work, instead of ending with the reason."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, at some cost in speed: a run that is repeated on the
    same GPUs then gives the same losses. On a CPU, runs do so in any case. On GPUs torch refuses it with
    increments, fox, path_fox and cope, whose cumulative sums have no such kernel."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again, so that fewer activations are kept: with full, every layer, a third more
    computation; with selective, all of a layer but attention, whose outputs are kept."""
    eval_interval: Count | None = None
    """Steps between evaluations; null means never."""
    evaluations: list[str] = field(default_factory=lambda: list(EVALUATIONS))
    """What is evaluated: validation_loss on the validation split; sample, text that continues logging.sample_prompt;
    and for every logged step position_norms, TAPE's distance from RoPE by layer, and gradient_norms, those of the
    embeddings, attention, MLPs, the positional encoding and norms."""
    eval_steps: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Global batches per evaluation."""
    max_bad_steps: Count = 5
    """Consecutive steps with a non-finite loss or gradient after which the run stops."""
    spikes: SpikeSettings | None = None
    """Look for steps whose loss or gradient norm is far above that of the last updates; null does not look."""
    average: AverageSettings | None = None
    """Also keep an average of the weights; null keeps none."""
    profile: ProfileSettings = ProfileSettings()
    """Trace steps with torch's profiler."""
    hang_timeout: Positive | None = 1800.0
    """Seconds without progress (a step, an evaluation batch or a save) after which a process writes its stacks and ends
    the attempt; the start-up may take at least an hour. null means never."""

    def batch_size_keys(self) -> dict[str, int]:
        """Return the sizes of steps that settings give, by key."""
        sizes = {"train.global_batch_size": self.global_batch_size}
        return sizes if self.batch_ramp is None else sizes | {"train.batch_ramp.from": self.batch_ramp.from_}

    def batch_size(self, samples: int) -> int:
        """Return how many sequences the step takes that follows the first `samples`."""
        ramp = self.batch_ramp
        if ramp is None or samples >= ramp.over_samples:
            return self.global_batch_size
        grown = ramp.from_ + (self.global_batch_size - ramp.from_) * samples // ramp.over_samples
        return grown - grown % ramp.from_

    def batch_sizes(self, samples: int, steps: int) -> Iterator[int]:
        """Yield how many sequences each of the `steps` steps takes that follow the first `samples`."""
        for _ in range(steps):
            yield (size := self.batch_size(samples))
            samples += size

    @property
    def validates(self) -> bool:
        """Whether the run computes something on the validation split."""
        return self.eval_interval is not None and bool(ON_VALIDATION_DATA & set(self.evaluations))

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return how many sequences the run has seen `steps` steps after the first `samples`."""
        while steps and (size := self.batch_size(samples)) < self.global_batch_size:  # all later ones are that large
            steps, samples = steps - 1, samples + size
        return samples + steps * self.global_batch_size
