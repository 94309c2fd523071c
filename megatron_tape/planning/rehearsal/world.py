"""Fake ranks: this process becomes one of many, in a process group whose collectives return at once."""

import os

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_tape.planning.rehearsal.devices import install_fake_devices


def install_fake_world(world_size: int, rank: int) -> None:
    """Make this process, until it ends, rank `rank` of `world_size` with a fake GPU; raises `ConfigError`."""
    os.environ |= {"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    install_fake_devices()
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from megatron.core import parallel_state

    # These would exchange objects with other ranks.
    coordinator.assert_ints_same_as_other_ranks = lambda *_, **__: None
    dist.broadcast_object_list = lambda *_, **__: None
    dist.all_gather_object = _all_gather_own_object
    create_group = parallel_state.create_group
    parallel_state.create_group = lambda ranks=None, **others: create_group(ranks, **others | {"backend": "fake"})
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)


def _all_gather_own_object(gathered: list, own: object, group: dist.ProcessGroup | None = None) -> None:
    gathered[:] = [own] * len(gathered)
