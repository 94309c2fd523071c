"""What the training and validation data are drawn from: decided by rank 0, which reads whole indices for it."""

import logging
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_tape.config.schema import RunConfig, blend
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths
from megatron_tape.data.long_documents import Pools, find_pools
from megatron_tape.errors import ConfigError

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Prefixes of datasets and, if there are several, how they are weighted."""


@dataclass(frozen=True)
class Plan:
    """What every rank draws its samples from."""

    identity: dict[str, list[int]]
    """Size and modification time (ns) of each file of the datasets, as rank 0 sees them."""
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
        weights = [float(lengths_of(prefix).sum(dtype=np.int64)) for prefix in prefixes]
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(config.data.split))
    splits: list[Blend | None] = []
    for i, name in enumerate(("training", "validation") if evaluates else ("training",)):
        if name == "training" and config.data.long_documents is not None:
            splits.append(None)
        else:
            splits.append(_large_enough(name, prefixes, weights, bounds[i], config))
    pools = None if config.data.long_documents is None else find_pools(config)
    return Plan(_identify(prefixes), (prefixes, weights), splits, pools)


def lengths_of(prefix: str) -> np.ndarray:
    """Return the lengths (int32) in tokens of a dataset's documents; reads its whole index."""
    return IndexedDatasetReader(prefix).lengths


def _identify(prefixes: list[str]) -> dict[str, list[int]]:
    status = {str(path): path.stat() for prefix in prefixes for path in dataset_paths(prefix)}
    return {path: [found.st_size, found.st_mtime_ns] for path, found in status.items()}


def _large_enough(
    name: str, prefixes: list[str], weights: list[float] | None, bounds: tuple[float, float] | None, config: RunConfig
) -> Blend:
    """Leave out the datasets whose share of a split is less than one sequence, with a warning for each.

    `bounds` are the split's first and last document as shares of all. Raises ConfigError when no dataset is left.
    """
    kept = []
    for index, prefix in enumerate(prefixes):
        lengths = lengths_of(prefix)
        first, last = (round(bound * len(lengths)) for bound in bounds or (0, 0))
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        if tokens > config.model.seq_length:
            kept.append(index)
            continue
        problem = (
            f"is {config.data.split}, whose {name} share gives {tokens:,} tokens of {prefix}, less than one sequence "
            f"of model.seq_length {config.model.seq_length}"
        )
        logger.warning("warning: data.split %s; it is left out of the %s data", problem, name)
    if not kept:
        alone = "" if len(prefixes) == 1 else f", and no other of the {len(prefixes)} datasets gives more"
        key = ("data.split", "data.prefix", "model.seq_length")
        raise ConfigError(key, f"{problem}{alone}", "raise the share, or use more data")
    return [prefixes[i] for i in kept], None if weights is None else [weights[i] for i in kept]
