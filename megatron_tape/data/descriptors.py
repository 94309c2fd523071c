"""Limits of open files: every mapped file takes a file descriptor, and blends map many files.

Imports no torch.
"""

import contextlib
import resource
import sys
from pathlib import Path

from megatron_tape.config.schema import SAMPLE_SOURCES, RunConfig, blend, split_shares
from megatron_tape.config.stages import Stage, prefixes_of, stages_of
from megatron_tape.errors import refuse
from megatron_tape.text import counted

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_OF_EACH_DATASET = 2
"""An indexed dataset's two files, which all splits and stages share."""
_OF_EACH_INDEX = 3
"""The arrays in which Megatron's GPTDataset shuffles a split of a dataset, or a DocumentWindows its windows."""
_OF_EACH_BLEND = 2
_OTHERS = 256
"""What a run's libraries, GPUs, connections and logs take."""
_OF_EACH_WORKER = 16
"""Pipes to a loader process, and the batches on their way from it."""
_OTHER_MAPS = 8192
"""What libraries map, those of CUDA included."""


def check_descriptors(config: RunConfig) -> None:
    """Raise the limit of open files for this process and its children; ConfigError if the run needs more.

    Every process that opens the data calls this, since limits may differ between nodes.
    """
    stages = _stages(config)
    keys = ("data.prefix", "data.stages") if len(stages) > 1 else ("data.prefix",)
    count, needed = len(prefixes_of(stages)), files_to_map(config)
    others = _OTHERS + _OF_EACH_WORKER * config.data.num_workers
    if not count:
        fix = "set fewer data.num_workers"
        return refuse_more_files("data.num_workers", f"is {config.data.num_workers}", 0, fix, others)
    named = f"{'and data.stages name' if len(stages) > 1 else 'names'} {counted(count, 'dataset')}"
    fix = "merge datasets with tools/merge_datasets.py"
    refuse_more_files(keys, named, needed, fix, others)
    with contextlib.suppress(OSError):
        limit = int(MAX_MAP_COUNT.read_text())
        problem = f"{named} with {needed:,} files to map, but vm.max_map_count is {limit:,}"
        refuse(needed + _OTHER_MAPS > limit, keys, problem, f"raise it with sysctl, or {fix}")


def files_to_map(config: RunConfig) -> int:
    """Return how many files of its data and their index a run maps in one process at most, which is rank 0."""
    stages, needed = _stages(config), 0
    long = config.data.long_documents is not None
    for stage in stages:
        members = blend(stage.config.data.prefix)[0]
        validates = config.train.validates and stage.number == 0 and split_shares(config.data.split)[1] > 0
        # Long documents and the others are blends of their own, and rank 0 reads all lengths to describe them.
        needed += (1 + long + validates) * (_OF_EACH_INDEX * len(members) + _OF_EACH_BLEND)
        needed += long * (len(members) + _OF_EACH_BLEND)
    return needed + _OF_EACH_DATASET * len(prefixes_of(stages))


def _stages(config: RunConfig) -> list[Stage]:
    return [] if config.data.source in SAMPLE_SOURCES else stages_of(config)


def refuse_more_files(subject: str | tuple[str, ...], named: str, files: int, fix: str, others: int = 32) -> None:
    """Raise the limit of open files as far as the system allows; ConfigError if it is less than `files` and `others`.

    The sentence begins with the subject and what it `named`.
    """
    allowed, needed = _raise_limit(), files + others
    problem = f"{named}, for which a process needs {needed:,} file descriptors, but only {allowed:,} are allowed"
    refuse(needed > allowed, subject, problem, f"raise the hard limit (ulimit -Hn; slurmd's LimitNOFILE), or {fix}")


def _raise_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
