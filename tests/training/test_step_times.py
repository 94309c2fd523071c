"""Tests of seconds by phase, with clocks that only the tests move."""

import torch

from megatron_tape.training.step_clock import StepClock


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

    received = []
    try:
        for item in clock.each("data", items()):
            received.append(item)
            move(10)
    except ValueError:
        move(100)
    assert received == [0, 1, 2] and clock.read() == {"data": 3.0}


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
