"""Randomized positions: draws in training, and even spacing elsewhere."""

import numpy as np
import pytest
import torch
from configurations import make_alone
from models import build, random_tokens, small_model

from megatron_tape.position import encoding_of
from megatron_tape.training.engine import Engine, step_rng


def model_of(positions=50):
    return small_model(position_encoding="randpe", randpe_range=positions)


def test_training_draws_sorted_distinct_positions_from_the_range():
    encoding = encoding_of(model_of())
    draws = [encoding.token_positions(16, step_rng(1234, step)) for step in range(1, 2001)]
    assert all((np.diff(draw) > 0).all() for draw in draws)
    # Every position is drawn as often as any other: 640 times, give or take five standard
    # deviations.
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert len(counts) == 50
    assert np.abs(counts - 640).max() < 5 * (640 * (1 - 16 / 50)) ** 0.5
    assert len({tuple(draw) for draw in draws}) == 2000
    assert np.array_equal(encoding.token_positions(16, step_rng(1234, 7)), draws[6])
    assert not np.array_equal(
        encoding.token_positions(16, step_rng(1235, 7)),
        draws[6],
    )


@pytest.mark.parametrize(
    "length, spread",
    [(16, 16), (9, 16), (40, 40)],
)
def test_positions_outside_training_are_evenly_spaced(length, spread):
    expected = [50 * i // spread for i in range(length)]
    assert encoding_of(model_of()).token_positions(length, None).tolist() == expected


def test_positions_beyond_the_range_are_those_of_rope():
    assert encoding_of(model_of()).token_positions(70, None).tolist() == list(range(70))


def test_it_equals_rope_on_its_positions():
    ids = random_tokens()
    rope = build(small_model(position_encoding="rope"))[0]
    built = build(model_of())[0]
    assert torch.equal(
        built(ids),
        rope(ids, positions=torch.arange(16) * 50 // 16),
    )
    drawn = built.token_positions(ids, step_rng(1, 1))
    assert torch.equal(built(ids, positions=drawn), rope(ids, positions=drawn))
    assert (built(ids, positions=drawn) - built(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_draws_positions_once_per_step_and_never_in_evaluation(stage):
    config = make_alone(
        model_of(), deepspeed__zero_stage=stage, train__global_batch_size=2, train__seed=5
    )
    model, layout = build(config.model)
    engine = Engine(model, config, layout)
    used = []
    initial_state = model.encoding.initial_state

    def looked_at(positions_SB, dtype):
        used.append(positions_SB[:, 0].tolist())
        return initial_state(positions_SB, dtype)

    model.encoding.initial_state = looked_at
    tokens = [random_tokens(1, 17, seed=seed) for seed in range(2)]
    batches = [{"tokens": x[:, :-1], "labels": x[:, 1:]} for x in tokens]
    for step in (1, 2):
        engine.train_step(batches, 0.0, step)
    engine.evaluate(batches[:1])
    first = model.encoding.token_positions(16, step_rng(5, 1)).tolist()
    second = model.encoding.token_positions(16, step_rng(5, 2)).tolist()
    even = [50 * i // 16 for i in range(16)]
    assert first != second
    assert used == [first, first, second, second, even]
