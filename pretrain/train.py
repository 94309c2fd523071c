"""Train one model: `python -m pretrain.train --config X.yaml`, or under `torchrun --nproc-per-node N -m`."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

from megatron_tape.config import ConfigError, RunConfig, parse_run_config, to_yaml
from megatron_tape.validation import check_datasets, check_inputs, load_run_tokenizer, validate

logger = logging.getLogger("pretrain")


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Parse, check, train; return the process's exit status. Mistakes end in one sentence, before torch is imported."""
    config = parse_run_config(argv)
    speaks = int(os.environ.get("RANK", "0")) == 0
    try:
        validate(config, int(os.environ.get("WORLD_SIZE", "1")))
        check_inputs(config)
        if speaks:
            check_datasets(config)
    except ConfigError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        return 2
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
    from megatron_tape.checkpoint import CheckpointError

    try:
        train(config)
    except (TrainingStopped, ConfigError, CheckpointError) as error:
        who = "" if speaks else f" (rank {os.environ['RANK']})"
        print(f"error{who}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        if speaks:
            print("interrupted; the same command continues from the last checkpoint", file=sys.stderr, flush=True)
        return 130
    return 0


def train(config: RunConfig) -> None:
    """Train from the newest checkpoint, or from the start, to the last step."""
    import torch

    from megatron_tape import checkpoint as checkpoints
    from megatron_tape.data import build_batches
    from megatron_tape.engine import Engine
    from megatron_tape.files import atomic_output
    from megatron_tape.metrics import MetricsWriter
    from megatron_tape.model import LanguageModel, transformer_config
    from megatron_tape.parallel import initialize_distributed, seed_everything
    from megatron_tape.sampling import sample_text
    from megatron_tape.schedule import learning_rate

    settings = config.train
    layout = initialize_distributed(config.parallel.tensor_model_parallel_size)
    tokenizer = load_run_tokenizer(config)
    checkpoint = checkpoints.find_checkpoint(config, layout)
    first_step = 1 if checkpoint is None else checkpoint.step + 1
    if first_step > settings.steps:
        logger.info("%s already holds all %d steps; nothing to do", checkpoint.path, settings.steps)
        return
    batches = build_batches(config, layout, None if tokenizer is None else tokenizer.eod)

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
    )
    if checkpoint is not None:
        checkpoints.load_weights(checkpoint, model, layout)
    engine = Engine(model, config, layout)
    bad_steps = 0
    if checkpoint is not None:
        checkpoints.load_training_state(checkpoint, engine)
        bad_steps = checkpoint.state["progress"]["bad_steps"]
        logger.info("continuing from %s at step %d of %d", checkpoint.path, first_step, settings.steps)

    writer = None
    if layout.rank == 0:
        directory = config.logging.directory
        writer = MetricsWriter(directory, settings.steps, first_step - 1, config.logging.tensorboard)
        writer.text("configuration", to_yaml(config), first_step - 1)
        with atomic_output(Path(directory) / "config.yaml", "w", overwrite=True) as file:
            file.write(to_yaml(config))

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
                scalars["validation_loss"] = engine.evaluate(batches.evaluation())
            if writer is not None:
                writer.log(step, scalars)
            if evaluates and tokenizer is not None and config.logging.sample_tokens > 0:
                prompt, length = config.logging.sample_prompt, config.logging.sample_tokens
                text = sample_text(engine, tokenizer, prompt, length, config.model.seq_length)
                if writer is not None:
                    writer.text("sample", text, step)
        if step % config.checkpoint.interval == 0 or last:
            path = checkpoints.save_checkpoint(engine, config, step, {"bad_steps": bad_steps})
            logger.info("saved %s", path)
    if writer is not None:
        writer.close()


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
