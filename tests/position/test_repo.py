"""RePo, compared with its defining equations."""

import pytest
import torch
from comparing import assert_same, draw
from models import build, move_positions, random_tokens, small_model
from torch.nn.functional import linear, silu

from megatron_tape.ops.attention import attention
from megatron_tape.position import encoding_of
from megatron_tape.position.encoding import NO_CACHE

B = 2
S = 19
H = 4
G = 2
D = 8
C = 32
W = 5


def model_of(**changes):
    return small_model(position_encoding="repo", repo_width=W, **changes)


def built_and_moved(dtype=torch.float32, **changes):
    """Build a model whose predicted positions differ by several tokens."""
    return move_positions(build(model_of(**changes), dtype=dtype)[0])


def by_the_equations(h, gate, content, position, q, k, v, theta):
    """Compute attention with complex products, one head at a time."""
    r = (h @ gate.T) * torch.sigmoid(h @ gate.T) * (h @ content.T)
    z = r @ position.T
    out = []
    for head in range(H):
        group = head * G // H
        z_1 = z[:, :, group].T
        angles = (z_1[:, :, None] - z_1[:, None])[..., None] * theta
        (q_re, q_im), (k_re, k_im) = (
            x.transpose(0, 1).chunk(2, -1) for x in (q[:, :, head], k[:, :, group])
        )
        query = torch.complex(q_re, q_im)
        key = torch.complex(k_re, k_im)
        turned = query[:, :, None] * torch.polar(torch.ones_like(angles), angles)
        scores = (turned * key[:, None].conj()).real.sum(-1) / D**0.5
        scores = scores.masked_fill(
            torch.ones(S, S).triu(1).bool(),
            float("-inf"),
        )
        out.append(
            (scores.softmax(-1) @ v[:, :, group].transpose(0, 1)).transpose(
                0,
                1,
            )
        )
    return torch.stack(out, 2)


@pytest.mark.parametrize("backend", ["naive", "tiled", "torch"])
def test_outputs_and_gradients_equal_the_equations(backend):
    encoding = build(model_of())[0].encoding
    shapes = [
        (S, B, C),
        (W, C),
        (W, C),
        (G, W),
        (S, B, H, D),
        (S, B, G, D),
        (S, B, G, D),
    ]
    leaves = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    h, gate, content, position, q, k, v = leaves
    parameters = {"gate_proj": gate, "content_proj": content, "position_proj": position}
    inputs = encoding.position_inputs(1, parameters, None, h, NO_CACHE)
    found, _ = attention(q, k, v, **vars(inputs), backend=backend)
    expected = by_the_equations(*leaves, encoding.frequencies().double())
    assert_same(found, expected, leaves, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "first, layers, expected",
    [(None, 6, 2), (None, 1, 0), (2, 3, 2)],
)
def test_layers_predict_positions_from_repo_first_layer_on(first, layers, expected):
    encoding = encoding_of(model_of(repo_first_layer=first, num_layers=layers))
    predicting = [layer for layer in range(layers) if encoding.parameters(layer)]
    assert predicting == list(range(expected, layers))


def test_predicted_positions_do_not_depend_on_the_tokens_places():
    ids = random_tokens()
    shift = torch.arange(16) + 500
    some = built_and_moved()
    everywhere = built_and_moved(repo_first_layer=0)
    torch.testing.assert_close(
        some(ids),
        some(ids, positions=shift),
        atol=2e-4,
        rtol=1e-3,
    )
    assert (some(ids) - some(ids, positions=shift * 2)).abs().max() > 1e-3
    assert torch.equal(everywhere(ids), everywhere(ids, positions=shift * 2))


def test_positions_are_fp32_in_a_bf16_model():
    built = built_and_moved(torch.bfloat16)
    parameters = dict(built.layers["1"].position.named_parameters())
    h = torch.randn(S, B, C, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = {name: weight.double() for name, weight in parameters.items()}
    with torch.no_grad():
        found = built.encoding.predicted_positions(parameters, h)
        expected = built.encoding.predicted_positions(exact, h.double())
        gate, content, position = parameters.values()
        in_bf16 = linear(silu(linear(h, gate)) * linear(h, content), position)
    assert found.dtype == torch.float32
    assert expected.abs().max() > 8
    assert (found - expected).norm() < (in_bf16 - expected).norm()
