"""FlexAttention, uncompiled, and flash-linear-attention's calls, with its plain form instead of the kernels."""

import ast
import importlib.util
import inspect
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import build, small_model
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import logsigmoid

from megatron_tape.errors import ConfigError
from megatron_tape.model import backend as model_backend
from megatron_tape.model.backend import kernel_shapes, verified_backend
from megatron_tape.ops import parity
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import BIAS, GATE, POINTWISE, ROTATION, SCORES, choice, flex
from megatron_tape.ops.backends.choice import choose_backend
from megatron_tape.ops.bias import Bias, gates_as_bias
from megatron_tape.ops.packing import Packing
from megatron_tape.position.base import NO_MEMORY

LENGTH, HEADS, GROUPS, DIM = 21, 6, 2, 16
CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
PACKING = Packing.of(torch.arange(LENGTH) // torch.tensor([[4], [9]]))


@pytest.fixture(autouse=True)
def gradients_on_a_cpu(monkeypatch):
    """torch refuses them there, although its uncompiled form has them."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def inputs(queries=LENGTH):
    return [draw(queries, 2, HEADS, DIM), *(draw(LENGTH, 2, GROUPS, DIM, seed=seed) for seed in (1, 2, 3))]


def table_bias(table):
    """A learned bias by distance and head."""

    def tile(rows, columns, table):
        at = [torch.arange(x.start, x.stop) for x in (rows, columns)]
        return table[(at[0][:, None] - at[1]).clamp(0, 11)].permute(2, 0, 1)[None]

    return Bias(tile, (table,), lambda b, h, q, k, table: table[(q - k).clamp(0, 11), h])


@pytest.mark.parametrize("queries", [LENGTH, 9, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_gives_what_the_naive_backend_does_with_every_gradient(packed, queries):
    tensors, rotated = inputs(queries), queries == LENGTH
    table, logits = draw(12, HEADS, seed=5), draw(LENGTH, 2, HEADS, seed=6)
    found = []
    for backend in ("flex", "naive"):
        q, k, v, z = tensors
        changes = {"bias": table_bias(table), "log_gate_TBH": logsigmoid(logits)}
        o, _ = attention(q, k, v, z, False, PACKING if packed else None, backend, rotate=rotated, **changes)
        leaves = [*tensors, table, logits] if rotated else [*tensors[:3], table, logits]
        found.append([o, *torch.autograd.grad(o, leaves, draw(*o.shape, seed=9).detach())])
    torch.testing.assert_close(*found)


def test_flex_needs_no_bias_and_knows_its_segments_heads():
    q, k, v, z = inputs()
    torch.testing.assert_close(
        attention(q, k, v, z, packing=PACKING, backend="flex"), attention(q, k, v, z, packing=PACKING, backend="naive")
    )
    bias = table_bias(draw(12, HEADS, seed=5)).of_heads(slice(3, 6))
    torch.testing.assert_close(
        attention(q[:, :, 3:], k[:, :, 1:], v[:, :, 1:], None, backend="flex", bias=bias),
        attention(q[:, :, 3:], k[:, :, 1:], v[:, :, 1:], None, backend="naive", bias=bias),
    )


def pair_by_pair(bias, batch, heads, tokens):
    """Every pair's bias from `score`, (B, H, S, S)."""
    score = bias.score
    for axes in ((None,) * 3 + (0,), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        score = torch.vmap(score, in_dims=axes + (None,) * len(bias.tensors))
    at = torch.arange(tokens)
    return score(torch.arange(batch), torch.arange(heads), at, at, *bias.tensors)


@pytest.mark.parametrize("name", ["alibi", "t5", "gates"])
def test_a_bias_pair_by_pair_is_the_one_tile_by_tile(name):
    logits, tokens = draw(40, 2, 4, seed=3), 40
    if name == "gates":
        bias = gates_as_bias(logsigmoid(logits.float()), table_bias(draw(12, 4)).in_float32())
    else:
        built, _ = build(small_model(position_encoding=name))
        parameters = {key: draw(*x.shape).float() for key, x in built.encoding.parameters(0).items()}
        bias = built.encoding.positions(0, parameters, None, torch.zeros(40, 2, 32), NO_MEMORY).bias
        assert built.encoding.needs == {POINTWISE}
    pairs, tiles = pair_by_pair(bias, 2, 4, tokens), bias.of(slice(0, tokens), slice(0, tokens))
    # A tile of gates may leave out a number for each query.
    pairs, tiles = ((x - x[..., :1]).expand(2, -1, tokens, -1).tril() for x in (pairs, tiles))
    assert pairs.std() > 0.1
    torch.testing.assert_close(pairs, tiles, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("S, T", [(300, 300), (256, 256), (40, 300), (1, 129), (130, 390)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_blocks_of_a_mask_are_those_found_pair_by_pair(S, T, packed):
    starts = Packing.of(torch.arange(T) // torch.tensor([[70], [140]])).bounds_2BT[0] if packed else None
    ours = flex.block_mask(S, T, starts, CPU)
    theirs = create_block_mask(ours.mask_mod, 2 if packed else 1, 1, S, T, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.fixture
def fla(monkeypatch):
    """A stand-in with the interface of the installed package, which computes with its plain form."""
    folder = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops" / "forgetting_attn"
    spec = importlib.util.spec_from_file_location("fla_naive", folder / "naive.py")
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    def parallel_forgetting_attn(q, k, v, g, scale=None, window_size=None, cu_seqlens=None):
        assert all(x.is_contiguous() for x in (q, k, v, g)) and g.shape == q.shape[:3] and window_size is None
        if cu_seqlens is None:
            return plain.naive_forgetting_attn(q, k, v, g, scale)
        assert len(q) == 1 and cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == q.shape[1]
        ends = cu_seqlens.unfold(0, 2, 1).tolist()
        return torch.cat([plain.naive_forgetting_attn(*(x[:, a:b] for x in (q, k, v, g)), scale) for a, b in ends], 1)

    tree = ast.parse((folder / "parallel.py").read_text())
    theirs = next(node for node in tree.body if getattr(node, "name", "") == "parallel_forgetting_attn")
    assert [x.arg for x in theirs.args.args] == [*inspect.signature(parallel_forgetting_attn).parameters]
    for name in ("fla", "fla.ops", "fla.ops.forgetting_attn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.forgetting_attn"].parallel_forgetting_attn = parallel_forgetting_attn


@pytest.mark.parametrize("packed", [False, True])
def test_fla_is_given_what_the_naive_backend_computes_with(fla, packed):
    tensors, logits, found = inputs(), draw(LENGTH, 2, HEADS, seed=6), []
    for backend in ("fla", "naive"):
        o, _ = attention(*tensors, False, PACKING if packed else None, backend, log_gate_TBH=logsigmoid(logits))
        found.append([o, *torch.autograd.grad(o, [*tensors, logits], draw(*o.shape, seed=9).detach())])
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="fla, which cannot attend from 1 queries to 21 keys; use tiled"):
        attention(*inputs(1)[:3], None, backend="fla", log_gate_TBH=logsigmoid(logits))


def chosen(device, needs, wanted="auto", dtype=BF16, dim=64):
    return choose_backend(wanted, device, dtype, dim, needs).backend


@pytest.fixture
def gpu(monkeypatch):
    installed = {"triton", "fla.ops.forgetting_attn"}
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None if name in installed else "is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return installed


def test_a_gpu_prefers_kernels_for_what_they_can_do(gpu):
    assert chosen(GPU, {GATE}) == chosen(GPU, {ROTATION, GATE}) == "fla"
    assert chosen(GPU, {GATE}, dtype=torch.float32) == chosen(GPU, {POINTWISE}) == "flex"
    assert chosen(GPU, {GATE, POINTWISE}) == "flex"
    assert chosen(GPU, {BIAS}) == chosen(GPU, {SCORES}) == chosen(GPU, {GATE}, dim=512) == "tiled"
    assert chosen(GPU, {GATE}, dtype=torch.float64) == "tiled"
    assert {chosen(CPU, {need}) for need in (POINTWISE, BIAS, GATE, SCORES)} == {"tiled"}
    gpu.remove("fla.ops.forgetting_attn")
    assert chosen(GPU, {GATE}) == "flex"
    gpu.clear()
    assert chosen(GPU, {GATE}) == "tiled"


@pytest.mark.parametrize(
    "wanted, device, needs, changes, why",
    [
        ("flex", GPU, {BIAS}, {}, "cannot add a bias to the scores, tile by tile"),
        ("flex", GPU, {SCORES}, {}, "cannot compute scores from whole rows"),
        ("fla", GPU, {POINTWISE}, {}, "cannot add a bias to the scores, pair by pair"),
        ("flex", CPU, {GATE}, {}, "needs a GPU, and this runs on cpu"),
        ("fla", CPU, {GATE}, {}, "needs a GPU, and this runs on cpu"),
        ("fla", GPU, {GATE}, {"dtype": torch.float32}, "computes in bfloat16 or float16, not in float32"),
        ("flex", GPU, {GATE}, {"dim": 8}, "does not support heads of 8"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(gpu, wanted, device, needs, changes, why):
    with pytest.raises(ConfigError, match=f"model.attention_backend is {wanted}, which {why}; "):
        chosen(device, needs, wanted, **changes)


def test_a_bias_that_is_only_computed_by_tiles_is_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="flex, which cannot add a bias to the scores, tile by tile"):
        attention(q, k, v, None, backend="flex", bias=Bias(lambda rows, columns: torch.zeros(1, 1, 1, 1)))


def test_kernels_are_compared_with_plain_torch_before_a_run(monkeypatch, gpu, caplog):
    shapes = kernel_shapes(small_model(position_encoding="alibi", kv_channels=16))
    checks = parity.score_checks("flex", shapes, torch.float32, CPU, 40)
    assert len(checks) == 4 and len(parity.score_checks("fla", shapes, torch.float32, CPU, 40)) == 2
    assert all(parity.inexact(*check, torch.float32) is None for check in checks.values())
    monkeypatch.setattr(parity, "LENGTH", 40)
    parity.check_fused_kernels(shapes, torch.float32, CPU, "flex")

    exact = flex.attend
    monkeypatch.setattr(flex, "attend", lambda x: tuple(1.01 * y for y in exact(x)))
    with pytest.raises(ConfigError, match="the flex kernel of the attention with gates does not work here .* to tiled"):
        parity.check_fused_kernels(shapes, torch.float32, CPU, "flex")

    layout = SimpleNamespace(
        device="cuda",
        tensor_parallel_size=1,
        context_parallel_size=1,
        any_rank=lambda value: value,
        first_on_node=nullcontext,
    )
    check = parity.check_fused_kernels
    monkeypatch.setattr(
        model_backend, "check_fused_kernels", lambda shapes, dtype, device, backend: check(shapes, dtype, CPU, backend)
    )
    model = dict(position_encoding="alibi", kv_channels=16)
    with caplog.at_level(logging.INFO):
        assert verified_backend(small_model(**model), layout, torch.float32) == "tiled"
        assert "WARNING: training continues with slower attention in plain torch: the flex kernel" in caplog.text
        with pytest.raises(ConfigError, match="the flex kernel of the attention with gates does not work here"):
            verified_backend(small_model(**model, attention_backend="flex"), layout, torch.float32)
        monkeypatch.setattr(flex, "attend", exact)
        assert verified_backend(small_model(**model), layout, torch.float32) == "flex"
        assert "the kernels of flex agree with plain torch here" in caplog.text
