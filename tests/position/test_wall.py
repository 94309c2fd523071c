"""Wall attention: scores, gradients, numerics and decays."""

import sys
from types import ModuleType

import pytest
import torch
from comparing import assert_same, authors_form, draw, draw_qkvz
from models import build, small_model
from torch.nn.functional import linear, logsigmoid
from wall_reference import wall

from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.decay import STRONGEST, with_decay
from megatron_tape.ops.visibility import Visibility
from megatron_tape.position.encoding import NO_CACHE

BACKENDS = ("tiled", "naive")
HEADS = 4
GROUPS = 2
DIM = 8


def documents(length):
    """Return the number of each token's document in two sequences."""
    return torch.arange(length) // torch.tensor([[length // 3 + 1], [length // 2]])


def visibility_of(length, packed, window):
    numbers = documents(length)
    visibility = Visibility.of(numbers) if packed else Visibility.of_whole(numbers)
    return visibility.with_window(window) if window else visibility


@pytest.mark.parametrize("length, queries", [(63, 63), (91, 91), (90, 37), (70, 1)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 9, 50, 100])
@pytest.mark.parametrize("with_all_parts", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients_equal_the_definition(
    monkeypatch, backend, with_all_parts, window, packed, length, queries
):
    monkeypatch.setattr(tiled, "QUERIES", 32)
    q, k, v, _ = draw_qkvz(length, HEADS, GROUPS, DIM)
    logits = draw(length, 2, HEADS, DIM, seed=5)
    sink = draw(HEADS, seed=6)
    gate_logits = draw(length, 2, HEADS, seed=7)
    leaves = [q, k, v, logits]
    log_decay = -STRONGEST * (4 * logits).sigmoid()
    log_gate = logsigmoid(gate_logits)
    changes = {}
    parts = {}
    if with_all_parts:
        leaves += [sink, gate_logits]
        changes = {"sink_H": sink, "log_gate_TBH": log_gate}
        parts = {"sink": sink, "g_scalar": log_gate.transpose(0, 1)}
    ours, _ = attention(
        q[length - queries :],
        k,
        v,
        rescore=with_decay(log_decay),
        visibility=visibility_of(length, packed, window),
        backend=backend,
        **changes,
    )
    segments = documents(length) if packed else None
    tensors = [x.transpose(0, 1) for x in (q, k, v, log_decay)]
    theirs = wall(*tensors, segments=segments, window=window, **parts).transpose(0, 1)
    assert_same(ours, theirs[length - queries :], leaves)


@pytest.fixture
def fla_naive(monkeypatch):
    """Return fla's plain form of Wall attention, with torch's cumulative sum instead of a
    kernel's.
    """

    def chunk_global_cumsum(g, cu_seqlens=None, scale=1.0):
        return g.cumsum(1) * scale

    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    constant = ModuleType("fla.ops.utils.constant")
    constant.RCP_LN2 = 1.4426950216
    cumsum = ModuleType("fla.ops.utils.cumsum")
    cumsum.chunk_global_cumsum = chunk_global_cumsum
    for module in (constant, cumsum):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return authors_form("wall_attn").naive_wall_attn


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients_equal_the_authors_code_in_float32(fla_naive, backend, window):
    length = 150
    q, k, v, _ = draw_qkvz(length, HEADS, GROUPS, 16, dtype=torch.float32)
    logits = draw(length, 2, HEADS, 16, seed=5, dtype=torch.float32)
    gate_logits = draw(length, 2, HEADS, seed=7, dtype=torch.float32)
    sink = draw(HEADS, seed=6, dtype=torch.float32)
    log_decay = logsigmoid(logits + 3)
    log_gate = logsigmoid(gate_logits + 3)
    ours, _ = attention(
        q,
        k,
        v,
        rescore=with_decay(log_decay),
        sink_H=sink,
        log_gate_TBH=log_gate,
        visibility=visibility_of(length, False, window),
        backend=backend,
    )
    tensors = [x.transpose(0, 1) for x in (q, k, v, log_decay)]
    theirs = fla_naive(
        *tensors,
        scale=16**-0.5,
        window_size=window,
        sink_bias=sink,
        g_scalar=log_gate.transpose(0, 1),
    )
    leaves = [q, k, v, logits, gate_logits, sink]
    assert_same(ours, theirs.transpose(0, 1), leaves, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_decay_attention_is_that_of_nope(backend):
    q, k, v, _ = draw_qkvz(300, HEADS, GROUPS, DIM, dtype=torch.float32)
    decay = with_decay(torch.zeros(300, 2, HEADS, DIM))
    ours, _ = attention(q, k, v, rescore=decay, backend=backend)
    theirs, _ = attention(q, k, v, backend=backend)
    assert_same(ours, theirs, [q, k, v], atol=1e-6, rtol=1e-5)


def test_decays_are_the_softly_clamped_logarithms_of_sigmoids():
    """logsigmoid(W x + b) as in fla's layer, and the soft clamp m (exp(g / m) - 1)."""
    encoding = build(small_model(position_encoding="wall", wall_strongest=0.5))[0].encoding
    weight = draw(32, 32, seed=1)
    bias = draw(32, seed=2)
    hidden = 2 * draw(20, 2, 32, seed=3)
    inputs = encoding.position_inputs(
        0, {"decay": weight, "decay_bias": bias}, None, hidden, NO_CACHE
    )
    g = logsigmoid(linear(hidden, weight, bias))
    expected = 0.5 * ((2 * g).exp() - 1)
    found = inputs.rescore.log_decay_TBHD
    torch.testing.assert_close(found, expected.unflatten(2, (4, 8)))
    assert found.min() >= -0.5
    assert g.min() < -5
    assert inputs.log_gate_TBH is None and inputs.sink_H is None
    bias = encoding.parameters(0)["decay_bias"]
    assert bias.value == 8.0 and bias.decay is False


def test_nothing_overflows_with_the_strongest_decays_after_131072_tokens():
    """The last queries of a long sequence, in float32, compared with float64."""
    length = 131072
    count = 200
    dim = 2
    logits = draw(length, 1, 1, dim, seed=5).detach()
    # One channel always decays as much as is allowed, the other one seldom.
    log_decay = torch.stack(
        [torch.full((length, 1, 1), -STRONGEST), -0.001 * logits[..., 1].sigmoid()], -1
    )
    q, k, v = (draw(n, 1, 1, dim, seed=n).detach() for n in (count, length, length))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, log_decay)]
        queries, keys, values, decays = leaves
        o, _ = attention(queries, keys, values, rescore=with_decay(decays), backend="tiled")
        direction = draw(count, 1, 1, dim, seed=9).detach().to(dtype)
        results.append([o, *torch.autograd.grad(o, leaves, direction)])
    for found, expected in zip(*results):
        assert found.isfinite().all()
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
