"""Tests of the detection of spikes."""

import json
from types import SimpleNamespace

import pytest

from megatron_tape.config.train import SpikeSettings
from megatron_tape.training.engine import StepResult
from megatron_tape.training.spikes import SpikeHook, Spikes
from megatron_tape.training.trainer import Trainer


def after(values, values_so_far=None):
    spikes = Spikes(SpikeSettings(window=5, threshold=6.0), values_so_far)
    for loss, norm in values:
        spikes.add(loss, norm)
    return spikes


USUAL = [
    (3.0, 1.0),
    (2.9, 1.2),
    (3.1, 0.9),
    (3.0, 1.1),
    (2.95, 1.0),
]


def test_a_loss_or_a_gradient_norm_far_above_the_last_ones_is_a_spike():
    spikes = after(USUAL)
    assert spikes.is_spike(3.5, 1.0)
    assert spikes.is_spike(3.0, 2.0)
    assert not spikes.is_spike(3.2, 1.5)
    assert not spikes.is_spike(1.0, 0.1)
    assert not spikes.is_spike(float("nan"), float("nan"))


def test_there_is_no_spike_before_the_window_is_full():
    assert not after(USUAL[:4]).is_spike(100.0, 100.0)


def test_old_values_are_forgotten_and_a_few_large_ones_do_not_matter():
    lower = [
        (1.0, 1.0),
        (1.1, 1.2),
        (0.9, 0.9),
        (50.0, 40.0),
        (1.05, 1.0),
    ]
    assert after(USUAL + lower).is_spike(3.0, 1.0)


def test_a_plateau_has_no_spikes():
    assert not after([(2.0, 1.0)] * 5).is_spike(2.01, 1.005)
    assert after([(2.0, 1.0)] * 5).is_spike(2.02, 1.005)


def test_values_restored_from_a_checkpoint_give_the_same_decisions():
    again = after(
        [],
        json.loads(json.dumps(after([(9.0, 9.0), *USUAL]).values)),
    )
    assert again.is_spike(3.5, 1.0)
    assert not again.is_spike(3.2, 1.5)


def test_a_new_stage_of_the_data_resets_the_recent_losses():
    trainer = SimpleNamespace(
        progress={},
        enters_stage=False,
        layout=SimpleNamespace(rank=1, any_rank=lambda found: found),
    )
    hook = SpikeHook(SpikeSettings(action="warn", window=5, threshold=6.0))

    def spikes(values, enters_stage=False):
        before = trainer.progress.get("spikes_found", 0)
        for step, (loss, norm) in enumerate(values):
            trainer.enters_stage = enters_stage and step == 0
            hook.before_step(trainer, step)
            hook.after_step(trainer, step, StepResult(loss, norm, skipped=False))
        return trainer.progress.get("spikes_found", 0) - before

    higher = [(loss + 1, norm) for loss, norm in USUAL]
    assert spikes(USUAL) == 0 and spikes(higher[:1]) == 1
    assert spikes(higher, enters_stage=True) == 0 and spikes([(9.0, 1.0)]) == 1


@pytest.mark.parametrize(
    ("trained", "samples", "enters"),
    [(90, 90, False), (96, 96, True), (100, 100, True), (90, 120, True), (104, 120, False)],
)
def test_a_step_enters_a_stage_even_if_skipped_data_ends_in_its_middle(trained, samples, enters):
    stages = [SimpleNamespace(start=0), SimpleNamespace(start=100)]
    train = SimpleNamespace(batch_size=lambda samples: 8)
    trainer = SimpleNamespace(
        _trained_samples=trained,
        samples=samples,
        stages=stages,
        config=SimpleNamespace(train=train),
    )
    assert Trainer.enters_stage.fget(trainer) == enters
