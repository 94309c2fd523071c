"""Seconds by phase, counted with clocks that stand still unless a test moves them, and memory of the host."""

import mmap
import multiprocessing
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_tape.training import step_times
from megatron_tape.training.step_clock import StepClock
from megatron_tape.training.step_times import StepTimes, host_memory


def clock_and_move():
    moment = [0.0]

    def move(seconds):
        moment[0] += seconds

    return StepClock(torch.device("cpu"), lambda: moment[0]), move


def test_a_nested_phase_is_counted_once_and_what_is_outside_of_phases_is_not():
    clock, move = clock_and_move()
    for _ in range(2):
        with clock.phase("backward"):
            move(1)
            with clock.waiting():
                move(10)
            move(2)
        move(100)
    assert clock.read() == {"backward": 6.0, "communication": 20.0}
    assert clock.read() == {}


def test_waiting_outside_of_a_step_is_not_counted():
    clock, move = clock_and_move()
    with clock.waiting():
        move(1)
    assert clock.read() == {}


def test_only_the_waiting_for_items_is_counted_and_an_error_ends_its_phase():
    clock, move = clock_and_move()

    def items():
        for item in range(3):
            move(1)
            yield item
        raise ValueError

    found = []
    try:
        for item in clock.each("data", items()):
            found.append(item)
            move(10)
    except ValueError:
        move(100)
    assert found == [0, 1, 2] and clock.read() == {"data": 3.0}


def test_marks_are_added_up_before_they_are_too_many_but_never_within_a_phase():
    clock, move = clock_and_move()
    for _ in range(3):
        with clock.phase("forward"):
            move(1)
    with clock.phase("forward"):
        clock.add_up()
        assert len(clock._marks) == 7
        move(1)
    clock.add_up(9)
    assert len(clock._marks) == 8
    clock.add_up(8)
    assert clock._marks == [] and clock.read() == {"forward": 4.0}


MIB = 2**20


def test_host_memory_is_that_of_the_process_and_its_children_without_mapped_files(tmp_path):
    before = host_memory()
    with open(tmp_path / "file", "w+b") as file:
        for _ in range(64):  # in pieces, since an earlier test may have the process keep what it frees
            file.write(bytes(MIB))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert sum(mapped[:: mmap.PAGESIZE]) == 0  # reads every page
    assert host_memory() - before < 16 * MIB
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"x" * (64 * MIB))
    alone = host_memory()
    assert alone - before > 60 * MIB
    begun, done = (multiprocessing.get_context("fork").Event() for _ in range(2))
    child = multiprocessing.get_context("fork").Process(target=hold, args=(32 * MIB, begun, done))
    child.start()
    try:
        assert begun.wait(60)
        assert host_memory() - alone > 30 * MIB
    finally:
        done.set()
        child.join()
    assert host_memory() - alone < 16 * MIB


def hold(size, begun, done):
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"x" * size)
    begun.set()
    done.wait(60)


def test_the_memory_of_ranks_is_added_up_by_node():
    places = [("a", "a"), ("b", "b"), ("b", "b")]
    layout = SimpleNamespace(world_size=3, rank=0, device=torch.device("cpu"), gather=lambda own: places)
    trainer = SimpleNamespace(
        layout=layout,
        logs=lambda step: True,
        engine=SimpleNamespace(clock=clock_and_move()[0]),
        config=SimpleNamespace(train=SimpleNamespace(straggler_factor=None)),
    )
    ranks = torch.tensor([[0, 0, 3 * 2**30], [0, 0, 2 * 2**30], [0, 0, 2.5 * 2**30]], dtype=torch.float64)
    with mock.patch.object(step_times.dist, "all_gather_into_tensor", lambda out, own: out.copy_(ranks.view(-1))):
        found = StepTimes().after_step(trainer, 1, None)
    assert found.scalars["usage/host_memory_gib"] == pytest.approx(4.5)
