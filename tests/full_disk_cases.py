"""Saves while the disk of one of two ranks is full, and resuming; see
parallel/test_two_processes.py.
"""

import errno
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bad_step_cases import batches, engine, weights
from configurations import make

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint import opening, reading
from megatron_tape.checkpoint.index import shard_of
from megatron_tape.checkpoint.opening import open_to_resume
from megatron_tape.checkpoint.reading import Checkpoint
from megatron_tape.checkpoint.restoring import load_training_state, load_weights
from megatron_tape.checkpoint.writing import Save, Writer
from megatron_tape.errors import CheckpointError
from megatron_tape.run.attempts import Attempt


def resumed(e, config):
    """Load the newest checkpoint into an engine that has continued training.

    Returns whether its state is the saved one again, the tensor files that each rank has opened,
    and those that it should have opened according to the plan.
    """
    opened = set()

    def watch(event, arguments):
        if event == "open" and shard_of(Path(str(arguments[0])).name) is not None:
            opened.add(Path(arguments[0]).name)

    saved = weights(e)
    e.train_step(batches(e, 7), 1e-2)
    changed = weights(e)
    sys.addaudithook(watch)
    checkpoint = open_to_resume(config, e.layout)
    load_weights(checkpoint, e.module, e.layout)
    load_training_state(checkpoint, e)
    state = weights(e)
    plan = checkpoint.readers(e.layout)
    planned = [name for name in plan if plan[name] == e.layout.rank and shard_of(name) is not None]
    return {
        "same": all(torch.equal(saved[key], state[key]) for key in saved),
        "changed": not any(torch.equal(saved[key], changed[key]) for key in saved),
        "opened": of_both_ranks(sorted(opened)),
        "planned": of_both_ranks(sorted(planned)),
    }


def refusal(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "no error"


def of_both_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def unreadable(e, config, newest):
    """Return each rank's errors if rank 1 does not see the checkpoint or one of its files, and if
    it cannot read a file again after it was checked.
    """

    def fail(checkpoint, file, place):
        raise OSError(errno.EIO, "Input/output error")

    def missing(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    messages = []
    for replaced in ((Path, "is_dir", lambda path: False), (reading, "digest", missing)):
        with pytest.MonkeyPatch.context() as patch:
            if e.layout.rank == 1:
                patch.setattr(*replaced)
            messages.append(refusal(lambda: opening._open(newest, e.layout)))
    checkpoint = open_to_resume(config, e.layout)
    if e.layout.rank == 1:
        Checkpoint.read = fail
    messages.append(refusal(lambda: load_weights(checkpoint, e.module, e.layout)))
    return of_both_ranks(messages)


def owned_states(stage):
    """Return whether both ranks get only the tensors that they own."""
    e = engine(1, stage, "fp32")
    e.train_step(batches(e, 1), 1e-2)
    owners = {key: number % 2 for number, key in enumerate(e.state_sizes())}
    state = e.training_state(owners.__getitem__)
    own = {key for key, owner in owners.items() if owner == e.layout.replica_rank}
    return all(of_both_ranks(state.keys() == own))


def main(folder):
    states = {stage: owned_states(stage) for stage in (1, 2, 3)}
    e = engine(1, 1, "fp32")
    root = Path(folder) / "checkpoints"
    places = {"checkpoint__directory": str(root), "checkpoint__keep": 2, "checkpoint__writers": 2}
    config = make(e.module.encoding.model, **places)
    if dist.get_rank() == 0:
        Attempt.claim(folder, root, {})
    dist.barrier()
    attempt = Attempt.open(folder, root, 1)
    e.train_step(batches(e, 0), 1e-2)
    writer = Writer(e, config, attempt)
    writer.save(1, 4, {})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    message = refusal(lambda: writer.save(2, 4, {}))
    in_background = Save(writer, 2, 4, {}, in_thread=True)
    e.train_step(batches(e, 1), 1e-2)
    messages = [message, refusal(in_background.advance)]
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    results = {
        "messages": sum(of_both_ranks(messages), []),
        "unfinished": [path.name for path in attempt.staging.iterdir()],
        "after_failure": checkpoint_files.newest_complete(root, print).name,
    }
    dist.barrier()
    writer.save(3, 4, {})
    dist.barrier()
    results |= {
        "after_retry": checkpoint_files.newest_complete(root, print).name,
        "left": sorted(path.name for path in root.iterdir()),
        "resumed": resumed(e, config),
        "unreadable": unreadable(e, config, root / "step-00000003"),
        "states": states,
    }
    return results
