import math

import pytest

from megatron_tape.config.schema import OptimizerConfig, ScheduleConfig
from megatron_tape.config.train import BatchRampSettings, TrainConfig
from megatron_tape.training.schedule import learning_rate

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.1)


def rates(total, **settings):
    schedule = ScheduleConfig(**settings)
    return [learning_rate(step, OPTIMIZER, schedule, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 4, 50])
def test_the_rate_rises_linearly_and_then_never_rises_again(kind, warmup):
    every = rates(50, kind=kind, warmup_steps=warmup)
    assert every[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    after = every[warmup:]
    assert after == sorted(after, reverse=True)
    assert all(0.1 <= rate <= 1.0 for rate in after)


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "wsd"])
def test_a_decay_ends_at_min_lr_on_the_last_step_and_stays_there(kind):
    schedule = ScheduleConfig(kind=kind, warmup_steps=5)
    assert learning_rate(50, OPTIMIZER, schedule, 50) == pytest.approx(0.1)
    assert learning_rate(99, OPTIMIZER, schedule, 50) == pytest.approx(0.1)


def test_constant_holds_the_peak_to_the_end():
    assert rates(20, kind="constant", warmup_steps=2)[1:] == [1.0] * 19


def test_cosine_is_half_way_down_in_the_middle_and_a_quarter_period_is_a_known_value():
    rate = rates(110, kind="cosine", warmup_steps=10)
    assert rate[59] == pytest.approx(0.55)
    assert rate[34] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(
    "power, middle",
    [(1.0, 0.55), (2.0, 0.1 + 0.9 * 0.25)],
)
def test_polynomial_follows_its_power(power, middle):
    assert rates(110, kind="polynomial", warmup_steps=10, power=power)[59] == pytest.approx(middle)


def test_wsd_holds_the_peak_until_its_decay_and_falls_linearly():
    rate = rates(100, kind="wsd", warmup_steps=10, decay_steps=20)
    assert rate[9:80] == [1.0] * 71
    assert rate[89] == pytest.approx(0.55)
    assert rate[99] == pytest.approx(0.1)


def test_wsd_decays_over_a_tenth_of_the_steps_by_default():
    rate = rates(100, kind="wsd")
    assert rate[89] == 1.0
    assert rate[90] == pytest.approx(0.91)


def test_a_ramp_grows_in_multiples_of_its_start_wherever_a_run_continues():
    train = TrainConfig(
        steps=100, global_batch_size=32, batch_ramp=BatchRampSettings(from_=4, over_samples=100)
    )
    sizes = list(train.batch_sizes(0, 16))
    assert sizes[0] == 4
    assert sizes[-1] == 32
    assert sizes == sorted(sizes)
    assert {size % 4 for size in sizes} == {0}
    for step in range(16):
        samples = sum(sizes[:step])
        assert (sizes[step] < 32) == (samples < 100)
        assert train.samples_after(step) == samples
        assert list(train.batch_sizes(samples, 16 - step)) == sizes[step:]
    plain = TrainConfig(steps=100, global_batch_size=32)
    assert list(plain.batch_sizes(0, 3)) == [32] * 3
    assert plain.samples_after(3, 7) == 103
