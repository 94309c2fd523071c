"""Changes of scores by an encoding: every backend that supports them equals explicit scores."""

import pytest
import torch
from comparing import assert_same, draw, draw_qkvz
from torch.nn.functional import logsigmoid, normalize

from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.contextual import add_contextual_positions
from megatron_tape.ops.householder import through_reflections
from megatron_tape.ops.rescore import Rescore
from megatron_tape.ops.visibility import Visibility

LENGTH = 21
HEADS = 6
GROUPS = 2
DIM = 8
IN_DOCUMENTS = Visibility.of(torch.arange(LENGTH) // torch.tensor([[4], [9]]))
WHOLE = Visibility.of_whole(torch.zeros(2, LENGTH))
VISIBILITIES = [
    None,
    IN_DOCUMENTS,
    *(WHOLE.with_window(size) for size in (1, 2, 6, 8, 30)),
    *(IN_DOCUMENTS.with_window(size) for size in (1, 7)),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "QUERIES", 4)
    monkeypatch.setattr(tiled, "KEYS", 6)


def inputs(queries=LENGTH):
    return draw_qkvz(LENGTH, HEADS, GROUPS, DIM, queries)


def slopes_and_table():
    """Return a bias by distance and head, and one by token and sequence, gathered from a table."""
    slopes = draw(HEADS, seed=4)
    table = draw(2, 1, LENGTH, LENGTH, seed=5)

    def tile(rows, columns, slopes, table):
        assert columns.stop <= rows.stop
        at = [torch.arange(x.start, x.stop) for x in (rows, columns)]
        return slopes[None, :, None, None] * (at[0][:, None] - at[1]) + table[:, :, rows, columns]

    return [slopes, table], Bias(tile, (slopes, table))


@pytest.mark.parametrize("queries", [LENGTH, 9, 1])
@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("backend", ["tiled", "torch"])
def test_biases_and_gates_equal_explicit_scores_with_all_gradients(backend, visibility, queries):
    """test_fla.py compares the naive backend's gates, and tests/position its biases, with the
    authors' code.
    """
    tensors = inputs(queries)
    learned, bias = slopes_and_table()
    gates = draw(LENGTH, 2, HEADS, seed=6)
    changes = {"bias": bias, "log_gate_TBH": logsigmoid(gates), "rotate": queries == LENGTH}
    ours, theirs = (
        attention(*tensors, average_state=True, visibility=visibility, backend=name, **changes)
        for name in (backend, "naive")
    )
    assert_same(ours, theirs, [*tensors, *learned, gates])


def counting(scores, q, k, seen, tokens, weight):
    """Rewrite scores with positions that count the relevant keys (as in CoPE), so a row depends on
    all its scores.
    """
    assert seen.shape[2:] == (q.shape[2], k.shape[2]) == scores.shape[2:]
    counted = scores.sigmoid().masked_fill(~seen, 0.0).flip(-1).cumsum(-1).flip(-1)
    return scores - weight * counted


@pytest.mark.parametrize("queries", [LENGTH, 7])
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_blocks_of_rows_equal_whole_rows_with_all_gradients(visibility, queries):
    """The case includes a bias, gates, an averaged state, and a tensor computed by `prepare`."""
    tensors = inputs(queries)
    learned, bias = slopes_and_table()
    gates = draw(LENGTH, 2, HEADS, seed=7)
    weight = draw(1, seed=6)
    rescore = Rescore(
        counting, (weight,), lambda q, k, weight: (weight * k.square().mean() + q.mean(),)
    )
    changes = {"bias": bias, "log_gate_TBH": -gates.square(), "rescore": rescore}
    ours, theirs = (
        attention(
            *tensors,
            average_state=True,
            visibility=visibility,
            backend=backend,
            rotate=queries == LENGTH,
            **changes,
        )
        for backend in ("tiled", "naive")
    )
    assert_same(ours, theirs, [*tensors, *learned, gates, weight])


def test_blocks_of_rows_get_only_the_keys_that_they_may_see():
    widths = []

    def rows(scores, q, k, seen, tokens):
        widths.append(k.shape[2])
        return scores

    q, k, v, _ = inputs()
    options = {"backend": "tiled", "rescore": Rescore(rows), "visibility": WHOLE.with_window(5)}
    attention(q, k, v, **options)
    assert widths == [4, 8, 8, 8, 8, 5]


@pytest.mark.parametrize("queries", [150, 40, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scored", ["cope", "path"])
@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_a_window_hides_scores_of_whole_rows(monkeypatch, backend, scored, gated, packed, queries):
    """The scores inside of the window are those without it: CoPE counts the keys from a key to the
    query, and PaTH has their reflections.
    """
    length = 150
    window = 40
    monkeypatch.setattr(tiled, "QUERIES", 32)
    q, k, v, _ = draw_qkvz(length, 4, 2, DIM, queries)
    leaves = [q, k, v]
    if scored == "path":
        tensors = draw(length, 2, 2, DIM, seed=5), draw(length, 2, 2, seed=6)
        rescore = through_reflections(
            lambda w, beta: (normalize(w, dim=-1), 2 * beta.sigmoid()), tensors
        )
    else:
        tensors = (draw(6, DIM, seed=5),)
        rescore = Rescore(
            lambda scores, q, k, seen, tokens, table: add_contextual_positions(
                scores, q @ table.T, seen
            ),
            tensors,
        )
    options = {"rescore": rescore}
    leaves += tensors
    logits = draw(length, 2, 4, seed=7)
    # Weak gates, so that tokens outside of the window would have weight.
    log_gate = logsigmoid(logits + 5)
    if gated:
        options["log_gate_TBH"] = log_gate
        leaves.append(logits)

    documents = torch.arange(length) // torch.tensor([[70], [length]])
    visibility = Visibility.of(documents) if packed else Visibility.of_whole(documents)
    visibility = visibility.with_window(window)
    ours, _ = attention(q, k, v, visibility=visibility, backend=backend, **options)

    tokens = torch.arange(length)
    distance = tokens[length - queries :, None] - tokens
    seen = (distance >= 0).expand(2, 1, -1, -1)
    if packed:
        seen = seen & (documents[:, None, length - queries :, None] == documents[:, None, None])
    by_head = q.permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0, 3)
    products = by_head @ keys.repeat_interleave(2, dim=1).mT / DIM**0.5
    prepared = rescore.prepared(by_head, keys)
    block = slice(length - queries, length)
    scores = rescore.rows(products, by_head, keys, seen, block, *prepared)
    if gated:
        sums = log_gate.cumsum(0).permute(1, 2, 0)
        scores = scores + sums[..., block, None] - sums[..., None, :]
    scores = scores.masked_fill(~seen | (distance >= window), float("-inf"))
    values = v.permute(1, 2, 0, 3).repeat_interleave(2, dim=1)
    theirs = (scores.softmax(-1) @ values).permute(2, 0, 1, 3)
    assert_same(ours, theirs, leaves)


@pytest.mark.parametrize("backend", ["naive", "tiled", "torch"])
def test_the_gradient_of_a_bf16_table_is_accumulated_in_fp32(backend):
    tensors = [x.detach().bfloat16() for x in (*inputs()[:3], draw(HEADS, 3, seed=8))]
    direction = draw(LENGTH, 2, HEADS, DIM, seed=9).detach()

    def tile(rows, columns, table):
        queries = torch.arange(rows.start, rows.stop)[:, None]
        keys = torch.arange(columns.start, columns.stop)
        return table[:, (queries - keys).clamp(0, 2)][None]

    def gradient(backend, dtype):
        q, k, v, table = (x.to(dtype) for x in tensors)
        bias = Bias(tile, (table.requires_grad_(),))
        o, _ = attention(q, k, v, backend=backend, bias=bias)
        return torch.autograd.grad(o, table, direction.to(dtype))[0].double()

    exact = gradient("naive", torch.float64)
    assert (gradient(backend, torch.bfloat16) - exact).norm() < 0.02 * exact.norm()


def test_rounded_outputs_do_not_affect_the_gate_gradients_of_other_tokens():
    """Rows of the scores' gradient sum to zero only if the output is exact, and a gate's gradient
    sums such rows.
    """
    length = 320
    tensors = [draw(length, 2, n, 16, seed=n).detach().bfloat16() for n in (4, 2, 2, 4)]
    logits = draw(length, 2, 4).detach().bfloat16()
    visibility = Visibility.of((torch.arange(length) >= torch.tensor([[90], [200]])).long())

    def gradient(backend, dtype):
        q, k, v, direction, leaf = (x.to(dtype) for x in (*tensors, logits))
        gates = logsigmoid(leaf.requires_grad_().to(torch.promote_types(dtype, torch.float32)))
        o, _ = attention(q, k, v, visibility=visibility, log_gate_TBH=gates, backend=backend)
        return torch.autograd.grad(o, leaf, direction)[0].double()

    exact = gradient("naive", torch.float64)
    plain = gradient("naive", torch.bfloat16)
    ours = gradient("tiled", torch.bfloat16)
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("backend", ["tiled", "torch"])
def test_gates_of_nearby_keys_avoid_the_rounding_error_of_distant_keys(backend):
    qkv = [draw(300, 1, 2, DIM, seed=n).detach().bfloat16() for n in range(3)]
    gates = logsigmoid(draw(300, 1, 2, seed=3).detach().float())
    exact, _ = attention(
        *(x.double() for x in qkv),
        log_gate_TBH=gates.double(),
        backend="naive",
    )
    ours, _ = attention(*qkv, log_gate_TBH=gates, backend=backend)
    assert (ours - exact).norm() < 0.01 * exact.norm()
