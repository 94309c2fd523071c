"""Saves and restores a run: weights, Adam's state, the position in the data, random number generators, and settings.

A checkpoint holds `state.json`, one `tensors-tpTT-dpDDDDD.safetensors` per rank (fp32 weights and moments by parameter
name, distributed whole over the data-parallel ranks, and cut over the tensor-parallel ranks as `state.json` says) and
the ranks' random states. It does not depend on the ZeRO stage: a run may continue under another layout. `directories`
makes sure that a checkpoint is either complete or invisible.

Frozen parameters have weights and no moments. With `checkpoint.frozen: false` their weights are left out too, and
`state.json` says which checkpoint holds them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch  # noqa: F401  (directories.py imports it at the first save, when it may be gone)
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.frozen import source_record
from megatron_tape.checkpoint.opening import Checkpoint
from megatron_tape.checkpoint.random_state import random_state, set_random_state
from megatron_tape.config.schema import BEFORE, ModelConfig, RunConfig, config_dict
from megatron_tape.errors import CheckpointError, refuse
from megatron_tape.model.names import WRAPPED, parameter_shapes
from megatron_tape.model.weights import kind_of
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import write_share
from megatron_tape.records import write_record

if TYPE_CHECKING:
    from megatron_tape.run.attempts import Attempt
    from megatron_tape.training.engine import Engine


def save_checkpoint(
    engine: Engine,
    config: RunConfig,
    step: int,
    progress: dict,
    attempt: Attempt,
    frozen_from: files.Source | None = None,
) -> Path:
    """Save the run after `step` steps; all ranks call this together. `progress` (JSON) is stored in `state.json`.

    Frozen parameters are left out if `frozen_from` says which checkpoint holds them. Returns the checkpoint's
    directory. Raises the same error on every rank: StaleAttempt if a newer attempt has taken over the run,
    CheckpointError if a rank could not write. Earlier checkpoints are then unchanged, and nothing is left behind.
    """
    try:
        return _save(engine, config, step, progress, attempt, frozen_from)
    except CheckpointError:
        if engine.layout.rank == 0:
            shutil.rmtree(attempt.home / f"step-{step:08d}", ignore_errors=True)
        raise


def _save(
    engine: Engine,
    config: RunConfig,
    step: int,
    progress: dict,
    attempt: Attempt,
    frozen_from: files.Source | None,
) -> Path:
    layout = engine.layout
    root = Path(config.checkpoint.directory)
    outcome: dict = {}
    with Agreement(layout, attempt) as agreement:
        if layout.rank == 0:
            files.staging_directory(attempt.home, step)
    agreement.check(f"could not prepare a checkpoint in {root}")
    staging = attempt.home / f"step-{step:08d}"

    dp_rank, dp_size = layout.replica_rank, layout.replica_size
    tensors = engine.training_state(lambda index: index % dp_size == dp_rank, frozen=frozen_from is None)
    names = [
        f"tensors-tp{layout.tensor_parallel_rank:02d}-dp{dp_rank:05d}.safetensors",
        f"random-{layout.rank:05d}.safetensors",
    ]
    with Agreement(layout, attempt) as agreement:
        files.write_tensors(staging / names[0], tensors)
        random_tensors, random_text = random_state()
        files.write_tensors(staging / names[1], random_tensors, random_text)
        outcome = {name: _entry(staging / name) for name in names}
    agreement.check(f"could not write checkpoint {step} in {root}")
    entries: list[dict | None] = [None] * layout.world_size
    dist.all_gather_object(entries, outcome)

    with Agreement(layout, attempt) as agreement:
        if layout.rank == 0:
            written = {name: entry for part in entries for name, entry in part.items()}
            write_record(staging / files.STATE, _state(engine, config, step, progress, frozen_from))
            written[files.STATE] = _entry(staging / files.STATE)
            attempt.check_owner()
            files.publish(staging, root, step, written)
            files.prune(root, config.checkpoint.keep)
    agreement.check(f"could not finish checkpoint {step} in {root}")
    return root / f"step-{step:08d}"


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module, layout: ParallelLayout) -> None:
    """Load the weights into a newly built model with memory; call this before the engine is built."""
    parameters = dict(model.named_parameters())
    read = checkpoint.reader(parameters, layout)
    for name, parameter in parameters.items():
        write_share(parameter, read(f"weight/{name}"))


def load_base_weights(base: Checkpoint, model: torch.nn.Module, layout: ParallelLayout) -> list[str]:
    """Load the weights that a run begins with, as `load_weights` does; return the parameters that `base` does not have.

    These must be drawn. They may be LoRA layers, and what the positional encoding of `base` does not have.
    Raises CheckpointError if anything else is missing, or if `base` holds what the model does not have.
    """
    parameters, held = dict(model.named_parameters()), base.weight_names()
    settings = ModelConfig(**{**BEFORE["model"], **base.state["config"]["model"]})
    of_base = {f"{WRAPPED}{name}" for name in parameter_shapes(settings)}
    new = [name for name in parameters if name not in held]
    may_be_new = {
        name for name in new if kind_of(name) == "lora" or (kind_of(name) == "position" and name not in of_base)
    }
    if missing := [name for name in new if name not in may_be_new]:
        raise CheckpointError(f"{base.path} holds no {missing[0]}; choose another model to extend")
    if extra := sorted(held - parameters.keys()):
        raise CheckpointError(
            f"{base.path} holds {extra[0]}, which the model of this run does not have; choose another model to extend"
        )
    read = base.reader(parameters, layout)
    for name, parameter in parameters.items():
        if name in held:
            write_share(parameter, read(f"weight/{name}"))
    return new


def load_training_state(checkpoint: Checkpoint, engine: Engine) -> None:
    """Restore a newly built engine, whose model already has the weights, and the random number generators.

    Raises CheckpointError if a trained parameter was frozen in a checkpoint that holds the others' moments.
    """
    updates = checkpoint.state["optimizer_steps"]
    without = [name for name in engine.trained if name in checkpoint.state.get("frozen", ())]
    if updates and without:
        raise CheckpointError(
            f"{checkpoint.path} has no moments of {without[0]}, which was frozen there and is trained now; train what "
            "it trained, or choose another checkpoint"
        )
    engine.load_training_state(checkpoint.reader(engine.trained, engine.layout), updates)
    path = checkpoint.path / f"random-{engine.layout.rank:05d}.safetensors"
    if path.is_file():
        try:
            set_random_state(files.read_tensors(path), files.read_metadata(path))
        except (SafetensorError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            # Each generator checks its state and raises its own kind of error.
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} holds no random states that can be restored ({type(error).__name__}: {reason}); choose "
                "another checkpoint"
            ) from None


def source_of_frozen(checkpoint: Checkpoint | None, frozen: list[str], config: RunConfig) -> files.Source | None:
    """Return the checkpoint that holds the weights of the `frozen` parameters for a run that begins with `checkpoint`.

    Returns None if the run's own checkpoints hold them. Raises ConfigError if `checkpoint.frozen` is false and no other
    checkpoint holds them, CheckpointError if the run's checkpoints so far left out different parameters.
    """
    if config.checkpoint.frozen or not frozen:
        return None
    own = checkpoint is not None and Path(config.checkpoint.directory).resolve() in checkpoint.path.resolve().parents
    if own and checkpoint.state.get("frozen_from") is not None:
        if changed := set(frozen) ^ set(checkpoint.state["frozen"]):
            raise CheckpointError(
                f"checkpoint.frozen is false, and {checkpoint.path} was saved with other frozen parameters "
                f"({min(changed)}); train what it trained, or set checkpoint.frozen to true"
            )
        return source_record(checkpoint.source.path)
    refuse(
        own or checkpoint is None,
        "checkpoint.frozen is false, but the run did not begin with a checkpoint outside checkpoint.directory "
        f"{config.checkpoint.directory} that keeps the frozen weights; give one as checkpoint.resume or "
        "extension.from, or set checkpoint.frozen to true",
    )
    return source_record(checkpoint.path)


def _state(engine: Engine, config: RunConfig, step: int, progress: dict, frozen_from: files.Source | None) -> dict:
    sharded = {
        name: {"dim": parameter.partition_dim, "stride": parameter.partition_stride}
        for name, parameter in engine.names.items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    return {
        "step": step,
        "optimizer_steps": engine.optimizer_steps,
        "consumed_samples": step * config.train.global_batch_size,
        "progress": progress,
        "tensor_model_parallel_size": engine.layout.tensor_parallel_size,
        "data_parallel_size": engine.layout.replica_size,
        "sharded": sharded,
        "frozen": [name for name in engine.names if name not in engine.trained],
        "frozen_from": frozen_from,
        "config": config_dict(config),
    }


def _entry(path: Path) -> dict:
    size, sha256 = files.digest(path)
    return {"bytes": size, "sha256": sha256}
