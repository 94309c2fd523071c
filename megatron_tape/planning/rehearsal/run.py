"""A rehearsal: the Trainer's own run of five steps on fake tensors. The fourth step is measured."""

import dataclasses
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import Dataset

from megatron_tape.checkpoint.index import writers
from megatron_tape.config.evaluation import EvaluationConfig
from megatron_tape.config.schema import RunConfig, replaced
from megatron_tape.config.train import AverageSettings
from megatron_tape.data.batches import Batches
from megatron_tape.model import backend, initialization
from megatron_tape.model.language_model import LanguageModel
from megatron_tape.model.pipeline import Pipeline
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.planning.communication import CONTEXT, DATA, PIPELINE, SEQUENCE, TENSOR
from megatron_tape.planning.rehearsal.tracking import Record, Tracker, place_of
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.watch import Watch
from megatron_tape.training import trainer as training
from megatron_tape.training.engine import Engine
from megatron_tape.training.gradients import replicated_parameters
from megatron_tape.training.hooks import HOOKS

logger = logging.getLogger(__name__)

STEPS, MEASURED = 5, 4
"""The first steps create what later ones find, such as Adam's moments; DeepSpeed begins some of its timers only after
the second. The last is logged, evaluated and saved."""
MICRO_BATCHES = 2
"""The most micro-batches in a step, for each pipeline stage; any further ones would only repeat these. The first stage
keeps most, gradients of all its layers included, from twice as many as there are stages on."""


@dataclass
class Rehearsal:
    """What the rank did. Sizes are in bytes."""

    config: RunConfig
    """The settings of the short run, with the attention backend that was chosen."""
    rank: int = 0
    record: Record = field(default_factory=Record)
    """The fourth step's."""
    save: Record = field(default_factory=Record)
    """What it took to gather the state for a checkpoint."""
    start: int = 0
    """The most memory while the weights were made, before DeepSpeed copied them."""
    peak: int = 0
    """The most memory at any time, including setup and the last step's evaluation and save."""
    weights: int = 0
    """The model's weights, before the fourth step."""
    optimizer: int = 0
    """Adam's moments and the weights that it updates."""
    replicated_share: int = 0
    """How many elements of parameters that every tensor-parallel rank holds whole this rank's optimizer updates."""
    activations: int = 0
    """What the last forward pass of the fourth step keeps for its backward pass."""
    faults: dict[str, int] = field(default_factory=dict)
    """What would fail or stall on a GPU, and how often it occurred."""


def rehearse(config: RunConfig) -> Rehearsal:
    """Run five short steps of `config` as the rank that `install_fake_world`, called before, has made of this process.

    `validate` has accepted `config`. No data and no checkpoint is read, and only a temporary directory is written.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as home:
        return _ObservedRun(_shortened(config, home)).run()


def _shortened(config: RunConfig, home: str) -> RunConfig:
    """Return `config` with five steps of few micro-batches; it reads nothing and writes only into `home`."""
    data_size = dist.get_world_size() // config.parallel.ranks_per_sequence
    train, schedule = config.train, config.schedule
    micro_batches = MICRO_BATCHES * config.parallel.pipeline_model_parallel_size
    changed = {
        "train.global_batch_size": min(train.global_batch_size, micro_batches * train.micro_batch_size * data_size),
        "train.batch_ramp": None,
        "train.average": None if train.average is None else AverageSettings(kind="ema"),  # of the same size as any
        "train.steps": STEPS,
        "train.eval_steps": 1,
        "train.hang_timeout": None,
        "train.eval_interval": None if train.eval_interval is None else STEPS,
        "schedule.warmup_steps": 1,
        "schedule.decay_steps": None if schedule.decay_steps is None else 1,
        "data.tokenizer": None,
        "data.num_workers": 0,
        "data.stages": None,
        "checkpoint.directory": f"{home}/checkpoints",
        "checkpoint.resume": "none",
        "checkpoint.frozen": True,
        "checkpoint.interval": STEPS,
        "logging.directory": home,
        "logging.interval": STEPS,
        "logging.tensorboard": False,
        "logging.wandb": None,
    }
    return replaced(dataclasses.replace(config, evaluation=EvaluationConfig()), changed)


class _RandomTokens(Dataset):
    """As many samples as anyone asks for."""

    def __init__(self, config: RunConfig):
        self._shape, self._vocabulary = (config.model.seq_length,), config.model.vocab_size

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: torch.randint(self._vocabulary, self._shape) for key in ("tokens", "labels")}


class _GatheredState:
    """Gathers what the Trainer would save, and writes none of it."""

    def __init__(self, engine: Engine, begin: Callable[[], Record], outcome: Rehearsal):
        self._engine, self._begin, self._outcome = engine, begin, outcome

    def save(self, *_: object, **__: object) -> bool:
        self._begin()
        sizes, layout = self._engine.state_sizes(), self._engine.layout
        shares = layout.tensor_parallel_size * layout.pipeline_size
        chosen = writers(sizes, shares, layout.replica_size, None)
        self._engine.training_state(chosen.__getitem__)
        self._outcome.save = self._begin()
        return True

    def look(self) -> None:
        pass

    def finish(self) -> bool:
        return False


class _ObservedRun:
    def __init__(self, config: RunConfig):
        self.tracker = Tracker()
        self.outcome = Rehearsal(config, dist.get_rank())
        self._steps = 0
        self._receives = False

    def run(self) -> Rehearsal:
        """Train, evaluate and save; an error that ends the run becomes a fault."""
        config, directory = self.outcome.config, self.outcome.config.logging.directory
        watch = Watch(None)
        watch.attach(Attempt.claim(directory, config.checkpoint.directory, {"processes": dist.get_world_size()}), 0)
        try:
            # Comparing kernels with plain torch and writing weights to a file need numbers.
            with (
                mock.patch.multiple(
                    backend,
                    backend_fails=lambda *_: None,
                    update_fails=lambda *_: None,
                    swiglu_disagrees=lambda *_: None,
                    loss_disagrees=lambda *_: "Liger's kernels are not rehearsed",
                ),
                mock.patch.object(initialization, "chunks_of", _first_chunk(initialization.chunks_of)),
                mock.patch.multiple(
                    training,
                    build_batches=_random_batches,
                    hooks_of=lambda config: {name: HOOKS[name]() for name in config.train.evaluations},
                    Engine=self._engine,
                    CheckpointSaver=lambda engine, *_: _GatheredState(engine, self._end_record, self.outcome),
                ),
                torch.autograd.set_multithreading_enabled(False),
                FakeTensorMode(allow_non_fake_inputs=True),
                self.tracker,
            ):
                trainer = training.Trainer(config, watch)
                self._name_groups(trainer.layout)
                trainer.run()
        except Exception as error:
            logger.debug("the rehearsal ended", exc_info=True)
            first_line = str(error).partition("\n")[0]
            self.tracker.faults[f"{type(error).__name__}: {first_line} at {place_of(error)}"] += 1
        finally:
            watch.close()
        self._end_record()
        self.outcome.faults = dict(self.tracker.faults)
        return self.outcome

    def _name_groups(self, layout: ParallelLayout) -> None:
        groups = layout.groups
        for group, name in (
            (dist.group.WORLD, "all ranks"),
            (groups.mp, "tensor and pipeline parallel"),
            (groups.tp_cp, SEQUENCE),
            (groups.cp, CONTEXT),
            (groups.embd, PIPELINE),
            (groups.pp, PIPELINE),
            (groups.tp, TENSOR),
            (groups.dp, DATA),
            (groups.dp_cp, DATA),
        ):
            if group is not None:  # as the embedding's is between the first and the last stage
                self.tracker.name_group(group, name)

    def _engine(self, model: LanguageModel | Pipeline, config: RunConfig, layout: ParallelLayout) -> Engine:
        self.outcome.config = replaced(self.outcome.config, {"model.attention_backend": model.attention_backend})
        self.outcome.start = self.tracker.record.peak
        engine = Engine(model, config, layout)
        train_step = engine.train_step

        def observed_step(*arguments):
            self._steps += 1
            self.tracker.phase = "update"
            if self._steps != MEASURED:
                return train_step(*arguments)
            self._end_record()
            self._measure_state(engine)
            self.tracker.steady = True
            result = train_step(*arguments)
            self.tracker.steady = False
            self.outcome.record = self._end_record()
            return result

        engine.train_step = observed_step
        for stretch in model.stretches if isinstance(model, Pipeline) else [model]:
            stretch.register_forward_pre_hook(lambda *_: setattr(self.tracker, "phase", "forward"))
            stretch.register_forward_hook(lambda *_: self._end_forward(model))
        if isinstance(model, Pipeline):
            model.train_micro_batches = self._in_forward_phase(model.train_micro_batches)
        return engine

    def _in_forward_phase(self, train: Callable) -> Callable:
        """Return `train`, in whose forward phase stages also receive what they keep."""

        def observed(*arguments):
            self.tracker.phase, self._receives = "forward", True
            total = train(*arguments)
            self.tracker.phase, self._receives = "update", False
            return total

        return observed

    def _end_forward(self, model: LanguageModel | Pipeline) -> None:
        if not self._receives:
            self.tracker.phase = "update"
        if self._steps == MEASURED:
            # Not activations: weights that ZeRO 3 has gathered, the output layer's gradient of the micro-batch before,
            # and Megatron's permanent buffer for gathered inputs.
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            others = [*model.parameters(), *gradients, *get_global_memory_buffer().buffer.values()]
            self.outcome.activations = self.tracker.live["forward"] - self.tracker.bytes_of(others, "forward")

    def _measure_state(self, engine: Engine) -> None:
        weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        tied = engine.module.tied if isinstance(engine.module, Pipeline) else None
        if tied is not None and tied.weight is not None:  # only in the first and the last stage
            weights.append(tied.weight)
        adam = [x for p, state in engine.adam.state.items() for x in (p, *state.values()) if isinstance(x, Tensor)]
        self.outcome.weights = self.tracker.bytes_of(weights)
        self.outcome.optimizer = self.tracker.bytes_of(weights + adam) - self.outcome.weights
        self.outcome.replicated_share = sum(map(_share_of, replicated_parameters(engine.module)))

    def _end_record(self) -> Record:
        record = self.tracker.begin_record()
        self.outcome.peak = max(self.outcome.peak, record.peak)
        return record


def _first_chunk(chunks: Callable) -> Callable:
    """Return `chunks` without those after the first of its size, whose memory they would take again."""
    seen = set()

    def first(rows: list[range], width: int, start: int, count: int, size: int) -> Iterator[tuple[range, int]]:
        known = (width, count) in seen
        seen.add((width, count))
        return itertools.islice(chunks(rows, width, start, count, size), 0 if known else 1)

    return first


def _random_batches(config: RunConfig, layout: ParallelLayout, *_: object) -> Batches:
    samples = range(config.train.steps * config.train.global_batch_size)
    return Batches(_RandomTokens(config), _RandomTokens(config), config, layout, 0, samples, config.train.steps)


def _share_of(parameter: torch.nn.Parameter) -> int:
    """Return how many of the parameter's elements this rank's optimizer updates."""
    if hasattr(parameter, "ds_id"):  # under ZeRO 3
        return parameter.partition_numel()
    return 0 if parameter._hp_mapping is None else parameter._hp_mapping.lp_fragment_address.numel
