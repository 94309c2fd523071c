"""Tests of seconds by phase, with clocks that only the tests move."""

from types import SimpleNamespace

import torch

from megatron_tape.training import step_times
from megatron_tape.training.step_clock import StepClock
from megatron_tape.training.step_times import StepTimes


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
    assert clock.take_seconds() == {"backward": 6.0, "communication": 20.0}
    with clock.waiting():
        move(1)
    assert clock.take_seconds() == {}, "waiting outside of a step is not counted"


def test_only_the_waiting_for_items_is_counted_and_an_error_ends_its_phase():
    clock, move = clock_and_move()

    def items():
        for item in range(3):
            move(1)
            yield item
        raise ValueError

    received = []
    try:
        for item in clock.each("data", items()):
            received.append(item)
            move(10)
    except ValueError:
        move(100)
    assert received == [0, 1, 2]
    assert clock.take_seconds() == {"data": 3.0}


def gathered(value):
    """Return the values of two ranks. The second takes three times as long."""
    if isinstance(value, str):
        return ["a", "b"]
    return [value, (3 * value[0], 0.5)]


def test_a_slow_rank_is_logged_in_each_row_and_warned_about_once(monkeypatch, caplog):
    layout = SimpleNamespace(
        device=torch.device("cpu"),
        world_size=2,
        rank=0,
        gather=gathered,
    )
    clock = SimpleNamespace(take_seconds=lambda: {"forward": 2.0})
    trainer = SimpleNamespace(
        layout=layout, engine=SimpleNamespace(clock=clock), logs=lambda step: True
    )
    monkeypatch.setattr(step_times, "CPU_RANKS", 2)
    hook = StepTimes()
    for step in range(25):
        result = hook.after_step(trainer, step, None)
    expected = {"forward": 2.0, "compute_median": 2.0, "compute_slowest": 6.0, "data_slowest": 0.5}
    assert result.scalars == {f"seconds/{name}": value for name, value in expected.items()}
    assert result.words == {"slowest_rank": "1 on b"}
    (record,) = caplog.records
    assert "rank 1 on b computes 3.00 times as long" in record.getMessage()
