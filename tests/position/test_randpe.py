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
    draws = np.stack(
        [encoding.token_positions(16, step_rng(1234, step)) for step in range(1, 2001)]
    )
    assert draws.dtype == np.int64 and draws.shape == (2000, 16)
    assert (np.diff(draws) > 0).all() and (draws.min(), draws.max()) == (0, 49)
    # Every position is drawn as often as any other: 640 times, give or take five standard
    # deviations.
    assert (
        np.abs(np.bincount(draws.flatten(), minlength=50) - 640).max()
        < 5 * (640 * (1 - 16 / 50)) ** 0.5
    )
    assert len({tuple(draw) for draw in draws}) == 2000
    assert np.array_equal(encoding.token_positions(16, step_rng(1234, 7)), draws[6])
    assert not np.array_equal(encoding.token_positions(16, step_rng(1235, 7)), draws[6])


def test_positions_outside_training_are_evenly_spaced():
    encoding = encoding_of(model_of())
    assert encoding.token_positions(16, None).tolist() == [50 * i // 16 for i in range(16)]
    assert encoding.token_positions(9, None).tolist() == [50 * i // 16 for i in range(9)]
    assert encoding.token_positions(40, None).tolist() == [50 * i // 40 for i in range(40)]
    assert encoding.token_positions(70, None).tolist() == list(range(70))
    assert encoding_of(model_of(None)).token_positions(16, None).tolist() == list(range(0, 64, 4))


def test_it_equals_rope_on_its_positions():
    ids = random_tokens()
    rope = build(small_model(position_encoding="rope"))[0]
    (dense, _), (built, _) = build(model_of(16)), build(model_of())
    assert torch.equal(dense(ids), rope(ids))
    assert torch.equal(dense(ids, positions=dense.token_positions(ids, step_rng(1, 1))), rope(ids))
    assert torch.equal(built(ids), rope(ids, positions=torch.arange(16) * 50 // 16))
    drawn = built.token_positions(ids, step_rng(1, 1))
    assert torch.equal(built(ids, positions=drawn), rope(ids, positions=drawn))
    assert (built(ids, positions=drawn) - built(ids)).abs().max() > 1e-2
    shifted = built(ids, positions=drawn + 500)
    torch.testing.assert_close(shifted, built(ids, positions=drawn), atol=2e-4, rtol=1e-3)


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
    batches = [
        {"tokens": t[:, :-1], "labels": t[:, 1:]}
        for t in (random_tokens(1, 17, seed=i) for i in range(2))
    ]
    for step in (1, 2):
        engine.train_step(batches, 0.0, step)
    engine.evaluate(batches[:1])
    engine.logits(batches[0]["tokens"][:, :7])
    assert [len(positions) for positions in used] == [16] * 5 + [7]
    first, second = (
        model.encoding.token_positions(16, step_rng(5, step)).tolist() for step in (1, 2)
    )
    assert first != second and used[:4] == [first, first, second, second]
    assert used[4] == [50 * i // 16 for i in range(16)] and used[5] == used[4][:7]
