"""Content-dependent encodings, compared with their papers' equations and authors' code."""

from types import SimpleNamespace

import pytest
import torch
from comparing import assert_same, authors_form, draw
from models import small_model

from megatron_tape.ops import contextual
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.visibility import Visibility
from megatron_tape.position import encoding_of
from megatron_tape.position.encoding import NO_CACHE

TOKENS = 23
HEADS = 4
GROUPS = 2
DIM = 8
HIDDEN = 32
CHANGES = {"cope": {"cope_max_position": 4}, "fox": {}}
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 14, [0] * 23])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "QUERIES", 5)
    monkeypatch.setattr(tiled, "KEYS", 6)
    monkeypatch.setattr(contextual, "_QUERIES", 3)
    monkeypatch.setattr(contextual, "_KEYS", 4)


def heads(tokens=TOKENS):
    return [draw(tokens, 2, n, DIM, seed=seed) for seed, n in enumerate((HEADS, GROUPS, GROUPS))]


def encoding(name, **changes):
    tokens = SimpleNamespace(
        to_heads=lambda x: x, local_heads=lambda x, dim=0: x, local_tokens=lambda x: x
    )
    return type(encoding_of(small_model(position_encoding=name)))(
        small_model(position_encoding=name, **(CHANGES[name] | changes)), tokens
    )


def parameters_of(found):
    return {
        key: draw(*parameter.shape, seed=seed)
        for seed, (key, parameter) in enumerate(found.parameters(0).items())
    }


def cope_by_definition(q, k, v, table, documents):
    """Equations 3 to 6 of the paper, one pair at a time."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    rows = []
    for b in range(2):
        for h in range(HEADS):
            for s in range(TOKENS):
                scores = []
                counted = 0.0
                seen = []
                for t in range(s, -1, -1):
                    if documents[b, t] != documents[b, s]:
                        break
                    product = q[s, b, h] @ k[t, b, h] / DIM**0.5
                    counted = counted + product.sigmoid()
                    position = min(counted, torch.tensor(len(table) - 1.0, dtype=torch.float64))
                    low = int(position.floor())
                    high = int(position.ceil())
                    part = position - low
                    scores.append(
                        product + q[s, b, h] @ (part * table[high] + (1 - part) * table[low])
                    )
                    seen.append(v[t, b, h])
                rows.append(torch.stack(scores).softmax(0) @ torch.stack(seen))
    return (
        torch.stack(rows)
        .view(2, HEADS, TOKENS, DIM)
        .permute(
            2,
            0,
            1,
            3,
        )
    )


def test_cope_and_its_gradients_equal_the_papers_equations():
    q, k, v = heads()
    found = encoding("cope")
    table = parameters_of(found)["table"]
    expected = cope_by_definition(q, k, v, table, DOCUMENTS)
    rescored = found.position_inputs(
        0, {"table": table}, None, torch.zeros(TOKENS, 2, HIDDEN), NO_CACHE
    )
    for backend in ("naive", "tiled"):
        ours = attention(
            q, k, v, visibility=Visibility.of(DOCUMENTS), backend=backend, **vars(rescored)
        )[0]
        assert_same(ours, expected, (q, k, v, table))


@pytest.mark.parametrize("queries", [1, TOKENS])
def test_cope_skips_masked_keys_between_visible_ones(queries):
    """As in generation after right padding; the masked range may be wider than a tile."""
    scores = draw(2, HEADS, queries, TOKENS).detach()
    of_positions = draw(2, HEADS, queries, 9).detach()
    shown = torch.ones(TOKENS, dtype=torch.bool)
    shown[8:14] = False
    seen = (torch.arange(TOKENS) <= torch.arange(TOKENS)[-queries:, None]) & shown
    found = contextual.add_contextual_positions(scores, of_positions, seen[None, None])
    kept = shown[-queries:]
    scores = scores[:, :, kept][..., shown]
    seen = seen[kept][:, shown]
    expected = contextual.add_contextual_positions(
        scores, of_positions[:, :, kept], seen[None, None]
    )
    torch.testing.assert_close(
        found[:, :, kept][..., shown] * seen,
        expected * seen,
    )


@pytest.mark.parametrize("backend", ["naive", "tiled", "torch"])
def test_fox_and_its_gradients_equal_flash_linear_attention(monkeypatch, backend):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    found = encoding("fox")
    hidden = draw(TOKENS, 2, HIDDEN, seed=5)
    tensors = heads()
    parameters = parameters_of(found)
    logits = hidden @ parameters["gate"].T / HIDDEN**0.5 + parameters["gate_bias"]
    assert 0.1 < logits.sigmoid().std()
    q, k, v, gates = (x.transpose(0, 1) for x in (*tensors, logits.sigmoid().log()))
    expected = authors_form("forgetting_attn").naive_forgetting_attn(q, k, v, gates).transpose(0, 1)
    inputs = found.position_inputs(0, parameters, None, hidden / HIDDEN**0.5, NO_CACHE)
    ours = attention(*tensors, backend=backend, **vars(inputs))[0]
    assert_same(ours, expected, [*tensors, hidden, *parameters.values()])
