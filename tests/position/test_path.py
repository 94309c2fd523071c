"""PaTH: scores, gradients, documents and the convolution."""

import pytest
import torch
from comparing import assert_same, authors_form, draw
from models import build, small_model
from torch.nn.functional import conv1d, linear, silu

from megatron_tape.ops.attention import attention
from megatron_tape.ops.householder import blocks_of_reflections, through_reflections
from megatron_tape.position.encoding import TokenCache


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
    w = torch.nn.functional.normalize(
        torch.randn(T, B, G, D),
        dim=-1,
    )
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


@pytest.mark.parametrize(
    "T, S",
    [(70, 70), (5, 5), (64, 64), (130, 9), (67, 1)],
)
def test_scores_and_gradients_equal_the_defining_equation(T, S):
    q, k, _, w, beta = random_inputs(T)
    q = q[T - S :].detach().requires_grad_()
    scores = rescore_of(w, beta)
    queries = q.permute(1, 2, 0, 3)
    keys = k.permute(1, 2, 0, 3)
    found = scores.rows(
        None,
        queries,
        keys,
        None,
        slice(T - S, T),
        *scores.prepared(queries, keys),
    )
    assert found.isfinite().all()
    found = found.tril(T - S)
    expected = defined_scores(q, k, w, beta)
    assert_same(found, expected, (q, k, w, beta), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "naive"])
def test_outputs_and_gradients_equal_the_authors_code(backend, gated, monkeypatch):
    leaves = random_inputs(150)
    q, k, v, w, beta = leaves
    log_gate = torch.zeros(150, 2, 4)
    given = {}
    if gated:
        log_gate = (torch.rand(150, 2, 4) * -0.1).requires_grad_()
        leaves.append(log_gate)
        given["log_gate_TBH"] = log_gate
    found, _ = attention(
        q,
        k,
        v,
        None,
        backend=backend,
        rescore=rescore_of(w, beta),
        **given,
    )
    # The authors' code also divides the sums of the gates by sqrt(D); the papers' equations do not.
    monkeypatch.setattr(torch, "float", torch.float64)
    tensors = (x.transpose(0, 1) for x in (q, k, v, w, beta, log_gate * 8**0.5))
    expected = authors_form("path_attn").naive_path_attn(*tensors, scale=8**-0.5)
    assert_same(found, expected.transpose(0, 1), leaves, atol=1e-10, rtol=1e-9)


def test_bf16_scores_are_computed_in_float32():
    q, k, v, w, beta = (x.detach().float() for x in random_inputs(90))
    rounded = [x.bfloat16() for x in (q, k, v)]
    rescore = rescore_of(w, beta)
    exact = (x.float() for x in rounded)
    expected, _ = attention(*exact, None, backend="tiled", rescore=rescore)
    found, _ = attention(*rounded, None, backend="tiled", rescore=rescore)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.float(),
        expected,
        atol=2**-7,
        rtol=2**-7,
    )


def test_w_and_beta_equal_the_authors_layer():
    """Low-rank projection, convolution with SiLU, normalization; beta up to 2:
    fla/layers/path_attn.py.
    """
    encoding = build(small_model(position_encoding="path"))[0].encoding
    shapes = {key: declared.shape for key, declared in encoding.parameters(1).items()}
    p = {key: draw(*shape, seed=seed).detach() for seed, (key, shape) in enumerate(shapes.items())}
    hidden = draw(20, 2, 32, seed=7).detach()
    keys = draw(2, 2, 20, 8, seed=8).detach()
    positions = torch.arange(20.0)[:, None]
    inputs = encoding.position_inputs(1, p, positions, hidden, TokenCache())
    prepared = inputs.rescore.prepared(torch.zeros(2, 4, 20, 8), keys)

    w = linear(linear(hidden, p["w_down"]), p["w_up"]).permute(
        1,
        2,
        0,
    )
    w = silu(conv1d(w, p["conv"].flatten(0, 1)[:, None], padding=2, groups=16)[..., :20])
    w = w.unflatten(1, (2, 8)).mT
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * linear(hidden, p["beta_weight"], p["beta_bias"]).sigmoid().permute(
        1,
        2,
        0,
    )
    for found, expected in zip(prepared, blocks_of_reflections(keys, w, beta), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
