"""Changes of scores by an encoding: every backend that supports them equals explicit scores."""

import pytest
import torch
from comparing import assert_same, draw, draw_qkvz
from torch.nn.functional import logsigmoid

from megatron_tape.ops.attention import attention
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.rescore import Rescore
from megatron_tape.ops.shifted import ShiftedSegments, attend_in_segments

LENGTH = 21
HEADS = 6
GROUPS = 2
DIM = 8


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


def plain(q, k, v, z, added, packing, rotated):
    """Compute softmax attention with explicit scores, independently of the backends."""
    q, k, v, z = (x.transpose(0, 1) for x in (q, k, v, z))
    per_group = HEADS // GROUPS
    k, v, z = (x.repeat_interleave(per_group, 2) for x in (k, v, z))

    def turn(x, z):
        x, z = (torch.complex(*y.chunk(2, dim=-1)) for y in (x, z))
        return torch.cat([(x * z).real, (x * z).imag], dim=-1)

    if rotated:
        q = turn(q, z)
        k = turn(k, z)
    S = q.shape[1]
    T = k.shape[1]
    scores = torch.einsum("bshd,bthd->bhst", q, k) / DIM**0.5 + added[:, :, T - S :]
    at = torch.arange(T)
    hidden = at[None, :] > at[T - S :, None]
    if packing is not None:
        hidden = hidden | (at < packing.bounds_2BT[0][:, None, T - S :, None])
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return [torch.einsum("bhst,bthd->sbhd", p, x) for x in (v, z)]


@pytest.mark.parametrize("queries", [LENGTH, 9, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["naive", "tiled", "torch"])
def test_biases_and_gates_equal_explicit_scores_with_all_gradients(backend, packed, queries):
    tensors = inputs(queries)
    rotated = queries == LENGTH
    if packed:
        packing = Packing.of(torch.arange(LENGTH) // torch.tensor([[4], [9]]))
    else:
        packing = None
    learned, bias = slopes_and_table()
    gates = draw(LENGTH, 2, HEADS, seed=6)
    both = slice(0, LENGTH)
    log_gate = logsigmoid(gates)
    sums = log_gate.cumsum(0).permute(1, 2, 0)
    at = torch.arange(LENGTH)
    by_distance = (
        learned[0][None, :, None, None] * (at[:, None] - at) + learned[1][:, :, both, both]
    )
    added = by_distance + sums[..., :, None] - sums[..., None, :]
    theirs = plain(*tensors, added, packing, rotated)
    ours = attention(
        *tensors, True, packing, backend, rotate=rotated, bias=bias, log_gate_TBH=log_gate
    )
    assert_same(ours, theirs, [*tensors, *learned, gates])


def counting(scores, q, k, seen, tokens, weight):
    """Rewrite scores with positions that count the relevant keys (as in CoPE), so a row depends on
    all its scores.
    """
    r = tokens.stop - tokens.start
    t = tokens.stop
    assert (
        q.shape == (2, HEADS, r, DIM)
        and k.shape == (2, GROUPS, t, DIM)
        and seen.shape[2:] == (r, t)
    )
    counted = scores.sigmoid().masked_fill(~seen, 0.0).flip(-1).cumsum(-1).flip(-1)
    return scores - weight * counted


@pytest.mark.parametrize("backend", ["naive", "tiled"])
def test_scores_can_be_rewritten_from_whole_rows(backend):
    q, k, v, z = inputs()
    rescore = Rescore(counting, (torch.tensor(0.1, dtype=torch.float64),))
    ours = attention(q, k, v, None, backend=backend, rescore=rescore)[0]
    plain_scores = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(3, 2)) / DIM**0.5
    p = torch.zeros_like(plain_scores)
    for s in range(LENGTH):
        row = plain_scores[:, :, s, : s + 1]
        counted = torch.stack([row[..., t:].sigmoid().sum(-1) for t in range(s + 1)], -1)
        p[:, :, s, : s + 1] = (row - 0.1 * counted).softmax(-1)
    torch.testing.assert_close(ours, torch.einsum("bhst,tbhd->sbhd", p, v.repeat_interleave(3, 2)))


@pytest.mark.parametrize("queries", [LENGTH, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_rows_equal_whole_rows_with_all_gradients(packed, queries):
    """The case includes a bias, gates, an averaged state, and queries and keys changed by
    `prepare`.
    """
    tensors, (of_bias, bias) = inputs(queries), slopes_and_table()
    gates = draw(LENGTH, 2, HEADS, seed=7)
    weight = draw(1, seed=6)
    if packed:
        packing = Packing.of(torch.arange(LENGTH).expand(2, -1) // 8)
    else:
        packing = None
    rescore = Rescore(
        counting, (weight,), lambda q, k, weight: (weight * k.square().mean() + q.mean(),)
    )
    given = dict(rotate=queries == LENGTH, bias=bias, log_gate_TBH=-gates.square(), rescore=rescore)
    ours, theirs = (
        attention(*tensors, True, packing, backend, **given) for backend in ("tiled", "naive")
    )
    assert_same(ours, theirs, [*tensors, *of_bias, gates, weight])


def test_the_gradient_of_a_bf16_table_is_accumulated_in_fp32():
    q, k, v, z = (x.detach().bfloat16() for x in inputs())
    table = draw(HEADS, 3, seed=8).detach().bfloat16()

    def tile(rows, columns, table):
        at = [torch.arange(x.start, x.stop) for x in (rows, columns)]
        return table[:, (at[0][:, None] - at[1]).clamp(0, 2)][None]

    direction = draw(LENGTH, 2, HEADS, DIM, seed=9).detach()
    gradients = {}
    for backend, dtype in (
        ("naive", torch.float64),
        ("naive", None),
        ("tiled", None),
        ("torch", None),
    ):
        tensors = [x if dtype is None else x.to(dtype) for x in (q, k, v, table)]
        leaf = tensors[3].requires_grad_()
        o, _ = attention(*tensors[:3], None, backend=backend, bias=Bias(tile, (leaf,)))
        gradients[backend, dtype] = torch.autograd.grad(o, leaf, direction.to(o.dtype))[0].double()
    exact = gradients.pop(("naive", torch.float64))
    assert all((gradient - exact).norm() < 0.02 * exact.norm() for gradient in gradients.values())


@pytest.mark.parametrize("shifted", [False, True])
def test_rounded_outputs_do_not_affect_the_gate_gradients_of_other_tokens(shifted):
    """Rows of the scores' gradient sum to zero only if the output is exact, and a gate's gradient
    sums such rows.
    """
    length = 320
    groups = 2
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(length, 2, n, 16, generator=generator).bfloat16()
        for n in (4, groups, groups, 4)
    ]
    logits = torch.randn(length, 2, 4, generator=generator).bfloat16()
    packing = Packing.of((torch.arange(length) >= torch.tensor([[90], [200]])).long())
    segments = ShiftedSegments.of(logits[..., 0].T, packing, 1)
    gradients = {}
    for backend, dtype in (("naive", torch.float64), ("naive", None), ("tiled", None)):
        q, k, v, direction, leaf = [x if dtype is None else x.to(dtype) for x in (*tensors, logits)]
        gates = logsigmoid(leaf.requires_grad_().to(dtype or torch.float32))
        if shifted:
            o, _ = attend_in_segments(
                AttentionInputs(q_SBHD=q, k_TBGD=k, v_TBGD=v, log_gate_TBH=gates), segments, backend
            )
        else:
            o, _ = attention(q, k, v, None, packing=packing, backend=backend, log_gate_TBH=gates)
        gradients[backend, dtype] = torch.autograd.grad(o, leaf, direction.to(o.dtype))[0].double()
    exact, plain, ours = gradients.values()
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_gate_gradients_with_rewritten_scores_in_bf16_equal_those_in_fp32():
    """If averages were rounded, a row's error would reach the gates of all earlier tokens."""
    q, k, v = (draw(200, 1, n, DIM, seed=n).detach() for n in (2, 1, 1))
    gates = -0.01 * draw(200, 1, 2).detach().square()
    direction = draw(200, 1, 2, DIM).detach()
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        qkv = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v + 3)]
        own = gates.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        rescore = Rescore(lambda scores, *_: scores)
        ours = attention(*qkv, None, log_gate_TBH=own, rescore=rescore, backend="tiled")[0]
        (found[dtype],) = torch.autograd.grad(ours, own, direction.bfloat16().to(dtype))
    exact, rounded = found.values()
    assert (rounded - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("length", [200, 300])
@pytest.mark.parametrize("backend", ["tiled", "torch"])
def test_gates_of_nearby_keys_avoid_the_rounding_error_of_distant_keys(backend, length):
    qkv = [draw(length, 1, 2, DIM, seed=n).detach().bfloat16() for n in range(3)]
    gates = logsigmoid(draw(length, 1, 2, seed=3).detach().float())
    exact = attention(*(x.double() for x in qkv), log_gate_TBH=gates.double(), backend="naive")[0]
    ours = attention(*qkv, log_gate_TBH=gates, backend=backend)[0]
    assert (ours - exact).norm() < 0.01 * exact.norm()
