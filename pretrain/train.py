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
    EXIT_REFUSED,
    EXIT_RESTART,
    ConfigError,
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
    """Train a model and return the exit status. Invalid arguments are reported before torch is
    imported.

    `trains` selects the parameters to train (default: all); see `training.trainer.Trainer`.
    """
    with exit_on_user_error():
        config = parse_run_config(argv)
    return supervised(config, extends=False, trains=trains)


def supervised(config: RunConfig, extends: bool, trains: "ParameterFilter | None" = None) -> int:
    """Validate the settings, train, record how the attempt ended, and return the exit status.

    `extends` is true for pretrain.extend_context (see `checks.check`).
    """
    with exit_on_user_error():
        check_launcher_environment()
    with contextlib.closing(Watch(config.train.hang_timeout)) as watch:
        return _supervised(config, watch, extends, trains)


def _supervised(
    config: RunConfig, watch: Watch, extends: bool, trains: "ParameterFilter | None"
) -> int:
    rank, size = rank_and_size()
    is_rank_0 = rank == 0
    with exit_on_user_error():
        attempt = Attempt.launched(config.logging.directory, config.checkpoint.directory)
    if attempt is not None:
        watch.attach(attempt, rank)
    try:
        try:
            first_of_node = local_rank() == 0  # one rank per node checks the node's files
            if is_rank_0:
                level = Level.START
            elif first_of_node:
                level = Level.FILES
            else:
                level = Level.SETTINGS
            check(config, level, size, extends)
        except UserError as error:
            print_error(error)
            if is_rank_0:
                watch.record_end(REFUSED, str(error))
            return EXIT_REFUSED
        except (OSError, MemoryError) as error:
            message = describe_fatal_error(error)
            if message is None and isinstance(error, OSError):
                message = (
                    f"an input file cannot be read: {error.strerror or error} ({error.filename})"
                )
            watch.record_end(FAILED, message)
            print(f"error (rank {rank}): {message}", file=sys.stderr)
            return 1
        load_libraries(config, is_rank_0)
        from megatron_tape.evaluation.training_model import task_hooks
        from megatron_tape.parallel.layout import deterministic_kernels
        from megatron_tape.training.trainer import Trainer

        find_base = None
        if extends:
            from megatron_tape.extension.importing import base_of_run as find_base
        if watch.stop == signal.SIGTERM.name:
            # torchrun stops the other ranks so when rank 0 refuses a run. `Trainer` would wait for
            # rank 0.
            reason = f"{watch.stop} stopped the run before it began"
            if is_rank_0:
                watch.record_end(INTERRUPTED, reason)
        else:
            with deterministic_kernels(config.train.deterministic):
                reason = Trainer(config, watch, trains, find_base, task_hooks).run()
    except KeyboardInterrupt:
        watch.record_end(INTERRUPTED, CTRL_C)
        if is_rank_0:
            message = (
                "interrupted; the same command continues from the last checkpoint, if there is one"
            )
            with contextlib.suppress(OSError):
                print(message, file=sys.stderr, flush=True)
        _abort_process_groups()
        return EXIT_INTERRUPTED
    except Exception as error:
        # FAILED lets a Slurm job try again: a file that cannot be read here may be readable on
        # another node.
        if isinstance(error, (TrainingStopped, ConfigError)):
            outcome = REFUSED
        else:
            outcome = FAILED
        outcome = STALE if isinstance(error, StaleAttempt) else outcome
        foreseen = isinstance(error, (TrainingStopped, UserError, StaleAttempt))
        sentence = str(error) if foreseen else describe_fatal_error(error)
        message = sentence or f"{type(error).__name__}: {error}"
        # Recorded first, since aborting the process groups makes the other ranks fail, too.
        bad_nodes = error.subjects if isinstance(error, NodeError) else ()
        watch.record_end(outcome, message, None if foreseen else error, bad_nodes)
        _abort_process_groups()
        if sentence is None:
            raise
        print(
            f"error{'' if is_rank_0 else f' (rank {rank})'}: {message}", file=sys.stderr, flush=True
        )
        if isinstance(error, StaleAttempt):
            return EXIT_STALE
        if isinstance(error, ConfigError):
            return EXIT_REFUSED
        return 1
    if reason is None:
        if is_rank_0:
            watch.record_end(FINISHED, f"finished all {config.train.steps} steps")
        return 0
    if is_rank_0:
        with contextlib.suppress(OSError):  # nothing may read stderr any more
            print(f"{reason}; run the same command to continue", file=sys.stderr, flush=True)
    if watch.stop == CTRL_C:
        return EXIT_INTERRUPTED
    return EXIT_RESTART


def _abort_process_groups() -> None:
    """Abort torch's process groups, if they exist, so that this rank does not wait for the others
    when it exits.
    """
    if layout := sys.modules.get("megatron_tape.parallel.layout"):
        layout.abort_process_groups()


def load_libraries(config: RunConfig, is_rank_0: bool) -> None:
    """Set the environment variables and log levels of the libraries, and import torch."""
    level = logging.INFO if is_rank_0 else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt=LOG_TIME, force=True)
    for noisy in ("DeepSpeed", "megatron", "torch", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.filterwarnings(
        "ignore", module="megatron"
    )  # it warns that Transformer Engine and Apex are missing
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # deprecated calls in DeepSpeed
    # On a local disk: otherwise hundreds of nodes would write compiled kernels to a shared home
    # directory.
    os.environ.setdefault("TRITON_CACHE_DIR", private_directory(f"triton-cache-{os.getuid()}"))
    provide_caches()
    if config.parallel.uses_sequence_parallel:
        os.environ.setdefault(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1"
        )  # Megatron needs it to overlap collectives
    # Avoids out-of-memory errors by fragmentation.
    _set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True", older="PYTORCH_CUDA_ALLOC_CONF")
    # Number of collectives in torch's flight recorder, which `Watch` writes to a file if a rank
    # hangs.
    _set_default("TORCH_FR_BUFFER_SIZE", "2000", older="TORCH_NCCL_TRACE_BUFFER_SIZE")
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logger.info("loading torch, megatron-core and deepspeed")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # otherwise DeepSpeed warns that it found no accelerator


def _set_default(name: str, value: str, older: str) -> None:
    """Set an environment variable of torch >= 2.9, unless the user has set it or its `older`
    name.
    """
    if older not in os.environ:
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())
