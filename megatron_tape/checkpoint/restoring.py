"""Restores a run: weights, Adam's state and random number generators.

docs/training.md lists the files of a checkpoint. Tensor files hold the fp32 weights and moments of one tensor-parallel
rank by parameter name. Nothing depends on the ZeRO stage, and shards are merged and split for another tensor-parallel
size, so a run may continue under another layout. Frozen parameters have weights and no moments. With
`checkpoint.frozen: false` their weights are not saved either, and `state.json` names the checkpoint that has them.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.interfaces import EngineState
from megatron_tape.checkpoint.locate import source_record
from megatron_tape.checkpoint.random_state import restore_random_state
from megatron_tape.checkpoint.reading import CHOOSE_ANOTHER, Checkpoint, Reader
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError, refuse
from megatron_tape.model.names import WRAPPED, kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import write_shard
from megatron_tape.position import model_config


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module, layout: ParallelLayout) -> None:
    """Load the weights into a newly built model whose memory is allocated, before the engine is built."""
    parameters = dict(model.named_parameters())
    read = Reader(checkpoint, parameters, layout)
    _write_weights(read, parameters, read.names)
    read.check()


def _write_weights(read: Reader, parameters: Mapping[str, torch.nn.Parameter], names: Iterable[str]) -> None:
    for name in names:
        weight = read(f"weight/{name}")
        if weight is not None:
            write_shard(parameters[name], weight)


def load_base_weights(base: Checkpoint, model: torch.nn.Module, layout: ParallelLayout) -> list[str]:
    """Load the initial weights of a run as `load_weights` does; return the parameters that `base` does not have.

    The caller initializes these. Only LoRA layers and parameters of a positional encoding that `base` does not have may
    be missing. Raises CheckpointError for other missing parameters, and for parameters that the model does not have.
    """
    parameters, saved = dict(model.named_parameters()), base.weight_names()
    settings = model_config(base.state["config"]["model"])
    base_parameters = {f"{WRAPPED}{name}" for name in parameter_shapes(settings)}
    all_names = list(itertools.chain(*layout.gather_stages(list(parameters))))
    new = [name for name in all_names if name not in saved]
    may_be_new = {
        name for name in new if kind_of(name) == "lora" or (kind_of(name) == "position" and name not in base_parameters)
    }
    another = "choose another model to extend"
    if missing := [name for name in new if name not in may_be_new]:
        raise CheckpointError(str(base.path), f"has no {missing[0]}", another)
    if extra := sorted(saved.difference(all_names)):
        raise CheckpointError(str(base.path), f"has {extra[0]}, which the model of this run does not have", another)
    read = Reader(base, parameters, layout)
    _write_weights(read, parameters, (name for name in read.names if name in saved))
    read.check()
    base.release()
    return new


def load_training_state(checkpoint: Checkpoint, engine: EngineState) -> None:
    """Restore the random number generators and a newly built engine whose model already has the weights.

    Raises CheckpointError if a trained parameter was frozen in a checkpoint that has moments of other parameters.
    """
    updates = checkpoint.state["optimizer_steps"]
    read = Reader(checkpoint, engine.trained, engine.layout)
    without = [name for name in read.names if name in checkpoint.state.get("frozen", ())]
    if updates and without:
        problem = f"has no moments of {without[0]}, which was frozen there and is trained now"
        raise CheckpointError(str(checkpoint.path), problem, f"train the same parameters, or {CHOOSE_ANOTHER}")
    engine.load_training_state(read, updates, read.names)
    read.check()
    with Agreement(engine.layout) as agreement:
        restore_random_state(checkpoint.path, engine.layout.rank)
    agreement.check(checkpoint.path, "cannot continue")
    checkpoint.release()


def source_of_frozen(checkpoint: Checkpoint | None, frozen: list[str], config: RunConfig) -> files.Source | None:
    """Return the checkpoint with the weights of the `frozen` parameters, for a run that starts from `checkpoint`.

    Return None if the run's own checkpoints have them. Raises ConfigError if `checkpoint.frozen` is false and no other
    checkpoint has them, and CheckpointError if earlier checkpoints of the run omit different parameters.
    """
    if config.checkpoint.frozen or not frozen:
        return None
    own = checkpoint is not None and Path(config.checkpoint.directory).resolve() in checkpoint.path.resolve().parents
    if own and checkpoint.state.get("frozen_from") is not None:
        if changed := set(frozen) ^ set(checkpoint.state["frozen"]):
            problem = f"was saved with checkpoint.frozen: false and other frozen parameters ({min(changed)})"
            fix = "train the same parameters, or set checkpoint.frozen to true"
            raise CheckpointError(str(checkpoint.path), problem, fix)
        return source_record(checkpoint.source.path)
    refuse(
        own or checkpoint is None,
        "checkpoint.frozen",
        "is false, but the run did not start from a checkpoint outside checkpoint.directory "
        f"{config.checkpoint.directory} that has the frozen weights",
        "give one as checkpoint.resume or extension.from, or set it to true",
    )
    return source_record(checkpoint.path)
