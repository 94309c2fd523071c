"""Train one model: `python -m pretrain.train --config RECIPE`, or under `torchrun --nproc-per-node
N -m`.
"""

import contextlib
import logging
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING

from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import describe_fatal_error, exit_on_user_error, print_error
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import (
    EXIT_DIVERGED,
    EXIT_REFUSED,
    EXIT_RESTART,
    ConfigError,
    Diverged,
    NodeError,
    StaleAttempt,
    TrainingStopped,
    UserError,
)
from megatron_tape.home import private_directory, provide_caches
from megatron_tape.parallel.launcher import check_launcher_environment, local_rank, rank_and_size
from megatron_tape.run.attempts import FAILED, FINISHED, INTERRUPTED, REFUSED, STALE, Attempt
from megatron_tape.run.watch import CTRL_C, EXIT_STALE, Watch
from megatron_tape.text import LOG_TIME

if TYPE_CHECKING:
    from megatron_tape.training.model_building import ParameterFilter

logger = logging.getLogger("pretrain")

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C. It tells a script not to start the run again, unlike EXIT_RESTART."""


def main(argv: list[str] | None = None, trains: "ParameterFilter | None" = None) -> int:
    """Train a model and return the exit status, without a traceback for errors that users cause.

    Invalid arguments are reported before torch is imported. `trains` selects the parameters to
    train (default: all); see `training.trainer.Trainer`.
    """
    with exit_on_user_error():
        config = parse_run_config(argv)
    return run_attempt(config, extends=False, trains=trains)


def run_attempt(config: RunConfig, extends: bool, trains: "ParameterFilter | None" = None) -> int:
    """Validate the settings, train, record how the attempt ended, and return the exit status.

    `extends` is true for pretrain.extend_context. `trains` selects the parameters to train; None
    selects all. Raises errors that are bugs, after they are recorded.
    """
    with exit_on_user_error():
        check_launcher_environment()
    with contextlib.closing(Watch(config.train.hang_timeout)) as watch:
        with exit_on_user_error():
            rank, size = rank_and_size()
            attempt = Attempt.launched(config.logging.directory, config.checkpoint.directory)
        if attempt is not None:
            watch.attach(attempt, rank)
        try:
            status = _check(config, watch, extends, rank, size)
            if status is not None:
                return status
            reason = _train(config, watch, extends, trains, rank)
        except KeyboardInterrupt:
            watch.record_end(INTERRUPTED, CTRL_C)
            _say(
                rank,
                "interrupted; the same command continues from the last checkpoint, if there is one",
            )
            _abort_process_groups()
            return EXIT_INTERRUPTED
        except Exception as error:
            status = _record_failure(error, watch, rank)
            _abort_process_groups()
            if status is None:
                raise
            return status

        if reason is None:
            if rank == 0:
                watch.record_end(FINISHED, f"finished all {config.train.steps} steps")
            return 0
        # A signal has stopped the run. Its end is already recorded.
        _say(rank, f"{reason}; run the same command to continue")
        if watch.stop == CTRL_C:
            return EXIT_INTERRUPTED
        return EXIT_RESTART


def _check(config: RunConfig, watch: Watch, extends: bool, rank: int, size: int) -> int | None:
    """Check the run and report why it cannot start; return the exit status then, otherwise None.

    `size` is the number of ranks.
    """
    try:
        level = Level.SETTINGS
        if rank == 0:
            level = Level.START
        elif local_rank() == 0:  # one rank per node checks the node's files
            level = Level.FILES
        check(config, level, processes=size, extends=extends)
    except UserError as error:
        print_error(error)
        if rank == 0:
            watch.record_end(REFUSED, str(error))
        return EXIT_REFUSED
    except (OSError, MemoryError) as error:
        message = describe_fatal_error(error) or f"an input file cannot be read: {error}"
        # Every rank records this, since the file may be readable on the other nodes.
        watch.record_end(FAILED, message)
        print(f"error (rank {rank}): {message}", file=sys.stderr)
        return 1
    return None


def _train(
    config: RunConfig, watch: Watch, extends: bool, trains: "ParameterFilter | None", rank: int
) -> str | None:
    """Train; return why the run stopped before its end, or None if it is finished."""
    load_libraries(config, is_rank_0=rank == 0)
    from megatron_tape.evaluation.training_model import task_hooks
    from megatron_tape.parallel.layout import deterministic_kernels
    from megatron_tape.training.trainer import Trainer

    if watch.stop == signal.SIGTERM.name:
        # If rank 0 refuses a run and exits, torchrun sends SIGTERM to the other ranks. `Trainer`
        # would wait for rank 0.
        reason = f"{watch.stop} stopped the run before it began"
        if rank == 0:
            watch.record_end(INTERRUPTED, reason)
        return reason
    find_base = None
    if extends:
        from megatron_tape.extension.importing import base_of_run

        find_base = base_of_run
    with deterministic_kernels(config.train.deterministic):
        return Trainer(config, watch, trains, find_base, task_hooks).run()


def _record_failure(error: Exception, watch: Watch, rank: int) -> int | None:
    """Record an error that ended the training; return the exit status.

    An expected error is also printed in one sentence. For others, which are bugs, returns None.
    """
    # FAILED lets a Slurm job try again: a file that cannot be read here may be readable on another
    # node.
    outcome = FAILED
    status = 1
    if isinstance(error, StaleAttempt):
        outcome = STALE
        status = EXIT_STALE
    elif isinstance(error, ConfigError):
        outcome = REFUSED
        status = EXIT_REFUSED
    elif isinstance(error, TrainingStopped):
        outcome = REFUSED
        if isinstance(error, Diverged):
            status = EXIT_DIVERGED

    bad_nodes = error.subjects if isinstance(error, NodeError) else ()
    # Recorded first, since aborting the process groups makes the other ranks fail, too.
    if isinstance(error, (TrainingStopped, UserError, StaleAttempt)):
        sentence: str | None = str(error)
        watch.record_end(outcome, sentence, bad_nodes=bad_nodes)
    else:
        sentence = describe_fatal_error(error)
        watch.record_end(outcome, sentence or f"{type(error).__name__}: {error}", error)
    if sentence is None:
        return None
    origin = "error" if rank == 0 else f"error (rank {rank})"
    print(f"{origin}: {sentence}", file=sys.stderr, flush=True)
    return status


def _say(rank: int, message: str) -> None:
    """Print a message on rank 0."""
    if rank == 0:
        with contextlib.suppress(OSError):  # nothing may read stderr any more
            print(message, file=sys.stderr, flush=True)


def _abort_process_groups() -> None:
    """Abort torch's process groups, if they exist, so that this rank does not wait for the others
    when it exits.
    """
    # Process groups exist only if this module was imported, which would take seconds.
    layout = sys.modules.get("megatron_tape.parallel.layout")
    if layout is not None:
        layout.abort_process_groups()


def load_libraries(config: RunConfig, is_rank_0: bool) -> None:
    """Set the environment variables and log levels of the libraries, and import torch."""
    level = logging.INFO if is_rank_0 else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt=LOG_TIME, force=True)
    # The libraries log what users need not know.
    for noisy in ("DeepSpeed", "megatron", "torch", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Megatron warns that Transformer Engine and Apex are missing.
    warnings.filterwarnings("ignore", module="megatron")
    # DeepSpeed makes deprecated calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

    provide_caches()
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also DeepSpeed must not use a GPU
    # A directory on a local disk. By default, hundreds of nodes would write compiled kernels to a
    # shared home directory.
    defaults = {"TRITON_CACHE_DIR": private_directory(f"triton-cache-{os.getuid()}")}
    if config.parallel.uses_sequence_parallel:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron needs it to overlap collectives
    # The user may have set one of these variables by its older name, which also works.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Avoids out-of-memory errors by fragmentation.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        # Number of collectives in torch's flight recorder, which `Watch` writes to a file if a rank
        # hangs.
        defaults["TORCH_FR_BUFFER_SIZE"] = "2000"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logger.info("loading torch, megatron-core and deepspeed")
    import torch

    if not torch.cuda.is_available():
        # Without this variable, DeepSpeed warns that it found no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


if __name__ == "__main__":
    sys.exit(main())
