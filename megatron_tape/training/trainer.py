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
from megatron_tape.errors import Diverged, TrainingStopped, UserError
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
from megatron_tape.training.spikes import SPIKE_COUNT, Rewind, SpikeHook
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
    """The tokenizer of the data; None if the run has none."""
    writer: MetricsWriter | None
    """Writes metrics; None except on rank 0."""
    progress: dict[str, Any]
    """JSON that is saved in checkpoints and restored when the run continues. Assign a new dict
    instead of modifying it, since a save in the background may be using it."""
    step = 0
    """The last completed step."""
    samples = 0
    """The number of sequences that the run has trained on or skipped."""
    _trained_samples = 0
    """The value of `samples` after the last completed step. `samples` is larger if `_skip_data` has
    skipped data after that step."""

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
            timeout=longest_wait(config.train.hang_timeout),
            context_parallel_size=parallel.context_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        )
        # Refuse an attention backend that cannot run here before an attempt starts.
        chosen_backend(config.model, dtype_of(config), self.layout.device)
        if self.layout.device.type == "cpu":
            check_host_memory(config, self.layout.world_size)
        if watch.attempt is None:
            watch.attach(claim_attempt(config, self.layout), self.layout.rank)

        watch.progress("reading the checkpoint")
        # The `Checkpoint` with the initial weights, or None. It is not read if the run has a
        # checkpoint to continue, which is `self.checkpoint`.
        self.base = None
        self.checkpoint = open_to_resume(config, self.layout)
        if self.checkpoint is not None:
            self.step = self.checkpoint.step
            self.samples = self.checkpoint.state["consumed_samples"]
        elif find_base is not None:
            self.base = open_base(find_base(config, self.layout, watch), self.layout)
        self._trained_samples = self.samples
        self._skip_data()

    def _skip_data(self) -> None:
        """Skip the data up to the spike at which an earlier attempt returned to the checkpoint.

        Sets `spikes` to the number of spikes up to that one, or 0 if no data is skipped.
        """
        self.spikes = 0
        directory = Path(self.config.checkpoint.directory)
        skipped = on_rank_0(
            self.layout, directory, "cannot start", partial(read_skipped_data, directory)
        )
        # Nothing removes the record, so it can be outdated: the run may have saved a checkpoint
        # after the skipped data, and continue from that checkpoint now.
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
                checkpoint, or a signal stopped it. After a signal, it saves a checkpoint if
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
            # With automatic garbage collection, ranks would collect in different steps, and the
            # other ranks would wait for each of them.
            gc.disable()
            stopped = self._train()
            if stopped is not None:
                # For example, "SIGTERM stopped the run after step 7".
                reason = f"{self.watch.stop or 'a signal to another rank'} {stopped}"
        # These two errors are raised on all ranks, so the ranks can complete a pending save
        # together. The run can later continue from the checkpoint.
        except Rewind as rewind:
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

        # Record the end before any rank exits, because the launcher then stops the other ranks.
        if reason is not None and self.layout.rank == 0:
            self.watch.record_end(INTERRUPTED, reason)
        self._leave_together()
        return reason

    @property
    def enters_stage(self) -> bool:
        """Whether the next step is the first one of a new stage of `data.stages`.

        The run may enter a stage in its middle, if it skips the stage's first data.
        """
        # Before its first step, the run is in no stage, so it has no stage to leave.
        if self._trained_samples == 0:
            return False
        # A step belongs to the stage of its last sequence.
        last = self.samples + self.config.train.batch_size(self.samples) - 1
        return stage_at(self.stages, last) != stage_at(self.stages, self._trained_samples - 1)

    def _leave_together(self) -> None:
        """Wait for all ranks, and end the attempt.

        A rank that exits closes connections that others may still use.
        """
        # The watchdog must not mistake the removal of the attempt's directory for a newer attempt.
        self.watch.done = True
        self.layout.any_rank(False)  # a barrier
        if self.layout.rank == 0:
            self.watch.attempt.leave()

    def logs(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged."""
        # Evaluations log their results together with the step's metrics.
        first_or_last = step in (1, self.config.train.steps)
        return step % self.config.logging.interval == 0 or first_or_last or self.evaluates(step)

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step`."""
        return any(hook.due(self, step) for hook in self.hooks.values())

    def _build(self) -> None:
        """Open the data, and build the model, the engine, the hooks and the metrics writer."""
        config = self.config
        layout = self.layout
        # Read the fingerprints before the data is indexed, since files may change meanwhile.
        data_fingerprints = fingerprints(config) if layout.rank == 0 else {}
        self._open_data()

        self.watch.progress("building the model")
        seed_everything(config.train.seed)
        self.model = build_model(config, layout, self.watch)
        freeze_parameters(self.model, self.trains)
        names = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        frozen = list(itertools.chain(*layout.gather_pipeline_stages(names)))
        frozen_from = restoring.source_of_frozen(self.checkpoint or self.base, frozen, config)
        # A text for the logs, made before `_fill_weights`: there, ZeRO 3 partitions the parameters,
        # whose shapes are then empty.
        self.parameters = parameter_table(self.model, layout)
        self._fill_weights()
        if frozen or config.extension.from_ is not None:
            logger.info("%s", self.parameters)
        self.engine = Engine(self.model, config, layout)
        self._load_training_state(data_fingerprints)

        self.hooks = self._build_hooks()
        tokenizer_files = {} if self.tokenizer is None else self.tokenizer.files
        self.saves = CheckpointSaver(self.engine, config, self.watch, frozen_from, tokenizer_files)
        self.writer = self._open_writer() if layout.rank == 0 else None

    def _open_data(self) -> None:
        """Index the data, and start to load it after the sequences that the run has used."""
        self.watch.progress("indexing the data", self.step)
        eod = None if self.tokenizer is None else self.tokenizer.eod
        self.batches = build_batches(
            self._with_tokenizer(),
            self.layout,
            eod,
            self.step,
            self.samples,
            partial(self.watch.progress, "indexing the data"),
        )
        self.stages = stages_of(self.config)
        if self.layout.rank == 0:
            self._report_validation()
            if self.step > 0:
                self._report_order()
        # Fork the loader processes now, since forking takes longer once this process has more
        # memory.
        self.micro_batches = self.batches.training()

    def _load_training_state(self, data_fingerprints: dict[str, str]) -> None:
        """Restore the engine and `progress` from the checkpoint; without one, set `progress`."""
        self.progress = {"bad_steps": 0}
        if self.checkpoint is not None:
            self.watch.progress("loading the training state")
            restoring.load_training_state(self.checkpoint, self.engine)
            self.progress |= self.checkpoint.state["progress"]
            logger.info(
                "continuing from %s at step %d of %d",
                self.checkpoint.path,
                self.step + 1,
                self.config.train.steps,
            )
        # Exports of this run copy entries from the model card of the imported model.
        elif self.base is not None and (card := self.base.state["progress"].get("card")):
            self.progress["card"] = card

        # The checkpoint was saved before the spike at which it was restored, so its `progress` does
        # not count that spike.
        if self.spikes:
            self.progress[SPIKE_COUNT] = self.spikes
        if self.layout.rank == 0:  # only this rank writes `progress`
            self.progress["data"] = data_fingerprints
            # Without a tokenizer, take the record of the indexed datasets, if any.
            if self.tokenizer is None:
                record = recorded_tokenizer(self.config)
            else:
                record = tokenizer_record(self.tokenizer)
            if record is not None:
                self.progress["tokenizer"] = record

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
        if reason := missing_validation(self.config):
            logger.info("the run computes no validation loss: %s", reason)
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
        consumed = self.checkpoint.state["consumed_samples"]
        keys = changed_order_keys(saved, self.config)
        # The number of samples changes the order only if it changes the number of epochs.
        if self.config.data.prefix is not None and only_size_changed(keys):
            before = with_saved_size(saved, self.config)
            # The number of samples of the whole run with the saved settings.
            samples_before = before.train.samples_after(before.train.steps - self.step, consumed)
            order_before = None  # equals no order
            with suppress(UserError, OSError):  # a stage's dataset may have been moved or removed
                order_before = sample_order(before, samples_before, consumed)
            if order_before == sample_order(self.config, self.batches.samples.stop, consumed):
                return
            # If the order differs although no setting has changed, the run has skipped data after a
            # spike, and needs more samples in all.
            keys = keys or ["train.spikes"]
        if keys:
            logger.info(
                "since %s: %s: the data is shuffled again, so the run repeats some sequences and"
                " skips others",
                self.checkpoint.path.name,
                ", ".join(keys),
            )

    def _fill_weights(self) -> None:
        """Allocate the parameters, and load or initialize them.

        The weights come from the run's checkpoint or from the model that the run extends.
        Parameters that the extended model lacks are initialized. If the run has neither a
        checkpoint nor a model to extend, all parameters are initialized.
        """
        config = self.config
        layout = self.layout
        allocate(self.model, layout.device, zero_partition(config, layout))
        if self.checkpoint is not None:
            restoring.load_weights(self.checkpoint, self.model, layout)
            return

        new = None  # initialize all parameters
        if self.base is not None:
            self.watch.progress("loading the initial weights")
            new = restoring.load_base_weights(self.base, self.model, layout)
            logger.info("starting with the weights of %s", self.base.path)
            if not new:
                return
            logger.info("initializing %s, such as %s", counted(len(new), "new parameter"), new[0])

        self.watch.progress("initializing the weights")
        started = time.perf_counter()
        initialize_weights(
            self.model,
            weight_initializations(config.model, config.extension),
            config.train.seed,
            layout.tensor_parallel_rank,
            layout.tensor_parallel_size,
            new,
        )
        seconds = time.perf_counter() - started
        if seconds > 1:
            logger.info("initialized the weights in %.0f s", seconds)

    def _open_writer(self) -> MetricsWriter:
        """Open the metrics writer, log the configuration, and write `config.yaml`."""
        config = self.config
        attempt = self.watch.attempt
        # A newer attempt may have started since this one. Its files must not be replaced.
        attempt.check_owner()
        directory = config.logging.directory
        # The writer calls `work` during training, when `self.step` and `self.samples` have changed.
        # `work` returns the run's number of sequences after `steps` steps.
        start = self.step
        samples_at_start = self.samples
        to_wandb = None
        if config.logging.wandb is not None:
            self.watch.progress("joining Weights & Biases")
            to_wandb = WandbRun(config.logging.wandb, directory, config_dict(config))

        writer = MetricsWriter(
            directory,
            config.train.steps,
            start,
            config.logging.tensorboard,
            staging=attempt.staging,
            work=lambda steps: config.train.samples_after(steps - start, samples_at_start),
            wandb=to_wandb,
        )

        writer.text("configuration", to_yaml(config), start)
        writer.text("parameters", self.parameters, start)
        writer.text("layout", config.parallel.describe(self.layout.world_size), start)
        # A user allows changed data for this attempt only, but later attempts read config.yaml.
        next_config = replace(config, data=replace(config.data, allow_changed=False))
        with atomic_output(Path(directory) / "config.yaml", "w", overwrite=True) as file:
            file.write(to_yaml(next_config))
        return writer

    def _train(self) -> str | None:
        """Train to the last step. Return None or, if a signal stopped the run, what it did.

        The result continues a sentence about the signal: `stopped the run after step 7`.
        """
        config = self.config
        watch = self.watch
        if self._must_stop():
            return f"came before step {self.step + 1}"

        watch.begin_training(self.step)
        # Time and samples since the last logged step.
        seconds = 0.0
        timed_samples = 0
        for step in range(self.step + 1, config.train.steps + 1):
            # All ranks collect garbage in the same step, so that none waits for another.
            if (step - 1) % GARBAGE_INTERVAL == 0:
                gc.collect()
            for hook in self.hooks.values():
                hook.before_step(self, step)

            lr = learning_rate(step, config.optimizer, config.schedule, config.train.steps)
            started = time.perf_counter()
            batch_size = config.train.batch_size(self.samples)
            self.engine.set_batch_size(batch_size)
            result = self.engine.train_step(self._shown_to_hooks(step), lr, step)
            seconds += time.perf_counter() - started
            timed_samples += batch_size
            self.step = step
            # The data of a step whose update was skipped counts, too: it is not used again.
            self.samples += batch_size
            self._trained_samples = self.samples
            watch.progress(TRAINING, step)
            self._count_bad_steps(result)

            hook_results = [
                (name, hook.after_step(self, step, result)) for name, hook in self.hooks.items()
            ]
            if self.logs(step):
                tokens_per_second = timed_samples * config.model.seq_length / seconds
                self._log(result, lr, tokens_per_second, hook_results)
                seconds = 0.0
                timed_samples = 0

            stopped = self._save_if_due(step)
            if stopped is not None:
                return stopped
            watch.progress(TRAINING)
        return None

    def _must_stop(self) -> bool:
        """Return whether a signal asked any rank to stop. All ranks call this together."""
        return self.layout.any_rank(self.watch.stop is not None)

    def _save_if_due(self, step: int) -> str | None:
        """Save a checkpoint after `step` if it is due, or if a signal asked the run to stop.

        Return a phrase such as `stopped the run after step 7` if the run stops here, and None if it
        continues.
        """
        with self.engine.clock.phase(SAVE):
            self.saves.poll()
        stopping = self._must_stop()
        is_last = step == self.config.train.steps
        saved = False
        if step % self.config.checkpoint.interval == 0 or is_last or stopping:
            # The metrics on disk must not lag behind the checkpoint.
            if self.writer is not None:
                self.writer.sync()
            with self.engine.clock.phase(SAVE):
                wait = is_last or stopping
                saved = self.saves.save(step, self.samples, self.progress, wait)
            # A signal may have arrived during the save, which may not have waited for its files.
            stopping = self._must_stop()
            if stopping and not saved:
                saved = self.saves.finish()

        if stopping and not saved:
            return f"stopped the run after step {step}, which is not saved"
        if stopping and not is_last:
            return f"stopped the run after step {step}"
        return None

    def _shown_to_hooks(self, step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches, each after all hooks have seen it."""
        for batch in self.micro_batches:
            for hook in self.hooks.values():
                hook.on_micro_batch(self, step, batch)
            yield model_inputs(batch)

    def _count_bad_steps(self, result: StepResult) -> None:
        """Count consecutive steps whose loss or gradient is not finite.

        Raises Diverged at `train.max_bad_steps`.
        """
        bad_steps = 0
        if result.skipped and not result.finite:
            bad_steps = self.progress["bad_steps"] + 1
        # A new dict, since a save in the background may be writing the old one.
        self.progress = {**self.progress, "bad_steps": bad_steps}
        if bad_steps == 0:
            return

        logger.warning(
            "step %d is skipped: loss %s, gradient norm %s (%d such steps in a row)",
            self.step,
            result.loss,
            result.grad_norm,
            bad_steps,
        )
        if bad_steps >= self.config.train.max_bad_steps:
            raise Diverged(
                f"{counted(bad_steps, 'step')} in a row, up to step {self.step}, had a loss or"
                " gradient that was not finite, as many as train.max_bad_steps allows; lower"
                " optimizer.lr, raise schedule.warmup_steps, or check the data"
            )

    def _log(
        self,
        result: StepResult,
        lr: float,
        tokens_per_second: float,
        hook_results: list[tuple[str, HookResult]],
    ) -> None:
        """Run due evaluations, and log their results and the step's metrics.

        `lr` is the step's learning rate. `hook_results` are the results of `Hook.after_step`, each
        with the hook's name. All ranks call this together, but only rank 0 logs.
        """
        token_flops = flops_per_token(self.config.model, self.config.extension)
        flops_per_second = tokens_per_second * token_flops
        scalars = {
            metrics.LOSS: result.loss,
            metrics.GRAD_NORM: result.grad_norm,
            metrics.LEARNING_RATE: lr,
            metrics.TOKENS: self.samples * self.config.model.seq_length,
            metrics.TOKENS_PER_SECOND: tokens_per_second,
            metrics.TFLOPS_PER_SECOND: flops_per_second / 1e12,
            **utilization(flops_per_second, self.config, self.layout),
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
    """Start an attempt at the run, and return it. All ranks call this together.

    Only for processes that no job script has started, because a job script starts the attempt.
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

    number = on_rank_0(
        layout,
        Path(config.logging.directory),
        "cannot start",
        lambda: Attempt.claim(*directories, facts).number,
    )
    return Attempt.open(*directories, number)
