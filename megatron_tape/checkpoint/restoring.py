"""Restore a run from a checkpoint: weights, optimizer state and random number generators.

A checkpoint contains fp32 weights and moments by parameter name (docs/training.md lists the files).
They do not depend on the ZeRO stage or the number of data-parallel ranks. Tensor-parallel shards
are merged and split again if necessary, so a run may continue under another layout. Frozen
parameters have no moments. With `checkpoint.frozen: false` their weights are not saved either;
`state.json` names the checkpoint that contains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch.nn import Module, Parameter

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.locate import source_record
from megatron_tape.checkpoint.random_state import restore_random_state
from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.checkpoint.reading import CHOOSE_ANOTHER, Checkpoint, Reader
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import write_shard
from megatron_tape.position import model_config

if TYPE_CHECKING:
    from megatron_tape.training.engine import Engine


def load_weights(checkpoint: Checkpoint, model: Module, layout: ParallelLayout) -> None:
    """Load the weights of `checkpoint` into a model whose parameters are allocated.

    Call this before the engine is created, because ZeRO then copies the weights. Raises
    CheckpointError if they cannot be read or do not fit. All ranks call this together.
    """
    parameters = dict(model.named_parameters())
    read = Reader(checkpoint, parameters, layout)
    _write_weights(read, parameters, read.names)
    read.check()


def _write_weights(read: Reader, parameters: Mapping[str, Parameter], names: Iterable[str]) -> None:
    """Set this rank's `parameters` to the weights of the parameters `names` of all pipeline stages.

    All ranks call `read` for the same names, and get None for parameters of other stages.
    """
    for name in names:
        weight = read(f"weight/{name}")
        if weight is not None:
            write_shard(parameters[name], weight)


def load_base_weights(base: Checkpoint, model: Module, layout: ParallelLayout) -> list[str]:
    """Load the initial weights of a run from `base`, and return the names of the parameters that
    `base` does not have.

    The caller must initialize these. They can only be LoRA layers, and parameters of the positional
    encoding if the model in `base` has another encoding. Raises CheckpointError if any other
    parameter is missing in `base`, or if `base` has a parameter that the model does not have. All
    ranks call this together.
    """
    parameters = dict(model.named_parameters())
    read = Reader(base, parameters, layout)
    saved = base.weight_names()
    expected = parameter_shapes(model_config(base.state["config"]["model"]))
    new = [name for name in read.names if name not in saved]
    fix = "set extension.from to another model"
    for name in new:
        # A parameter in `expected` belongs to the model in `base`, so `base` is damaged without it.
        kind = kind_of(name)
        if kind != "lora" and (kind != "position" or name in expected):
            raise CheckpointError(
                base.path, f"has no {name}, which the model of this run requires", fix
            )
    if extra := sorted(saved.difference(read.names)):
        raise CheckpointError(
            base.path,
            f"contains the parameter {extra[0]}, which the model of this run does not have",
            fix,
        )

    _write_weights(read, parameters, (name for name in read.names if name in saved))
    read.check()
    return new


def load_training_state(checkpoint: Checkpoint, engine: Engine) -> None:
    """Restore the optimizer's state and the random number generators.

    The engine must be new, and its model must already have the weights. Raises CheckpointError if
    moments are missing, because a parameter that is trained now was frozen in the checkpoint. All
    ranks call this together.
    """
    updates = checkpoint.state["optimizer_steps"]
    read = Reader(checkpoint, engine.trained, engine.layout)
    # Imported checkpoints have no `frozen`.
    were_frozen = [name for name in read.names if name in checkpoint.state.get("frozen", ())]
    # Before the first update, there are no moments that could be missing.
    if updates and were_frozen:
        raise CheckpointError(
            checkpoint.path,
            f"has no moments of {were_frozen[0]}, which was frozen in it, but is trained now",
            f"train the same parameters, or {CHOOSE_ANOTHER}",
        )

    engine.load_training_state(read, updates, read.names)
    read.check()
    with RankErrors(engine.layout) as errors:
        restore_random_state(checkpoint.path, engine.layout.rank)
    errors.check(checkpoint.path, "cannot continue")


def source_of_frozen(
    checkpoint: Checkpoint | None, frozen: list[str], config: RunConfig
) -> files.FrozenWeightsSource | None:
    """Return the reference to the checkpoint with the frozen weights, for checkpoints that omit
    them; None if the run's own checkpoints contain them (`checkpoint.frozen: true`).

    Args:
        checkpoint: the one that the run continues or starts from.
        frozen: the names of the frozen parameters of all pipeline stages.
        config: the run's settings.

    Raises:
        ConfigError: if no checkpoint outside of the run contains the weights.
        CheckpointError: if the run's last checkpoint omits other parameters than `frozen`.
    """
    if config.checkpoint.frozen or not frozen:
        return None

    directory = Path(config.checkpoint.directory)
    if checkpoint is not None:
        # The run's own checkpoints may be removed, so another one must contain the weights.
        if directory.resolve() not in checkpoint.path.resolve().parents:
            return source_record(checkpoint.path)

        # If this checkpoint of the run omits the weights, too, refer to the same source as it does.
        if checkpoint.source is not None:
            if changed := set(frozen) ^ set(checkpoint.state["frozen"]):
                raise CheckpointError(
                    checkpoint.path,
                    "was saved with checkpoint.frozen: false and other frozen parameters, such as"
                    f" {min(changed)}",
                    "train the same parameters, or set checkpoint.frozen: true",
                )
            return source_record(checkpoint.source.path)
    raise ConfigError(
        "checkpoint.frozen",
        "is false, but the frozen weights would be lost: the run did not start from a checkpoint"
        f" outside of checkpoint.directory {directory} that contains them",
        "set checkpoint.frozen: true, or start the run from a checkpoint with checkpoint.resume or"
        " extension.from",
    )
