"""Calls of flash-linear-attention's kernels for forget gates and PaTH, with plain implementations
in their place.
"""

import ast
import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from comparing import assert_same, authors_form, draw, draw_qkvz
from models import small_model
from torch.nn.functional import logsigmoid, normalize

from megatron_tape.model.backend import kernel_shapes
from megatron_tape.ops import parity
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.decay import STRONGEST, with_decay
from megatron_tape.ops.householder import through_reflections
from megatron_tape.ops.visibility import Visibility

LENGTH = 70
HEADS = 6
GROUPS = 2
DIM = 16
DOCUMENTS = torch.arange(LENGTH) // torch.tensor([[14], [40]])
IN_DOCUMENTS = Visibility.of(DOCUMENTS)
WHOLE = Visibility.of_whole(DOCUMENTS)


def stand_in(monkeypatch, name, make):
    """Replace fla's `parallel_NAME` by `make(plain)`, a function with the same parameters; return
    fla's module.

    `plain` is the package's own plain form.
    """
    plain = authors_form(name)
    tree = ast.parse(Path(plain.__file__).with_name("parallel.py").read_text())
    theirs = next(node for node in tree.body if getattr(node, "name", "") == f"parallel_{name}")
    ours = make(plain)
    assert [x.arg for x in theirs.args.args] == [*inspect.signature(ours).parameters]
    for module in ("fla", "fla.ops", f"fla.ops.{name}"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module, ModuleType(module)))
    module = ModuleType(f"fla.ops.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, f"parallel_{name}", ours)
    return module


def documents(q, cu_seqlens):
    """Return the start and end of each document of packed sequences."""
    if cu_seqlens is None:
        return [(0, q.shape[1])]
    assert len(q) == 1
    assert cu_seqlens.dtype == torch.int64
    assert cu_seqlens[-1] == q.shape[1]
    return cu_seqlens.unfold(0, 2, 1).tolist()


def gates(plain):
    def parallel_forgetting_attn(q, k, v, g, scale=None, window_size=None, cu_seqlens=None):
        assert all(x.is_contiguous() for x in (q, k, v, g))
        assert g.shape == q.shape[:3]
        parts = [[x[:, a:b] for x in (q, k, v, g)] for a, b in documents(q, cu_seqlens)]
        return torch.cat(
            [plain.naive_forgetting_attn(*part, scale, window_size) for part in parts],
            dim=1,
        )

    return parallel_forgetting_attn


def path(plain):
    def parallel_path_attn(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False):
        tensors = [x for x in (q, k, v, w, beta, g) if x is not None]
        assert all(x.is_contiguous() for x in tensors)
        assert not use_cache
        assert scale is None
        assert {x.dtype for x in tensors[3:]} == {torch.float64}
        assert w.shape == k.shape
        assert beta.shape == k.shape[:3]
        if g is None:
            g = q.new_zeros(q.shape[:3])
        assert g.shape == q.shape[:3]
        parts = [[x[:, a:b] for x in (q, k, v, w, beta, g)] for a, b in documents(q, cu_seqlens)]
        return torch.cat(
            [plain.naive_path_attn(*part, q.shape[-1] ** -0.5) for part in parts], dim=1
        ), k

    return parallel_path_attn


@pytest.fixture
def fla(monkeypatch):
    """Install both stand-ins, which compute in float64; return the module of PaTH."""
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    stand_in(monkeypatch, "forgetting_attn", gates)
    yield stand_in(monkeypatch, "path_attn", path)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "visibility",
    [None, IN_DOCUMENTS, WHOLE.with_window(20), IN_DOCUMENTS.with_window(9)],
)
@pytest.mark.parametrize(
    "reflects, gated",
    [(False, False), (False, True), (True, False), (True, True)],
)
def test_fla_gets_the_inputs_of_the_naive_backend(fla, reflects, gated, visibility):
    q, k, v, z = draw_qkvz(LENGTH, HEADS, GROUPS, DIM)
    w = draw(LENGTH, 2, GROUPS, DIM, seed=5)
    betas = draw(LENGTH, 2, GROUPS, seed=5)
    logits = draw(LENGTH, 2, HEADS, seed=5)
    options = {"visibility": visibility}
    leaves = [q, k, v]
    if gated:
        options["log_gate_TBH"] = logsigmoid(logits)
        leaves.append(logits)
    if reflects:
        options["rescore"] = through_reflections(
            lambda w, b: (normalize(w, dim=-1), 2 * b.sigmoid()), (w, betas)
        )
        leaves += [w, betas]
    else:
        options["z_TBGD"] = z
        leaves.append(z)
    if reflects and visibility is not None and visibility.window is not None:
        with pytest.raises(ValueError, match="sliding window and apply the reflections|at once"):
            attention(q, k, v, backend="fla", **options)
        return
    ours, theirs = (attention(q, k, v, backend=name, **options) for name in ("fla", "naive"))
    assert_same(ours, theirs, leaves)
    with pytest.raises(ValueError, match="use tiled"):
        attention(q[:1], k, v, backend="fla", **options, rotate=False)


def test_the_kernels_are_compared_with_plain_torch_before_a_run(fla, monkeypatch):
    monkeypatch.setattr(parity, "LENGTH", 40)
    shapes = kernel_shapes(small_model(position_encoding="path_fox", kv_channels=16))
    failure = partial(parity.backend_fails, "fla", shapes, torch.float32, torch.device("cpu"))
    assert failure() is None
    kernel = fla.parallel_path_attn
    fla.parallel_path_attn = lambda q, k, v, w, beta, *rest, **options: kernel(
        q, k, v, w, 0.99 * beta, *rest, **options
    )
    assert "does not work here (attention through reflections" in failure()


@pytest.fixture
def interpreted_wall(monkeypatch):
    """Let Triton's interpreter run the kernels of Wall attention, apart from their running sums."""
    import fla.ops.wall_attn.parallel as kernels

    def chunk_global_cumsum(g, reverse=False, cu_seqlens=None, scale=None):
        parts = g.split(cu_seqlens.diff().tolist(), dim=1)
        sums = [part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1) for part in parts]
        return torch.cat(sums, dim=1) * (1.0 if scale is None else scale)

    monkeypatch.setattr(kernels, "chunk_global_cumsum", chunk_global_cumsum)
    monkeypatch.setattr(kernels, "check_shared_mem", lambda *device: False)


@pytest.mark.parametrize("window, strength", [(None, 1), (50, 1), (50, 0.02)])
def test_the_kernels_of_wall_attention_equal_tiled_with_strong_and_weak_decays(
    interpreted_wall, window, strength
):
    """Documents pass the kernels' autotuning, which needs a GPU. Documents of more than 88 tokens
    that do not fill a block would get gradients that are NaN without the changed first decays. Only
    with weak decays, tokens outside of the window would have weight.
    """
    length = 230
    visibility = Visibility.of((torch.arange(length) >= 130).long()[None])
    if window is not None:
        visibility = visibility.with_window(window)
    qkv = [draw(length, 1, n, DIM, seed=i, dtype=torch.float32) for i, n in enumerate((2, 1, 1))]
    logits = draw(length, 1, 2, DIM, seed=5, dtype=torch.float32)
    gate_logits = draw(length, 1, 2, seed=6, dtype=torch.float32)
    sink = draw(2, seed=7, dtype=torch.float32)
    changes = {
        "rescore": with_decay(-strength * STRONGEST * (2 * logits + 2).sigmoid()),
        "log_gate_TBH": strength * logsigmoid(gate_logits),
        "sink_H": sink,
        "visibility": visibility,
    }
    ours, theirs = (attention(*qkv, backend=name, **changes) for name in ("fla", "tiled"))
    leaves = [*qkv, logits, gate_logits, sink]
    assert_same(ours, theirs, leaves, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scalar_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_before_a_run_covers_decays(monkeypatch, dtype, scalar_gate):
    """The backend tiled, which runs here, stands in for the kernels."""
    monkeypatch.setattr(parity, "LENGTH", 150)
    model = small_model(
        position_encoding="wall", kv_channels=16, sliding_window=5, wall_scalar_gate=scalar_gate
    )
    device = torch.device("cpu")
    checks = parity.score_checks("tiled", kernel_shapes(model), dtype, device)
    assert list(checks) == [
        f"attention with decays{suffix}" for suffix in ("", parity.PACKED, parity.WINDOWED)
    ]
    assert parity.first_failure(checks, dtype, device) is None
    inputs = next(iter(checks.values())).inputs
    assert len(inputs) == 5 + scalar_gate

    exact = tiled.attend
    monkeypatch.setattr(tiled, "attend", lambda x: exact(without_window(x)))
    assert parity.WINDOWED in parity.first_failure(checks, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_before_a_run_notices_gates_without_a_window(monkeypatch, dtype):
    device = torch.device("cpu")
    shapes = kernel_shapes(small_model(position_encoding="fox", kv_channels=16, sliding_window=5))
    checks = parity.score_checks("tiled", shapes, dtype, device)
    assert parity.first_failure(checks, dtype, device) is None
    exact = tiled.attend
    monkeypatch.setattr(tiled, "attend", lambda x: exact(without_window(x)))
    assert parity.WINDOWED in parity.first_failure(checks, dtype, device)


def without_window(x):
    """Return inputs of attention without their window, as a kernel that ignores it."""
    if x.window is None:
        return x
    return replace(x, visibility=None)
