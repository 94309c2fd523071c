"""Train one model: `python -m pretrain.train --config X.yaml`, or under `torchrun --nproc-per-node N -m`."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

from megatron_tape.config.checks import validate
from megatron_tape.config.parse import parse_run_config
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.data.inputs import check_datasets, check_inputs, load_run_tokenizer
from megatron_tape.errors import ConfigError, StaleAttempt, TrainingStopped
from megatron_tape.run.attempts import FAILED, FINISHED, INTERRUPTED, REFUSED, STALE, Attempt
from megatron_tape.run.watch import EXIT_INTERRUPTED, EXIT_STALE, Watch

logger = logging.getLogger("pretrain")

ATTEMPT_VARIABLE = "TAPE_ATTEMPT"
"""Names the attempt that a launcher has begun; without it the run begins one of its own."""
LAST_SAVE_TRIES = 20
LAST_SAVE_WAIT = 30.0


def main(argv: list[str] | None = None) -> int:
    """Parse, check, train; return the process's exit status. Mistakes end in one sentence, before torch is imported."""
    config = parse_run_config(argv)
    watch = Watch(config.train.hang_timeout)
    try:
        return _supervised(config, watch)
    finally:
        watch.close()


def _supervised(config: RunConfig, watch: Watch) -> int:
    """Train under `watch`, and record how it ended."""
    rank = int(os.environ.get("RANK", "0"))
    speaks = rank == 0
    if number := os.environ.get(ATTEMPT_VARIABLE):
        watch.attach(Attempt.open(config.logging.directory, config.checkpoint.directory, int(number)), rank)
    try:
        validate(config, int(os.environ.get("WORLD_SIZE", "1")))
        check_inputs(config)
        if speaks:
            check_datasets(config)
    except ConfigError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
            watch.record_end(REFUSED, str(error))
        return 2
    _load_libraries(config, speaks)
    from megatron_tape.errors import CheckpointError

    try:
        reason = train(config, watch)
    except KeyboardInterrupt:
        watch.record_end(INTERRUPTED, "Ctrl-C")
        if speaks:
            print("interrupted; the same command continues from the last checkpoint", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        outcome = REFUSED if isinstance(error, (TrainingStopped, ConfigError)) else FAILED
        outcome = STALE if isinstance(error, StaleAttempt) else outcome
        foreseen = isinstance(error, (TrainingStopped, ConfigError, CheckpointError, StaleAttempt))
        message = str(error) if foreseen else f"{type(error).__name__}: {error}"
        watch.record_end(outcome, message, None if foreseen else error)
        if not foreseen:
            raise
        print(f"error{'' if speaks else f' (rank {rank})'}: {message}", file=sys.stderr, flush=True)
        return EXIT_STALE if outcome == STALE else 1
    if reason is None:
        if speaks:
            watch.record_end(FINISHED, f"finished all {config.train.steps} steps")
        return 0
    if speaks:
        print(f"{reason}; the same command continues", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def _load_libraries(config: RunConfig, speaks: bool) -> None:
    logging.basicConfig(level=logging.INFO if speaks else logging.ERROR, format="%(message)s", force=True)
    for noisy in ("DeepSpeed", "megatron", "torch", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")  # that Transformer Engine and Apex, unused here, are absent
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names DeepSpeed calls
    if config.parallel.uses_sequence_parallel:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps its collectives only so
    logger.info("loading torch, megatron-core and deepspeed")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found nothing better


def train(config: RunConfig, watch: Watch) -> str | None:
    """Train from the newest checkpoint, or from the start, to the last step.

    Returns None, or, when `watch` was asked to stop, the reason: the state was then saved after the step it reached.
    """
    import torch

    from megatron_tape.checkpoint import state as checkpoints
    from megatron_tape.data.batches import build_batches
    from megatron_tape.files import atomic_output
    from megatron_tape.model.language_model import LanguageModel, transformer_config
    from megatron_tape.ops.parity import check_fused_kernels
    from megatron_tape.parallel.layout import initialize_distributed, seed_everything
    from megatron_tape.run.metrics import MetricsWriter
    from megatron_tape.training.engine import Engine
    from megatron_tape.training.sampling import sample_text
    from megatron_tape.training.schedule import learning_rate

    settings = config.train
    watch.progress("joining the other ranks")
    layout = initialize_distributed(config.parallel.tensor_model_parallel_size)
    if watch.attempt is None:
        watch.attach(claim_attempt(config, layout), layout.rank)
    watch.progress("reading the checkpoint")
    tokenizer = load_run_tokenizer(config)
    checkpoint = checkpoints.find_checkpoint(config, layout)
    if checkpoint is not None and tokenizer is not None and layout.rank == 0:
        warn_of_other_tokenizer(checkpoint.path, config.data.tokenizer)
    first_step = 1 if checkpoint is None else checkpoint.step + 1
    if first_step > settings.steps:
        logger.info("%s already holds all %d steps; nothing to do", checkpoint.path, settings.steps)
        return None
    watch.progress("indexing the data", first_step - 1)
    batches = build_batches(config, layout, None if tokenizer is None else tokenizer.eod)

    watch.progress("building the model")
    seed_everything(settings.seed, layout)
    logger.info(
        "building a %s model of %s parameters on %d process%s",
        config.model.position_encoding,
        f"{config.model.parameter_count():,}",
        layout.world_size,
        "" if layout.world_size == 1 else "es",
    )
    model = LanguageModel(
        config.model,
        transformer_config(
            config.model,
            layout.tensor_parallel_size,
            config.parallel.uses_sequence_parallel,
            torch.bfloat16 if settings.precision == "bf16" else torch.float32,
            settings.recompute,
        ),
        layout.groups,
        layout.device,
    )
    logger.info("attention runs as %s", model.attention_backend)
    if model.attention_backend == "triton":
        watch.progress("compiling and checking the fused kernels")
        check_fused_kernels(config.model, layout.tensor_parallel_size, model.dtype, torch.device(layout.device))
        logger.info("the fused kernels equal plain torch here")
    if checkpoint is not None:
        checkpoints.load_weights(checkpoint, model, layout)
    engine = Engine(model, config, layout)
    progress = {"bad_steps": 0}
    if checkpoint is not None:
        watch.progress("loading the training state")
        checkpoints.load_training_state(checkpoint, engine)
        progress = checkpoint.state["progress"]
        logger.info("continuing from %s at step %d of %d", checkpoint.path, first_step, settings.steps)
    bad_steps = progress["bad_steps"]

    writer = None
    if layout.rank == 0:
        watch.attempt.check_owner()
        directory = config.logging.directory
        writer = MetricsWriter(
            directory, settings.steps, first_step - 1, config.logging.tensorboard, staging=watch.attempt.home
        )
        writer.text("configuration", to_yaml(config), first_step - 1)
        with atomic_output(Path(directory) / "config.yaml", "w", overwrite=True) as file:
            file.write(to_yaml(config))

    if layout.any_rank(watch.stop is not None):
        return stopped(watch, layout, f"came before step {first_step}")
    watch.begin_training()
    micro_batches = batches.training(first_step)
    tokens_per_step = settings.global_batch_size * config.model.seq_length
    seconds, timed_steps = 0.0, 0
    for step in range(first_step, settings.steps + 1):
        last = step == settings.steps
        evaluates = settings.eval_interval is not None and (step % settings.eval_interval == 0 or last)
        evaluates = evaluates and batches.validation is not None
        logs = step % config.logging.interval == 0 or step == 1 or last or evaluates
        model.record_position_norms(logs)
        rate = learning_rate(step, config.optimizer, config.schedule, settings.steps)
        started = time.perf_counter()
        result = engine.train_step(micro_batches, rate)
        seconds, timed_steps = seconds + time.perf_counter() - started, timed_steps + 1
        watch.progress("training", step)

        if result.skipped:
            bad_steps += 1
            logger.warning(
                "step %d skipped: loss %s, gradient norm %s (%d in a row)",
                step,
                result.loss,
                result.grad_norm,
                bad_steps,
            )
            if bad_steps >= settings.max_bad_steps:
                raise TrainingStopped(
                    f"{bad_steps} steps in a row, up to step {step}, had a loss or gradient that is not finite; lower "
                    "optimizer.lr, lengthen schedule.warmup_steps, or look at the data "
                    "(train.max_bad_steps sets this limit)"
                )
        else:
            bad_steps = 0

        if logs:
            speed = timed_steps * tokens_per_step / seconds
            scalars = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": rate,
                "tokens_per_second": speed,
                "tflops_per_second": speed * config.model.flops_per_token() / 1e12,
                **position_norms(model, layout),
            }
            seconds, timed_steps = 0.0, 0
            if evaluates:
                scalars["validation_loss"] = engine.evaluate(watch.each("evaluating", batches.evaluation()))
            if writer is not None:
                writer.log(step, scalars)
            if evaluates and tokenizer is not None and config.logging.sample_tokens > 0:
                watch.progress("sampling text")
                prompt, length = config.logging.sample_prompt, config.logging.sample_tokens
                text = sample_text(engine, tokenizer, prompt, length, config.model.seq_length)
                if writer is not None:
                    writer.text("sample", text, step)
        stopping = layout.any_rank(watch.stop is not None)
        if step % config.checkpoint.interval == 0 or last or stopping:
            if writer is not None:
                writer.sync()
            saved = save(engine, config, step, {**progress, "bad_steps": bad_steps}, watch)
            stopping = layout.any_rank(watch.stop is not None)
        if stopping and not last:
            if writer is not None:
                writer.close()
            return stopped(watch, layout, f"stopped the run after step {step}{'' if saved else ', which is not saved'}")
        watch.progress("training")
    if writer is not None:
        writer.close()
    return None


def stopped(watch: Watch, layout, what: str) -> str:
    """Record on rank 0 why the run stops, before any rank ends and its launcher ends the others; return the reason."""
    reason = f"{watch.stop or 'a signal to another rank'} {what}"
    if layout.rank == 0:
        watch.record_end(INTERRUPTED, reason)
    layout.any_rank(False)
    return reason


def claim_attempt(config: RunConfig, layout) -> Attempt:
    """Begin an attempt that no launcher has begun; all ranks call it together."""
    import torch.distributed as dist

    told: list = [None, None]
    if layout.rank == 0:
        facts = {"job": None, "nodes": [os.uname().nodename], "processes": layout.world_size, "pid": os.getpid()}
        try:
            told[0] = Attempt.claim(config.logging.directory, config.checkpoint.directory, facts).number
        except OSError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise ConfigError(f"the run cannot begin in {config.logging.directory}: {told[1]}")
    return Attempt.open(config.logging.directory, config.checkpoint.directory, told[0])


def warn_of_other_tokenizer(checkpoint: Path, path: str) -> None:
    """Warn where an import brought a tokenizer, and the run's gives other ids."""
    from megatron_tape.data.tokenizer import load_tokenizer

    text = "def f(x):\n    return 2 * x  # Grüße, 你好 1234"
    if (checkpoint / "tokenizer").is_dir():
        brought, used = (load_tokenizer(source).encode(text) for source in (checkpoint / "tokenizer", path))
        if brought != used:
            logger.warning(
                "data.tokenizer %s gives other ids than %s, which the model came with", path, checkpoint / "tokenizer"
            )


def save(engine, config: RunConfig, step: int, progress: dict, watch: Watch) -> bool:
    """Save a checkpoint, and tell whether that went well.

    A disk that fails costs the run this checkpoint only; at the last step it is waited for.

    Raises StaleAttempt when the run is no longer this attempt's, CheckpointError when the last step cannot be saved.
    """
    from megatron_tape.checkpoint.state import save_checkpoint
    from megatron_tape.errors import CheckpointError

    last = step == config.train.steps
    for tries_left in reversed(range(LAST_SAVE_TRIES if last else 1)):
        watch.progress("saving")
        try:
            path = save_checkpoint(engine, config, step, progress, watch.attempt)
        except CheckpointError as error:
            if last and tries_left == 0:
                raise
            when = f"in {LAST_SAVE_WAIT:g} s, {tries_left} times more" if last else "at the next interval"
            logger.warning("warning: %s; the checkpoints before are whole, the next try is %s", error, when)
            if last:
                time.sleep(LAST_SAVE_WAIT)
        else:
            logger.info("saved %s", path)
            return True
    return False


def position_norms(model, layout) -> dict[str, float]:
    """Return, per layer, the root mean square of the position state's complex numbers and of their last update.

    The state's is 1 at RoPE and the update's 0: together they show TAPE leave RoPE. Empty without position updates.
    """
    import torch
    import torch.distributed as dist

    norms = [update.norms for update in model.position_updates()]
    if not norms:
        return {}
    totals = torch.stack(norms)
    dist.all_reduce(totals)
    means = (totals[:, :2] / totals[:, 2:]).sqrt().tolist()
    return {
        f"position/{name}/layer_{layer:02d}": value
        for layer, pair in enumerate(means)
        for name, value in zip(("state_norm", "update_norm"), pair)
    }


if __name__ == "__main__":
    sys.exit(main())
