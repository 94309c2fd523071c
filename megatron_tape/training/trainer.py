"""Run training: open the checkpoint, build the model, data and engine, and train to the last
step.
"""

import atexit
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint import restoring
from megatron_tape.checkpoint.opening import open_base, open_to_resume
from megatron_tape.checkpoint.rank_errors import on_rank_0
from megatron_tape.checkpoint.saved_settings import (
    changed_order_keys,
    changes,
    only_size_changed,
    with_saved_size,
)
from megatron_tape.checkpoint.saved_tokenizer import with_saved_tokenizer
from megatron_tape.config.schema import RunConfig, config_dict, to_yaml
from megatron_tape.config.stages import stage_at, stages_of
from megatron_tape.data.batches import build_batches, model_inputs
from megatron_tape.data.inputs import fingerprints, missing_validation, recorded_tokenizer
from megatron_tape.data.megatron_datasets import sample_order
from megatron_tape.data.tokenizer import Tokenizer, load_run_tokenizer, tokenizer_record
from megatron_tape.errors import TrainingStopped, UserError
from megatron_tape.io.files import atomic_output
from megatron_tape.model.backend import chosen_backend
from megatron_tape.model.initialization import initialize_weights, weight_initializations
from megatron_tape.parallel.layout import (
    ParallelLayout,
    check_devices,
    initialize_distributed,
    seed_everything,
)
from megatron_tape.parallel.partitions import allocate
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.memory import check_host_memory
from megatron_tape.run import metrics
from megatron_tape.run.attempts import INTERRUPTED, SKIPPED, TRAINING, Attempt, read_skipped_data
from megatron_tape.run.metrics import MetricsWriter
from megatron_tape.run.watch import Watch, longest_wait
from megatron_tape.run.weights_and_biases import WandbRun
from megatron_tape.text import counted
from megatron_tape.training.checkpoint_saver import CheckpointSaver
from megatron_tape.training.engine import Batch, Engine, StepResult, zero_partition
from megatron_tape.training.hooks import HOOKS, Hook, HookResult, merge_results
from megatron_tape.training.model_building import (
    ParameterFilter,
    build_model,
    dtype_of,
    freeze_parameters,
    parameter_filter,
    parameter_table,
)
from megatron_tape.training.profiling import Profiling
from megatron_tape.training.schedule import learning_rate
from megatron_tape.training.spikes import FOUND, Rewind, SpikeHook
from megatron_tape.training.step_clock import SAVE
from megatron_tape.training.step_times import StepTimes, utilization

logger = logging.getLogger(__name__)

GARBAGE_INTERVAL = 100
"""Steps between garbage collections, which all ranks perform in the same step."""

FindBase = Callable[[RunConfig, ParallelLayout, Watch], Path]
"""Returns the path of the checkpoint with a run's initial weights. All ranks call it together."""


class Trainer:
    """Trains the model of a run. All ranks create a trainer and call its methods together.

    Hooks may read `config`, `watch`, `layout`, `batches`, `model`, `engine` and the attributes that
    are documented below.
    """

    tokenizer: Tokenizer | None
    writer: MetricsWriter | None
    """Writes metrics; None except on rank 0."""
    progress: dict[str, Any]
    """JSON that is saved in checkpoints and restored when the run continues. Assign a new dict
    instead of modifying it, since a save in the background may be using it."""
    step = 0
    """The last completed step."""
    samples = 0
    """The number of sequences that the run has trained on or skipped."""
    _trained = 0
    """`samples` after the last step, before data was skipped."""

    def __init__(
        self,
        config: RunConfig,
        watch: Watch,
        trains: ParameterFilter | None = None,
        find_base: FindBase | None = None,
        more_hooks: Callable[[RunConfig], dict[str, Hook]] = lambda config: {},
    ):
        """Initialize the process group, start an attempt at the run, and open its checkpoint or its
        initial weights.

        Args:
            config: the run's settings.
            watch: this process's watchdog.
            trains: selects the parameters to train. Default: those of `extension.trains`.
            find_base: finds the checkpoint with the initial weights, if the run has no checkpoint
                of its own. Default: initialize the weights.
            more_hooks: returns hooks by name to run in addition to those of `train.evaluations`.

        Raises:
            ConfigError: a setting does not match the checkpoint or the tokenizer.
            CheckpointError: a checkpoint or the run's directory cannot be used.
        """
        self.config = config
        self.watch = watch
        self.trains = trains or parameter_filter(config.extension)
        self._more_hooks = more_hooks

        check_devices(config.train.device)
        watch.progress("joining the other ranks")
        parallel = config.parallel
        self.layout = initialize_distributed(
            parallel.tensor_model_parallel_size,
            parallel.uses_sequence_parallel,
            longest_wait(config.train.hang_timeout),
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        chosen_backend(config.model, dtype_of(config), self.layout.device)
        if self.layout.device.type == "cpu":
            check_host_memory(config, self.layout.world_size)
        if watch.attempt is None:
            watch.attach(claim_attempt(config, self.layout), self.layout.rank)

        watch.progress("reading the checkpoint")
        self.base = None
        self.checkpoint = open_to_resume(config, self.layout)
        if self.checkpoint is not None:
            self.step = self.checkpoint.step
            self.samples = self.checkpoint.state["consumed_samples"]
        elif find_base is not None:
            self.base = open_base(find_base(config, self.layout, watch), self.layout)

        self._trained = self.samples
        self.spikes = 0
        directory = Path(config.checkpoint.directory)
        read = partial(read_skipped_data, directory)
        skipped = on_rank_0(self.layout, directory, "cannot start", read)
        if skipped is not None and skipped["samples"] > self.samples:
            self.samples = skipped["samples"]
            self.spikes = skipped["spikes"]
            logger.info(
                "skipping the data up to the spike at step %d, according to %s",
                skipped["step"],
                directory / SKIPPED,
            )

    def _with_tokenizer(self) -> RunConfig:
        """Return the settings with `data.tokenizer` set to the tokenizer in the checkpoint, if it
        contains one.
        """
        start = self.checkpoint or self.base
        return with_saved_tokenizer(self.config, None if start is None else start.path)

    def run(self) -> str | None:
        """Train to the last step.

        Returns:
            None, or the reason why the run must be started again: a spike returned it to its newest
                checkpoint, or a signal asked it to stop, before which it saved a checkpoint if
                possible.

        Raises:
            TrainingStopped: if the loss or gradient remains infinite or NaN, there were too many
                spikes, or saves can never succeed.
            ConfigError: if `data.tokenizer` differs from the checkpoint's tokenizer.
        """
        if self.step >= self.config.train.steps:
            logger.info(
                "%s is at step %d and train.steps is %d: nothing to do; to continue, raise"
                " train.steps above %d",
                self.checkpoint.path,
                self.step,
                self.config.train.steps,
                self.step,
            )
            self._leave_together()
            return None

        if self.step > 0:
            for change in changes(self.checkpoint.state["config"], self.config):
                logger.info("since %s: %s", self.checkpoint.path.name, change)
        # Exclude imported modules from garbage collection: scanning them takes longer than a step
        # of a small model.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries warn about objects that are not collected at exit

        self.tokenizer = load_run_tokenizer(self._with_tokenizer())
        self._build()
        reason = None
        try:
            # ranks would collect in different steps, and the others would wait each time
            gc.disable()
            stopped = self._train()
            if stopped is not None:
                reason = f"{self.watch.stop or 'a signal to another rank'} {stopped}"
        except Rewind as rewind:  # like TrainingStopped, raised on all ranks
            self.saves.finish()
            reason = str(rewind)
        except TrainingStopped:
            self.saves.finish()
            raise
        finally:
            gc.enable()
            if self.writer is not None:
                self.writer.close()
        self.engine.close()

        # Once a rank exits, the launcher stops the others.
        if reason is not None and self.layout.rank == 0:
            self.watch.record_end(INTERRUPTED, reason)
        self._leave_together()
        return reason

    @property
    def enters_stage(self) -> bool:
        """Whether the next step is the first one of a new stage of `data.stages`.

        Skipped data counts as not trained on, so a step after it may enter a stage in its middle.
        """
        if self._trained == 0:
            return False
        last = self.samples + self.config.train.batch_size(self.samples) - 1
        return stage_at(self.stages, last) != stage_at(self.stages, self._trained - 1)

    def _leave_together(self) -> None:
        """Wait for all ranks, since exiting closes connections that others may still use, and end
        the attempt.
        """
        # The watchdog must not mistake the removal of the attempt's directory for a newer attempt.
        self.watch.done = True
        self.layout.any_rank(False)
        if self.layout.rank == 0:
            self.watch.attempt.leave()

    def logs(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged."""
        first_or_last = step in (1, self.config.train.steps)
        return step % self.config.logging.interval == 0 or first_or_last or self.evaluates(step)

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step`."""
        return any(hook.due(self, step) for hook in self.hooks.values())

    def _build(self) -> None:
        """Open the data, and build the model, the engine, the hooks and the metrics writer."""
        config = self.config
        layout = self.layout
        # Before the data is indexed, since files may change meanwhile.
        data_fingerprints = fingerprints(config) if layout.rank == 0 else {}
        self.watch.progress("indexing the data", self.step)
        eod = None if self.tokenizer is None else self.tokenizer.eod
        on_progress = partial(self.watch.progress, "indexing the data")
        self.batches = build_batches(
            self._with_tokenizer(), layout, eod, self.step, self.samples, on_progress
        )
        self.stages = stages_of(config)
        if layout.rank == 0:
            self._report_validation()
            if self.step > 0:
                self._report_order()
        # Fork the loader processes now, since forking takes longer once this process has more
        # memory.
        self.micro_batches = self.batches.training()

        self.watch.progress("building the model")
        seed_everything(config.train.seed)
        self.model = build_model(config, layout, self.watch)
        freeze_parameters(self.model, self.trains)
        names = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        frozen = list(itertools.chain(*layout.gather_pipeline_stages(names)))
        frozen_from = restoring.source_of_frozen(self.checkpoint or self.base, frozen, config)
        # Before ZeRO 3 partitions the parameters, whose shapes are then empty.
        self.parameters = parameter_table(self.model, layout)
        self._fill_weights()
        if frozen or config.extension.from_ is not None:
            logger.info("%s", self.parameters)
        self.engine = Engine(self.model, config, layout)

        self.progress = {"bad_steps": 0}
        if self.checkpoint is not None:
            self.watch.progress("loading the training state")
            restoring.load_training_state(self.checkpoint, self.engine)
            self.progress |= self.checkpoint.state["progress"]
            logger.info(
                "continuing from %s at step %d of %d",
                self.checkpoint.path,
                self.step + 1,
                config.train.steps,
            )
        elif self.base is not None and (card := self.base.state["progress"].get("card")):
            self.progress["card"] = card
        if self.spikes:
            self.progress[FOUND] = self.spikes
        if layout.rank == 0:  # only this rank writes `progress`
            self.progress["data"] = data_fingerprints
            if self.tokenizer is None:
                record = recorded_tokenizer(config)
            else:
                record = tokenizer_record(self.tokenizer)
            if record is not None:
                self.progress["tokenizer"] = record

        self.hooks = self._build_hooks()
        tokenizer_files = {} if self.tokenizer is None else self.tokenizer.files
        self.saves = CheckpointSaver(self.engine, config, self.watch, frozen_from, tokenizer_files)
        self.writer = self._open_writer() if layout.rank == 0 else None

    def _build_hooks(self) -> dict[str, Hook]:
        """Return the run's hooks by name: timing, profiling, spike detection if enabled, and the
        evaluations.
        """
        train = self.config.train
        hooks: dict[str, Hook] = {"step_times": StepTimes(), "profile": Profiling(train.profile)}
        if train.spikes is not None:
            hooks["spikes"] = SpikeHook(train.spikes)
        hooks |= {name: HOOKS[name]() for name in train.evaluations}
        return hooks | self._more_hooks(self.config)

    def _report_validation(self) -> None:
        """Log at which steps the run computes the validation loss, or why it does not."""
        train = self.config.train
        if missing := missing_validation(self.config):
            logger.info("the run computes no validation loss: %s", missing)
            return
        when = "after the last step"
        advice = "; set train.eval_interval to compute it more often"
        if train.eval_interval is not None:
            when = f"every {counted(train.eval_interval, 'step')} and {when}"
            advice = ""
        sequences = train.eval_steps * train.global_batch_size
        logger.info(
            "the validation loss is computed %s, on %s sequences%s", when, f"{sequences:,}", advice
        )

    def _report_order(self) -> None:
        """Log whether the training data has another order than before the checkpoint."""
        saved = self.checkpoint.state["config"]
        seen = self.checkpoint.state["consumed_samples"]
        keys = changed_order_keys(saved, self.config)
        if self.config.data.prefix is not None and only_size_changed(keys):
            before = with_saved_size(saved, self.config)
            size_before = before.train.samples_after(before.train.steps - self.step, seen)
            order_before = None
            with suppress(UserError, OSError):  # a stage's dataset may have been moved or removed
                order_before = sample_order(before, size_before, seen)
            if order_before == sample_order(self.config, self.batches.samples.stop, seen):
                return
            # Without a changed setting, the data skipped after a spike makes the run read more of
            # it.
            keys = keys or ["train.spikes"]
        if keys:
            logger.info(
                "since %s: %s: the data is shuffled again, so the run repeats some sequences and"
                " skips others",
                self.checkpoint.path.name,
                ", ".join(keys),
            )

    def _fill_weights(self) -> None:
        """Allocate the parameters, load the weights, and initialize parameters that are not in the
        loaded weights.
        """
        config = self.config
        layout = self.layout
        allocate(self.model, layout.device, zero_partition(config, layout))
        if self.checkpoint is not None:
            restoring.load_weights(self.checkpoint, self.model, layout)
            return

        new = None
        if self.base is not None:
            self.watch.progress("loading the initial weights")
            new = restoring.load_base_weights(self.base, self.model, layout)
            logger.info("starting with the weights of %s", self.base.path)
            if not new:
                return
            logger.info("initializing %s, such as %s", counted(len(new), "new parameter"), new[0])

        self.watch.progress("initializing the weights")
        started = time.perf_counter()
        initials = weight_initializations(config.model, config.extension)
        rank = layout.tensor_parallel_rank
        size = layout.tensor_parallel_size
        initialize_weights(self.model, initials, config.train.seed, rank, size, new)
        seconds = time.perf_counter() - started
        if seconds > 1:
            logger.info("initialized the weights in %.0f s", seconds)

    def _open_writer(self) -> MetricsWriter:
        """Open the metrics writer, log the configuration, and write `config.yaml`."""
        config = self.config
        attempt = self.watch.attempt
        attempt.check_owner()
        directory = config.logging.directory
        begun = self.step
        seen = self.samples
        to_wandb = None
        if config.logging.wandb is not None:
            self.watch.progress("joining Weights & Biases")
            to_wandb = WandbRun(config.logging.wandb, directory, config_dict(config))

        writer = MetricsWriter(
            directory,
            config.train.steps,
            begun,
            config.logging.tensorboard,
            staging=attempt.staging,
            work=lambda steps: config.train.samples_after(steps - begun, seen),
            wandb=to_wandb,
        )
        writer.text("configuration", to_yaml(config), begun)
        writer.text("parameters", self.parameters, begun)
        writer.text("layout", config.parallel.describe(self.layout.world_size), begun)
        # data.allow_changed must not apply to later attempts.
        later = replace(config, data=replace(config.data, allow_changed=False))
        with atomic_output(Path(directory) / "config.yaml", "w", overwrite=True) as file:
            file.write(to_yaml(later))
        return writer

    def _train(self) -> str | None:
        """Train to the last step. Return None or, if a signal stopped the run, a predicate with the
        step.
        """
        config = self.config
        layout = self.layout
        watch = self.watch
        if layout.any_rank(watch.stop is not None):
            return f"came before step {self.step + 1}"
        watch.begin_training(self.step)
        seconds = 0.0
        timed_samples = 0
        for step in range(self.step + 1, config.train.steps + 1):
            if (step - 1) % GARBAGE_INTERVAL == 0:
                gc.collect()
            for hook in self.hooks.values():
                hook.before_step(self, step)

            rate = learning_rate(step, config.optimizer, config.schedule, config.train.steps)
            started = time.perf_counter()
            size = config.train.batch_size(self.samples)
            self.engine.set_batch_size(size)
            result = self.engine.train_step(self._shown_to_hooks(step), rate, step)
            seconds += time.perf_counter() - started
            timed_samples += size
            self.step = step
            # Skipped steps count, too: their data is not used again.
            self.samples += size
            self._trained = self.samples
            watch.progress(TRAINING, step)
            self._count_bad_steps(result)

            hook_results = [
                (name, hook.after_step(self, step, result)) for name, hook in self.hooks.items()
            ]
            if self.logs(step):
                speed = timed_samples * config.model.seq_length / seconds
                self._log(result, rate, speed, hook_results)
                seconds = 0.0
                timed_samples = 0

            with self.engine.clock.phase(SAVE):
                self.saves.poll()
            stopping = layout.any_rank(watch.stop is not None)
            last = step == config.train.steps
            saved = False
            if step % config.checkpoint.interval == 0 or last or stopping:
                if self.writer is not None:
                    self.writer.sync()
                with self.engine.clock.phase(SAVE):
                    wait = last or stopping
                    saved = self.saves.save(step, self.samples, self.progress, wait)
                # A signal may have come during the save.
                stopping = layout.any_rank(watch.stop is not None)
                if stopping and not saved:
                    saved = self.saves.finish()

            if stopping and not saved:
                return f"stopped the run after step {step}, which is not saved"
            if stopping and not last:
                return f"stopped the run after step {step}"
            watch.progress(TRAINING)
        return None

    def _shown_to_hooks(self, step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches, each after all hooks have seen it."""
        for batch in self.micro_batches:
            for hook in self.hooks.values():
                hook.on_micro_batch(self, step, batch)
            yield model_inputs(batch)

    def _count_bad_steps(self, result: StepResult) -> None:
        """Count consecutive steps that are not finite. Raises TrainingStopped at
        `train.max_bad_steps`.
        """
        if result.finite or not result.skipped:
            self.progress = {**self.progress, "bad_steps": 0}
            return

        bad_steps = self.progress["bad_steps"] + 1
        self.progress = {**self.progress, "bad_steps": bad_steps}
        logger.warning(
            "step %d is skipped: loss %s, gradient norm %s (%d such steps in a row)",
            self.step,
            result.loss,
            result.grad_norm,
            bad_steps,
        )
        if bad_steps >= self.config.train.max_bad_steps:
            raise TrainingStopped(
                f"{counted(bad_steps, 'step')} in a row, up to step {self.step}, had a loss or"
                " gradient that was not finite, as many as train.max_bad_steps allows; lower"
                " optimizer.lr, raise schedule.warmup_steps, or check the data"
            )

    def _log(
        self,
        result: StepResult,
        rate: float,
        speed: float,
        hook_results: list[tuple[str, HookResult]],
    ) -> None:
        """Run due evaluations; log their results and the step's metrics. `speed` is in tokens per
        second.
        """
        flops = speed * flops_per_token(self.config.model, self.config.extension)
        scalars = {
            metrics.LOSS: result.loss,
            metrics.GRAD_NORM: result.grad_norm,
            metrics.LEARNING_RATE: rate,
            metrics.TOKENS: self.samples * self.config.model.seq_length,
            metrics.TOKENS_PER_SECOND: speed,
            metrics.TFLOPS_PER_SECOND: flops / 1e12,
            **utilization(flops, self.config, self.layout),
        }
        if self.config.data.stages is not None:
            scalars[metrics.DATA_STAGE] = stage_at(self.stages, self.samples - 1)
        if result.z_loss is not None:
            scalars[metrics.Z_LOSS] = result.z_loss
        results = [("training", HookResult(scalars)), *hook_results]
        for name, hook in self.hooks.items():
            if hook.due(self, self.step):
                results.append((name, hook.evaluate(self, self.step)))
        merged = merge_results(results)
        if self.writer is None:
            return
        self.writer.log(self.step, merged.scalars, merged.words)
        for tag, text in merged.texts.items():
            self.writer.text(tag, text, self.step)


def claim_attempt(config: RunConfig, layout: ParallelLayout) -> Attempt:
    """Start an attempt at the run and return it, for runs that a launcher does not start. All ranks
    call this together.

    Raises CheckpointError if `logging.directory` or `checkpoint.directory` cannot be used.
    """
    directories = config.logging.directory, config.checkpoint.directory
    size = layout.world_size
    facts = {
        "job": None,
        "nodes": [os.uname().nodename],
        "processes": size,
        "pid": os.getpid(),
        "layout": config.parallel.describe(size),
    }

    def claim() -> int:
        return Attempt.claim(*directories, facts).number

    number = on_rank_0(layout, Path(config.logging.directory), "cannot start", claim)
    return Attempt.open(*directories, number)
