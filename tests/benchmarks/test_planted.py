"""Problems that are planted in a run for docs/monitoring.md; the runs themselves are in tests/training."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import planted
from megatron_tape.training.spikes import FOUND


def batches():
    return ({"tokens": torch.arange(4) + i, "labels": torch.arange(4) + i} for i in range(30))


def test_one_batch_of_the_run_is_spoilt():
    trainer = SimpleNamespace(step=0, micro_batches=batches(), progress={})
    planted.Spike().before_step(trainer, 1)
    for step, good in enumerate(batches()):
        trainer.step = step
        batch, bad = next(trainer.micro_batches), step == planted.STEP - 1
        expected = [[7] * 4] * 2 if bad else [good["tokens"].tolist(), good["labels"].tolist()]
        assert [batch["tokens"].tolist(), batch["labels"].tolist()] == expected
    back = SimpleNamespace(micro_batches="those after a rewind to the start", progress={FOUND: 1})
    planted.Spike().before_step(back, 1)
    assert back.micro_batches == "those after a rewind to the start"


def test_batches_come_late_and_forward_passes_of_the_last_rank_alone_take_longer(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    trainer = SimpleNamespace(micro_batches=batches())
    planted.Stall().before_step(trainer, 1)
    assert len(list(trainer.micro_batches)) == len(slept) == 30
    for rank, expected in ((0, 30), (1, 31)):
        layout = SimpleNamespace(rank=rank, world_size=2)
        trainer = SimpleNamespace(model=torch.nn.Identity(), layout=layout)
        planted.SlowRank().before_step(trainer, 1)
        trainer.model(torch.zeros(1))
        assert len(slept) == expected


@pytest.mark.parametrize("arguments", [[], ["fast_rank"]])
def test_a_problem_must_be_named(arguments, capsys):
    assert planted.main(arguments) == 2
    assert "slow_rank, stall, spike" in capsys.readouterr().err
