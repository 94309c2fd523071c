import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_tape.parallel import cpu


def test_it_changes_nothing_where_cuda_exists(monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.cuda.current_device, random._get_cuda_rng_state, random._CUDA_RNG_STATE_TRACKER)
    cpu.prepare_cpu()
    assert (torch.cuda.current_device, random._get_cuda_rng_state, random._CUDA_RNG_STATE_TRACKER) == before


def test_random_streams_continue_and_do_not_change_the_outer_stream():
    cpu.prepare_cpu()
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(0)
    expected_outside = torch.rand(2)
    torch.manual_seed(0)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("b"):
        other = torch.rand(3)
    with tracker.fork("a"):
        second = torch.rand(3)
    assert torch.equal(torch.rand(2), expected_outside)
    assert torch.equal(torch.cat([first, second]), torch.rand(6, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(first, other)
    with pytest.raises(KeyError, match="'c'"), tracker.fork("c"):
        pass
