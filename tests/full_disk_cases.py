"""A save during which the disk of one of two ranks is full; see test_checkpoint.py."""

import resource
import signal
from pathlib import Path

import torch.distributed as dist
from bad_step_cases import batches, engine

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint.state import save_checkpoint
from megatron_tape.config.schema import (
    CheckpointConfig,
    DataConfig,
    RunConfig,
    TrainConfig,
)
from megatron_tape.errors import CheckpointError
from megatron_tape.run.attempts import Attempt


def main(folder):
    e = engine(1, 1, "fp32")
    root = Path(folder) / "checkpoints"
    config = RunConfig(
        model=e.module.encoding.model,
        data=DataConfig(prefix="unused"),
        train=TrainConfig(steps=9, global_batch_size=4),
        checkpoint=CheckpointConfig(directory=str(root), keep=2),
    )
    if dist.get_rank() == 0:
        Attempt.claim(folder, root, {})
    dist.barrier()
    attempt = Attempt.open(folder, root, 1)
    e.train_step(batches(e, 0), 1e-2)
    save_checkpoint(e, config, 1, {}, attempt)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    message = "no error"
    try:
        save_checkpoint(e, config, 2, {}, attempt)
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    messages = [None, None]
    dist.all_gather_object(messages, message)
    after_failure_home = list(attempt.home.iterdir()) if dist.get_rank() == 0 else []
    after_failure = checkpoint_files.newest_whole(root, print).name
    dist.barrier()
    save_checkpoint(e, config, 3, {}, attempt)
    return {
        "messages": messages,
        "after_failure": after_failure,
        "unfinished": [path.name for path in after_failure_home],
        "after_retry": checkpoint_files.newest_whole(root, print).name,
        "left": sorted(path.name for path in root.iterdir()),
    }
