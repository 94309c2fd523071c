"""The limit of open files: every mapped file takes a file descriptor, and blends map many files.

Imports no torch.
"""

import contextlib
import resource
import sys

from megatron_tape.config.data import SAMPLE_SOURCES, blend
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import prefixes_of, stages_of
from megatron_tape.errors import refuse
from megatron_tape.text import counted

_OF_EACH_DATASET = 2
"""An indexed dataset's two files, which all splits and stages share."""
_OF_EACH_INDEX = 3
"""The arrays in which Megatron's GPTDataset shuffles a split of a dataset, or a DocumentWindows its windows."""
_OTHERS = 256
"""What a run's libraries, GPUs, connections and logs take."""


def check_descriptors(config: RunConfig) -> None:
    """Raise the limit of open files for this process and its children; ConfigError if the data may need more.

    Every process that opens the data calls this, since limits may differ between nodes.
    """
    allowed = raise_limit()
    if config.data.source in SAMPLE_SOURCES:
        return
    stages = stages_of(config)
    # The training data of each stage, the validation data, and the lengths of long documents and of the others.
    parts = 1 + (1 if config.data.long_documents is None else 3) * len(stages)
    members = max(len(blend(stage.config.data.prefix)[0]) for stage in stages)
    count = len(prefixes_of(stages))
    keys = ("data.prefix", "data.stages") if len(stages) > 1 else ("data.prefix",)
    named = f"{'and data.stages name' if len(stages) > 1 else 'names'} {counted(count, 'dataset')}"
    needed = _OF_EACH_DATASET * count + _OF_EACH_INDEX * parts * members + _OTHERS
    problem = f"{named}, for which a process needs {needed:,} file descriptors, but only {allowed:,} are allowed"
    fix = "raise the hard limit (ulimit -Hn; slurmd's LimitNOFILE), or merge datasets with tools/merge_datasets.py"
    refuse(needed > allowed, keys, problem, fix)


def raise_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
