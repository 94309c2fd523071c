"""Import the Hugging Face model that a run extends into the run's directory, on rank 0 while the
other ranks wait.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_tape.checkpoint.directories import read_state
from megatron_tape.checkpoint.locate import IMPORTED
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError, UserError
from megatron_tape.extension.base_model import KEY, Base, find_base
from megatron_tape.huggingface.imports.model_weights import open_model
from megatron_tape.huggingface.imports.new_checkpoint import find_tokenizer, write_imported
from megatron_tape.huggingface.imports.source_card import source_card
from megatron_tape.huggingface.imports.weight_files import LazyTensors
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.run.watch import Watch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two reports of rank 0 to the other ranks."""


def base_of_run(config: RunConfig, layout: ParallelLayout, watch: Watch) -> Path:
    """Return the checkpoint that a run starts from. All ranks must call this together.

    A Hugging Face model is imported to `base` in the run's directory, unless this was done before.
    A failed import leaves nothing there. Raises CheckpointError on every rank if the model cannot
    be used.
    """
    return import_on_rank_0(lambda advance: _import_if_needed(config, advance), layout, watch)


def _import_if_needed(config: RunConfig, advance: Callable[[], None]) -> Path:
    """Return the checkpoint that a run starts from. Import a Hugging Face model unless an earlier
    attempt has done so.

    `advance` is called before each tensor is read, so that the watchdog sees progress.
    """
    base = find_base(config.extension.from_)
    if base.state is not None:  # a checkpoint, which needs no import
        return base.path
    target = Path(config.logging.directory) / IMPORTED
    if target.exists():  # an earlier attempt has imported the model
        _check_imported(target, base, config)
        logger.info("starting from %s, which was imported from %s before", target, base.path)
        return target

    logger.info("importing %s to %s", base.path, target)
    # The run's vocabulary may be padded for its tensor-parallel size.
    model = dataclasses.replace(base.model, vocab_size=config.model.vocab_size)
    weights = open_model(base.path, model)

    def read_weight(name: str) -> Tensor:
        advance()
        return weights[name]

    write_imported(
        target,
        model,
        LazyTensors(weights, read_weight, weights.shapes),
        f"the model {base.path.resolve().name}",
        find_tokenizer(base.path, model.unpadded_vocab_size),
        identity=base.identity,
        card=source_card(base.path),
    )
    return target


def _check_imported(target: Path, base: Base, config: RunConfig) -> None:
    """Raise CheckpointError if `target` was imported from other files than `base` has now, or with
    another vocabulary size than the run's.
    """
    fix = f"move {target} away to import the model again, or {config.to_start_another_run}"
    state = read_state(target)
    if state["progress"].get("identity") != base.identity:
        raise CheckpointError(
            target, f"was not imported from the files that {base.path} has now", fix
        )
    imported_size = state["config"]["model"].get("vocab_size")
    if imported_size != config.model.vocab_size:
        raise CheckpointError(
            target,
            f"was imported with model.vocab_size {imported_size}, but the run has"
            f" {config.model.vocab_size}",
            f"set the run's model.vocab_size back, or {fix}",
        )


def import_on_rank_0(
    work: Callable[[Callable[[], None]], Path], layout: ParallelLayout, watch: Watch
) -> Path:
    """Run `work` on rank 0, and return its result or raise its error on every rank.

    `work` receives a function that it must call for each tensor, so that the watchdog does not
    mistake a long import for a hang. All errors become CheckpointError. All ranks call this
    together.
    """
    # How many tensors `work` has read, and its result or error once it has ended.
    status: dict = {"tensors": 0, "path": None, "error": None}

    def advance() -> None:
        status["tensors"] += 1

    def run_work() -> None:
        try:
            status["path"] = work(advance)
        except UserError as error:
            status["error"] = CheckpointError(error.subjects, error.problem, error.fix)
        except Exception as error:  # an error that is not stored is lost with the thread
            status["error"] = CheckpointError(
                KEY, f"cannot be imported: {type(error).__name__}: {error}"
            )

    # Rank 0 works in a thread, so that it can tell the others about its progress meanwhile.
    thread = threading.Thread(target=run_work, name="import", daemon=True)
    if layout.rank == 0:
        thread.start()
    reported_tensors = -1  # below 0, so that the first round reports progress
    while True:
        if layout.rank == 0:
            thread.join(POLL_SECONDS)

        # The other ranks wait here for rank 0. It sends a copy of `status`, which its thread may
        # change at the same time.
        shared = [dict(status)]
        dist.broadcast_object_list(shared, src=0)
        current = shared[0]
        if current["error"] is not None:
            raise current["error"]
        if current["path"] is not None:
            return current["path"]
        # Report to the watchdog only if a tensor has been read since the last report. If none is
        # read, the watchdog may end the process.
        if current["tensors"] > reported_tensors:
            reported_tensors = current["tensors"]
            watch.progress("importing the model to extend")
