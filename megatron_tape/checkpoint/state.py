"""Saves and restores a run: weights, Adam's state, position in the data, random numbers, and what was configured.

A checkpoint holds `state.json`, one `tensors-tpTT-dpDDDDD.safetensors` per rank (fp32 weights and moments by parameter
name, whole over the data-parallel ranks, cut over the tensor-parallel ones as `state.json` says) and the ranks' random
states. It knows no ZeRO stage: a run may continue under another layout. `directories` makes it whole or invisible.

Frozen parameters have weights and no moments. With `checkpoint.frozen: false` their weights are left out, too, and
`state.json` says which checkpoint has them.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch  # noqa: F401  (directories.py imports it at the first save, when it may be gone)
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from torch import Tensor

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.frozen import find_source, source_record
from megatron_tape.checkpoint.settings import check_same_model
from megatron_tape.checkpoint.shares import Shares, check_shares
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.errors import CheckpointError, ConfigError, StaleAttempt, refuse
from megatron_tape.model.weights import shard, unshard
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.records import parse_record, write_record

if TYPE_CHECKING:
    from megatron_tape.run.attempts import Attempt
    from megatron_tape.training.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, opened for this rank."""

    path: Path
    state: dict
    source: Checkpoint | None = None
    """The checkpoint with the weights of the frozen parameters, where this one leaves them out."""

    @property
    def step(self) -> int:
        """The last step it contains."""
        return self.state["step"]

    def reader(self, parameters: dict[str, torch.nn.Parameter], layout: ParallelLayout) -> Callable[[str], Tensor]:
        """Return a function from a key such as `exp_avg/NAME` to this rank's share of that tensor.

        Under the tensor-parallel size that saved it a share is read as it is; under another it is cut from the whole.
        """
        size = self.state["tensor_model_parallel_size"]
        shares = [Shares(self.path, rank) for rank in range(size)]
        # Every rank looks at all of them, so that all ranks refuse what is wrong with one.
        check_shares(self.path, shares, parameters, layout.tensor_parallel_size)
        left_out = None if self.source is None else self.source.reader(parameters, layout)

        def read(key: str) -> Tensor:
            if key not in shares[0]:
                if left_out is None:
                    raise CheckpointError(f"{self.path} holds no {key}; choose another checkpoint")
                return left_out(key)
            if size == layout.tensor_parallel_size:
                return shares[layout.tensor_parallel_rank].read(key)
            parameter = parameters[key.partition("/")[2]]
            whole = unshard([held.read(key) for held in shares], parameter)
            return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

        return read


def save_checkpoint(
    engine: Engine,
    config: RunConfig,
    step: int,
    progress: dict,
    attempt: Attempt,
    frozen_from: dict[str, str] | None = None,
) -> Path:
    """Save the run after `step` steps; all ranks call it together. `progress` (JSON) comes back in `state`.

    Frozen parameters are left out where `frozen_from` says what keeps them. Returns the checkpoint's directory. Raises
    on every rank alike: StaleAttempt when `attempt` has lost the run, CheckpointError when a rank could not write. The
    checkpoints before stay as they are, and nothing is left behind.
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
    frozen_from: dict[str, str] | None,
) -> Path:
    layout = engine.layout
    root = Path(config.checkpoint.directory)
    outcome: dict = {}
    with _agreement(layout, attempt) as agreement:
        if layout.rank == 0:
            files.staging_directory(attempt.home, step)
    agreement.check(f"could not prepare a checkpoint in {root}")
    staging = attempt.home / f"step-{step:08d}"

    dp_rank, dp_size = layout.data_parallel_rank, layout.data_parallel_size
    tensors = engine.training_state(lambda index: index % dp_size == dp_rank, frozen=frozen_from is None)
    names = [
        f"tensors-tp{layout.tensor_parallel_rank:02d}-dp{dp_rank:05d}.safetensors",
        f"random-{layout.rank:05d}.safetensors",
    ]
    with _agreement(layout, attempt) as agreement:
        files.write_tensors(staging / names[0], tensors)
        random_tensors, random_text = _random_state()
        files.write_tensors(staging / names[1], random_tensors, random_text)
        outcome = {name: _entry(staging / name) for name in names}
    agreement.check(f"could not write checkpoint {step} in {root}")
    entries: list[dict | None] = [None] * layout.world_size
    dist.all_gather_object(entries, outcome)

    with _agreement(layout, attempt) as agreement:
        if layout.rank == 0:
            written = {name: entry for part in entries for name, entry in part.items()}
            write_record(staging / files.STATE, _state(engine, config, step, progress, frozen_from))
            written[files.STATE] = _entry(staging / files.STATE)
            attempt.check_owner()
            files.publish(staging, root, step, written)
            files.prune(root, config.checkpoint.keep)
    agreement.check(f"could not finish checkpoint {step} in {root}")
    return root / f"step-{step:08d}"


def find_checkpoint(config: RunConfig, layout: ParallelLayout) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume` asks for, or None to start afresh; all ranks call it together.

    `auto` takes the newest whole one and warns of broken ones it passes over; so does a path from elsewhere once the
    run has checkpoints of its own. Raises CheckpointError when a path given is not a whole checkpoint, or when every
    checkpoint of the directory is broken.
    """
    resume = files.what_to_resume(config.checkpoint.resume, config.checkpoint.directory)
    found: list[str | None] = [None]
    with _agreement(layout) as agreement:
        if layout.rank == 0:
            found[0] = None if resume == "none" else _choose(resume, Path(config.checkpoint.directory))
            if resume != "auto":
                _refuse_later(Path(config.checkpoint.directory), found[0])
    agreement.check("cannot start")
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    checkpoint = None
    with _agreement(layout) as agreement:
        checkpoint = _open(Path(found[0]), deep=layout.rank == 0)
        check_same_model(checkpoint.path, config)
    agreement.check("cannot continue")
    return checkpoint


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module, layout: ParallelLayout) -> None:
    """Fill a freshly built model; call before the engine is built."""
    parameters = dict(model.named_parameters())
    read = checkpoint.reader(parameters, layout)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(read(f"weight/{name}"))


def load_training_state(checkpoint: Checkpoint, engine: Engine) -> None:
    """Fill a freshly built engine, whose model already has the weights, and the random number generators.

    Raises CheckpointError where a parameter is trained that was frozen in a checkpoint with moments of the others.
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
            _set_random_state(files.read_tensors(path), files.read_metadata(path))
        except (SafetensorError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            # The generators themselves check what they are given, each in its own way.
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} holds no random states that can be restored ({type(error).__name__}: {reason}); choose "
                "another checkpoint"
            ) from None


def source_of_frozen(checkpoint: Checkpoint | None, frozen: list[str], config: RunConfig) -> dict[str, str] | None:
    """Return what keeps the weights of the `frozen` parameters for a run that began with `checkpoint`.

    None where the run's own checkpoints hold them. Raises ConfigError where `checkpoint.frozen` is false and nothing
    else keeps them, CheckpointError where the run's checkpoints left out other ones so far.
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
        return checkpoint.state["frozen_from"]
    refuse(
        own or checkpoint is None,
        "checkpoint.frozen is false, but the run did not begin with a checkpoint outside checkpoint.directory "
        f"{config.checkpoint.directory} that keeps the frozen weights; give one as checkpoint.resume, or set "
        "checkpoint.frozen to true",
    )
    return source_record(checkpoint.path)


def _open(path: Path, deep: bool) -> Checkpoint:
    """Open a whole checkpoint, and the one with what it leaves out, of which `deep` reads every byte."""
    state = files.read_state(path)
    _check_ranks_files(path, state)
    source = find_source(path, state)
    if source is None:
        return Checkpoint(path, state)
    if deep and (found := files.problems(source)):
        raise CheckpointError(f"{source}, which has the frozen parameters of {path}, is not whole: {'; '.join(found)}")
    return Checkpoint(path, state, _open(source, deep))


def _choose(resume: str, directory: Path) -> str | None:
    if resume == "auto":
        path = files.newest_whole(directory, lambda message: logger.warning("%s", message))
        if path is None and files.list_checkpoints(directory):
            raise CheckpointError(f"no checkpoint in {directory} is whole; move them away to start afresh")
        return None if path is None else str(path)
    path = Path(resume)
    found = files.problems(path) if path.is_dir() else ["it is not a directory"]
    if found:
        advice = "; import it first: tools/convert_checkpoint.py from-hf" if (path / "config.json").is_file() else ""
        raise CheckpointError(f"checkpoint.resume {path} is not a whole checkpoint: {'; '.join(found)}{advice}")
    return str(path)


def _check_ranks_files(path: Path, state: dict) -> None:
    """Refuse a directory in which this rank does not see every tensor file."""
    for rank in range(state["tensor_model_parallel_size"]):
        found = len(list(path.glob(f"tensors-tp{rank:02d}-*")))
        if found != state["data_parallel_size"]:
            raise CheckpointError(
                f"{found} of {state['data_parallel_size']} files tensors-tp{rank:02d}-* are in {path}; all nodes must "
                "see checkpoint.directory"
            )


def _refuse_later(directory: Path, chosen: str | None) -> None:
    """Refuse a start before a checkpoint already there: the run's own would be taken for old ones and removed."""
    start = 0 if chosen is None else files.read_manifest(chosen)["step"]
    newest = files.checkpointed_step(directory)
    if newest > start:
        raise CheckpointError(
            f"checkpoint.directory {directory} holds checkpoints up to step {newest}, beyond step {start} where this "
            "run would start; move them away, choose another directory, or continue with checkpoint.resume: auto"
        )


def _state(engine: Engine, config: RunConfig, step: int, progress: dict, frozen_from: dict[str, str] | None) -> dict:
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
        "data_parallel_size": engine.layout.data_parallel_size,
        "sharded": sharded,
        "frozen": [name for name in engine.names if name not in engine.trained],
        "frozen_from": frozen_from,
        "config": config_dict(config),
    }


def _entry(path: Path) -> dict:
    size, sha256 = files.digest(path)
    return {"bytes": size, "sha256": sha256}


def _random_state() -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {"torch": torch.get_rng_state()}
    tensors |= {f"tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
    return tensors, {"python": json.dumps([version, words, gauss]), "numpy": json.dumps([kind, *rest])}


def _set_random_state(tensors: dict[str, Tensor], text: dict[str, str]) -> None:
    torch.set_rng_state(tensors["torch"])
    trackers = {key.removeprefix("tracker/"): value for key, value in tensors.items() if key.startswith("tracker/")}
    get_cuda_rng_tracker().set_states(trackers)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, words, gauss = parse_record(text["python"], list[Any])
    random.setstate((version, tuple(words), gauss))
    kind, *rest = parse_record(text["numpy"], list[Any])
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))


class _agreement:
    """Runs a block that may fail on some ranks, so that all learn of it instead of waiting for each other."""

    def __init__(self, layout: ParallelLayout, attempt: Attempt | None = None):
        self._layout = layout
        self._attempt = attempt
        self._error: str | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, Exception):
            return False
        self._error = str(error) if isinstance(error, (CheckpointError, ConfigError)) else f"{kind.__name__}: {error}"
        return True

    def check(self, what: str) -> None:
        failures: list[tuple[str | None, bool]] = [(None, False)] * self._layout.world_size
        dist.all_gather_object(failures, (self._error, self._error is not None and self._is_stale()))
        if any(stale for _, stale in failures):
            raise StaleAttempt(f"attempt {self._attempt.number} ends: a newer attempt has taken over this run")
        failed = [(rank, error) for rank, (error, _) in enumerate(failures) if error is not None]
        if failed:
            rank, error = failed[0]
            where = f" (rank {rank})" if self._layout.world_size > 1 else ""
            raise CheckpointError(f"{what}{where}: {error}")

    def _is_stale(self) -> bool:
        try:
            return self._attempt is not None and not self._attempt.is_owner()
        except OSError:  # a failing disk answers nothing
            return False
