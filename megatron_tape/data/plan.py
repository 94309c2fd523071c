"""What the training and validation data are drawn from: decided by rank 0, which reads whole indices for it."""

import logging
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths
from megatron_tape.data.inputs import large_enough
from megatron_tape.data.long_documents import Pools, find_pools
from megatron_tape.errors import ConfigError

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Prefixes of datasets and, if there are several, how they are weighted."""


@dataclass(frozen=True)
class Plan:
    """What every rank draws its samples from."""

    identity: dict[str, list[int]]
    """Size and modification time (ns) of each file of the datasets, as rank 0 sees them: new data has a new index."""
    whole: Blend
    splits: list[Blend | None]
    """The blend of each split that is needed, the training data first; None if `pools` take its place."""
    pools: Pools | None
    """Where training documents are drawn from with `data.long_documents`."""


def plan_for_all(config: RunConfig, evaluates: bool) -> Plan:
    """Return rank 0's plan on every rank; all call it together, if there are several. Only rank 0 reads the indices.

    A dataset of a blend that is too small for a split is left out of it, with a warning. Raises ConfigError, on all
    ranks, if a split that is needed does not contain a whole sequence, or a dataset cannot be read.
    """
    found: list[Plan | ConfigError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = _plan(config, evaluates)
        except ConfigError as error:
            found[0] = error
        except (OSError, ValueError) as error:
            found[0] = ConfigError(
                "data.prefix", f"names datasets that cannot be read any more ({error})", "check their files"
            )
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


def _plan(config: RunConfig, evaluates: bool) -> Plan:
    prefixes, weights = blend(config.data.prefix)
    if weights is None and len(prefixes) > 1:
        # Without weights, Megatron would stop after one pass over the list.
        weights = [float(IndexedDatasetReader(prefix).lengths.sum(dtype=np.int64)) for prefix in prefixes]
    splits: list[Blend | None] = []
    for name in ("training", "validation") if evaluates else ("training",):
        if name == "training" and config.data.long_documents is not None:
            splits.append(None)
        else:
            kept, problems = large_enough(config, name)
            for problem in problems:
                logger.warning("warning: data.split %s; it is left out of the %s data", problem, name)
            splits.append(([prefixes[i] for i in kept], None if weights is None else [weights[i] for i in kept]))
    pools = None if config.data.long_documents is None else find_pools(config)
    return Plan(_identify(prefixes), (prefixes, weights), splits, pools)


def _identify(prefixes: list[str]) -> dict[str, list[int]]:
    status = {str(path): path.stat() for prefix in prefixes for path in dataset_paths(prefix)}
    return {path: [found.st_size, found.st_mtime_ns] for path, found in status.items()}
