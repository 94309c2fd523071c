"""PaTH: scores, gradients, documents and the convolution."""

import pytest
import torch
from comparing import assert_same, authors_form
from models import build, move_positions, random_tokens, small_model
from torch.nn.functional import conv1d, linear, silu

from megatron_tape.ops.attention import attention
from megatron_tape.ops.householder import blocks_of_reflections, through_reflections
from megatron_tape.position.encoding import TokenCache
from megatron_tape.position.path import short_convolution

NAMES = ["path", "path_fox"]


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_inputs(T, B=2, G=2, R=2, D=8, seed=0):
    """Return queries, keys, values, unit vectors w and factors beta from 0 to 2, as leaves."""
    torch.manual_seed(seed)
    q = torch.randn(T, B, G * R, D)
    k = torch.randn(T, B, G, D)
    v = torch.randn(T, B, G, D)
    w = torch.nn.functional.normalize(torch.randn(T, B, G, D), dim=-1)
    beta = 2 * torch.rand(T, B, G)
    return [x.requires_grad_() for x in (q, k, v, w, beta)]


def rescore_of(w, beta):
    return through_reflections(lambda *given: given, (w, beta))


def defined_scores(q, k, w, beta):
    """Return the scores (B, H, S, T) by the defining equation, one matrix at a time."""
    (T, B, G, D), S = k.shape, len(q)
    q = q.permute(1, 2, 0, 3).unflatten(1, (G, -1))
    k = k.permute(1, 2, 0, 3)
    H = torch.eye(D) - beta[..., None, None] * w[..., None] * w[..., None, :]  # (T, B, G, D, D)
    scores = torch.zeros(B, G, q.shape[2], S, T)
    for s in range(S):
        product = torch.eye(D).expand(B, G, D, D)
        for t in range(T - S + s, -1, -1):
            carried = (product @ k[:, :, t, :, None])[:, :, None, :, 0]
            scores[:, :, :, s, t] = (q[:, :, :, s] * carried).sum(-1) / D**0.5
            product = product @ H[t]
    return scores.flatten(1, 2)


@pytest.mark.parametrize("T, S", [(70, 70), (5, 5), (64, 64), (130, 9), (67, 1)])
def test_scores_and_gradients_equal_the_defining_equation(T, S):
    q, k, _, w, beta = random_inputs(T)
    q = q[T - S :].detach().requires_grad_()
    scores = rescore_of(w, beta)
    queries = q.permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0, 3)
    found = scores.rows(None, queries, keys, None, slice(T - S, T), *scores.prepared(queries, keys))
    assert found.isfinite().all()
    found = found.tril(T - S)
    expected = defined_scores(q, k, w, beta)
    assert_same(found, expected, (q, k, w, beta), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "naive"])
def test_outputs_and_gradients_equal_the_authors_code(backend, gated, monkeypatch):
    T = 150
    D = 8
    leaves = random_inputs(T, D=D)
    q, k, v, w, beta = leaves
    log_gate = (torch.rand(T, 2, 4) * -0.1 if gated else torch.zeros(T, 2, 4)).requires_grad_()
    given = {"log_gate_TBH": log_gate} if gated else {}
    found, _ = attention(q, k, v, None, backend=backend, rescore=rescore_of(w, beta), **given)
    # The authors' code also divides the sums of the gates by sqrt(D); the papers' equations do not.
    monkeypatch.setattr(torch, "float", torch.float64)
    form = authors_form("path_attn").naive_path_attn
    expected = form(*(x.transpose(0, 1) for x in (*leaves, log_gate * D**0.5)), scale=D**-0.5)
    assert_same(
        found,
        expected.transpose(0, 1),
        [*leaves, log_gate] if gated else leaves,
        atol=1e-10,
        rtol=1e-9,
    )


def test_bf16_scores_are_computed_in_float32():
    exact = random_inputs(90)
    rounded = [x.detach().to(torch.bfloat16) for x in exact[:3]]
    w, beta = (x.detach().float() for x in exact[3:])
    expected, _ = attention(
        *(x.float() for x in rounded), None, backend="tiled", rescore=rescore_of(w, beta)
    )
    for backend in ("tiled", "naive"):
        found, _ = attention(*rounded, None, backend=backend, rescore=rescore_of(w, beta))
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), expected, atol=2**-7, rtol=2**-7)


def test_the_convolution_equals_torchs_and_stays_within_documents():
    torch.manual_seed(1)
    for T, width in ((9, 3), (2, 4), (5, 1)):
        x = torch.randn(T, 2, 2, 3)
        weight = torch.randn(2, 3, width)
        positions = torch.arange(T)[:, None]
        expected = conv1d(
            x.flatten(2).permute(1, 2, 0),
            weight.flatten(0, 1)[:, None],
            padding=width - 1,
            groups=6,
        )
        expected = silu(expected[..., :T].permute(2, 0, 1).unflatten(2, (2, 3)))
        torch.testing.assert_close(short_convolution(x, positions, weight), expected)
        torch.testing.assert_close(short_convolution(x, positions + 7, weight), expected)
    x = torch.randn(9, 1, 2, 3)
    weight = torch.randn(2, 3, 3)
    packed = short_convolution(x, torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4])[:, None], weight)
    for part in (slice(0, 3), slice(3, 4), slice(4, 9)):
        alone = x[part]
        expected = short_convolution(alone, torch.arange(len(alone))[:, None], weight)
        torch.testing.assert_close(packed[part], expected)


def moved_layer(name, **changes):
    """Return an encoding and random parameters of a layer."""
    built, _ = build(small_model(position_encoding=name, **changes))
    generator = torch.Generator().manual_seed(3)
    parameters = {
        key: torch.randn(x.shape, generator=generator)
        for key, x in built.encoding.parameters(1).items()
    }
    return built.encoding, parameters


def test_w_and_beta_equal_the_authors_layer():
    """Low-rank projection, convolution with SiLU, normalization; beta up to 2:
    fla/layers/path_attn.py.
    """
    encoding, p = moved_layer("path")
    p = {name: weight.double() for name, weight in p.items()}
    torch.manual_seed(2)
    hidden, keys = (
        torch.randn(shape, dtype=torch.float64) for shape in ((20, 2, 32), (2, 2, 20, 8))
    )
    rescore = encoding.position_inputs(
        1, p, torch.arange(20.0)[:, None], hidden, TokenCache()
    ).rescore
    found = rescore.prepared(torch.zeros(2, 4, 20, 8, dtype=torch.float64), keys)
    w = linear(linear(hidden, p["w_down"]), p["w_up"]).permute(1, 2, 0)
    w = silu(conv1d(w, p["conv"].flatten(0, 1)[:, None], padding=2, groups=16)[..., :20])
    w = torch.nn.functional.normalize(w.unflatten(1, (2, 8)).mT, dim=-1)
    beta = 2 * linear(hidden, p["beta_weight"], p["beta_bias"]).sigmoid().permute(1, 2, 0)
    for a, b in zip(found, blocks_of_reflections(keys, w, beta), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def moved_model(name):
    """Return a float32 model whose position parameters are far from their initial values."""
    torch.set_default_dtype(torch.float32)
    return move_positions(build(small_model(position_encoding=name))[0])


@pytest.mark.parametrize("name", NAMES)
def test_shifted_positions_and_left_padding_change_nothing(name):
    ids = random_tokens(2)
    padding = random_tokens(2, 5)
    built = moved_model(name)
    alone = built(ids)
    torch.testing.assert_close(built(ids, positions=torch.arange(16) + 5), alone)
    padded = built(
        torch.cat([padding, ids], dim=1), documents=torch.tensor([[0] * 5 + [1] * 16] * 2)
    )
    torch.testing.assert_close(padded[:, 5:], alone, atol=1e-4, rtol=1e-4)
