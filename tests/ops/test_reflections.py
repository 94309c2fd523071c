"""flash-linear-attention's kernels of PaTH: what they are given and when they are chosen, with a plain form instead."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from models import small_model
from torch.nn.functional import logsigmoid, normalize

from megatron_tape.errors import ConfigError
from megatron_tape.model.backend import kernel_shapes
from megatron_tape.ops import parity
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import GATE, REFLECTIONS, choice
from megatron_tape.ops.backends.choice import choose_backend
from megatron_tape.ops.householder import through_reflections
from megatron_tape.ops.packing import Packing
from megatron_tape.position import encoding_of

LENGTH, HEADS, GROUPS, DIM = 70, 6, 2, 16
CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
PACKING = Packing.of(torch.arange(LENGTH) // torch.tensor([[14], [40]]))


@pytest.fixture
def fla(monkeypatch):
    """A stand-in with the interface of the installed package, which computes with its plain form, in float64."""
    folder = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops" / "path_attn"
    spec = importlib.util.spec_from_file_location("naive_path", folder / "naive.py")
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    exact = torch.float64
    monkeypatch.setattr(torch, "float", exact)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(exact)

    def parallel_path_attn(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False):
        given = [x for x in (q, k, v, w, beta, g) if x is not None]
        assert all(x.is_contiguous() for x in given) and not use_cache and scale is None
        assert {x.dtype for x in given[3:]} == {exact} and w.shape == k.shape and beta.shape == k.shape[:3]
        gates = q.new_zeros(q.shape[:3]) if g is None else g
        assert gates.shape == q.shape[:3]
        ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert ends[-1] == q.shape[1] and (cu_seqlens is None or len(q) == 1)
        parts = [
            plain.naive_path_attn(*(x[:, a:b] for x in (q, k, v, w, beta, gates)), q.shape[-1] ** -0.5)
            for a, b in zip(ends, ends[1:])
        ]
        return torch.cat(parts, dim=1), k

    tree = ast.parse((folder / "parallel.py").read_text())
    theirs = next(node for node in tree.body if getattr(node, "name", "") == "parallel_path_attn")
    assert [x.arg for x in theirs.args.args] == [*inspect.signature(parallel_path_attn).parameters]
    for name in ("fla", "fla.ops", "fla.ops.path_attn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.path_attn"].parallel_path_attn = parallel_path_attn
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_fla_is_given_what_the_naive_backend_computes_with(fla, gated, packed):
    torch.manual_seed(0)
    shapes = [(LENGTH, 2, HEADS, DIM), *[(LENGTH, 2, GROUPS, DIM)] * 3, (LENGTH, 2, GROUPS), (LENGTH, 2, HEADS)]
    q, k, v, w, betas, logits = leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    rescore = through_reflections(lambda w, betas: (normalize(w, dim=-1), 2 * betas.sigmoid()), (w, betas))
    direction, found, gates = torch.randn(shapes[0]), [], logsigmoid(logits) if gated else None
    for backend in ("fla", "naive"):
        given = {"packing": PACKING if packed else None, "rescore": rescore, "log_gate_TBH": gates}
        o, _ = attention(q, k, v, None, backend=backend, **given)
        found.append([o, *torch.autograd.grad(o, leaves if gated else leaves[:5], direction, retain_graph=True)])
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="fla, which cannot attend from 1 queries to 70 keys; use tiled"):
        attention(q[:1], k, v, None, backend="fla", rescore=rescore)


def chosen(needs, wanted="auto", device=GPU, dtype=BF16, dim=64):
    return choose_backend(wanted, device, dtype, dim, needs).backend


def test_a_gpu_runs_them_at_their_widths(monkeypatch):
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    path, with_gates = (encoding_of(small_model(position_encoding=name)).needs for name in ("path", "path_fox"))
    assert (path, with_gates) == ({REFLECTIONS}, {REFLECTIONS, GATE})
    assert chosen(path) == chosen(with_gates, dim=128) == "fla"
    assert chosen(path, dim=96) == chosen(path, dtype=torch.float32) == chosen(path, device=CPU) == "tiled"
    assert chosen({GATE}, dim=96) == "fla"
    with pytest.raises(ConfigError, match="fla, which applies reflections to heads of 16, 32, 64, 128, not 96; "):
        chosen(path, "fla", dim=96)
    with pytest.raises(ConfigError, match="flex, which cannot apply the reflections of all tokens between a key and"):
        chosen(path, "flex")


def test_the_kernels_are_compared_with_plain_torch_before_a_run(fla, monkeypatch):
    shapes = kernel_shapes(small_model(position_encoding="path_fox", kv_channels=16))
    checks = parity.score_checks("fla", shapes, torch.float32, CPU, 40)
    assert len(checks) == 4 and all("reflections" in name for name in checks)
    assert len(parity.score_checks("fla", kernel_shapes(small_model(position_encoding="fox")), BF16, CPU, 40)) == 2
    monkeypatch.setattr(parity, "LENGTH", 40)
    parity.check_fused_kernels(shapes, torch.float32, CPU, "fla")
    kernel = sys.modules["fla.ops.path_attn"].parallel_path_attn

    def forgetful(q, k, v, w, beta, *rest, **options):
        return kernel(q, k, v, w, 0.99 * beta, *rest, **options)

    sys.modules["fla.ops.path_attn"].parallel_path_attn = forgetful
    with pytest.raises(ConfigError, match="the fla kernel of the attention through reflections does not work here"):
        parity.check_fused_kernels(shapes, torch.float32, CPU, "fla")
