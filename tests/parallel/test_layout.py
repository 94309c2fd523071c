"""Process groups: how many there are, how long they wait, how they are aborted; deterministic kernels."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_tape.parallel.layout import abort_process_groups, deterministic_kernels, initialize_distributed


def timeouts():
    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return {backend.options._timeout for backend in backends}


@pytest.fixture(autouse=True)
def afresh():
    abort_process_groups()
    yield
    abort_process_groups()


def test_every_group_even_a_kept_one_waits_longer_than_the_watch():
    initialize_distributed(timeout=100.0)
    assert timeouts() == {timedelta(seconds=700)}
    initialize_distributed(timeout=7200.0)
    assert timeouts() == {timedelta(seconds=7800)}
    initialize_distributed(timeout=None)
    assert timeouts() == {timedelta(days=365)}


def test_no_additional_gloo_groups_are_made():
    initialize_distributed()
    names = [group.group_desc for group in distributed_c10d._world.pg_map]
    assert "TENSOR_MODEL_PARALLEL_GROUP" in names and not [name for name in names if "GLOO" in name]
    assert len(names) <= 18


def test_aborted_groups_are_made_anew():
    layout = initialize_distributed()
    abort_process_groups()
    assert not dist.is_initialized()
    abort_process_groups()
    again = initialize_distributed()
    assert again.any_rank(True) and again.groups.tp is not layout.groups.tp


def test_deterministic_kernels_leave_everything_as_it_was():
    def state():
        memory, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn
        flags = torch.are_deterministic_algorithms_enabled(), memory, cudnn.deterministic, cudnn.benchmark
        return *flags, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    before = state()
    with deterministic_kernels(False):
        assert state() == before
    with pytest.raises(ZeroDivisionError), deterministic_kernels(True):
        assert state() == (True, False, True, False, ":4096:8")
        raise ZeroDivisionError
    assert state() == before
