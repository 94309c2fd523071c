"""Backends of attention: each gives the same, and one that cannot run says why."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron_tape.config import ConfigError
from megatron_tape.ops import attention as ops
from megatron_tape.ops import tiled_attention
from megatron_tape.ops.attention import attention, choose_backend, document_bounds, document_mask

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in with flash-attn's interface: (B, S, H, D), or packed (tokens, H, D) with cumulative lengths."""

    def dense(q, k, v, causal):
        assert causal and q.shape[-1] == v.shape[-1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v, q_ends, k_ends, q_longest, k_longest, causal):
        assert q_ends.dtype == torch.int32 and int(q_ends.diff().max()) == q_longest == k_longest
        pieces = [dense(*(x[None, a:b] for x in (q, k, v)), causal) for a, b in q_ends.unfold(0, 2, 1).tolist()]
        return torch.cat(pieces, dim=1)[0]

    module = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("backend", ["torch", "tiled", "flash_attn"])
def test_a_backend_gives_what_the_naive_one_does(flash_attn, monkeypatch, backend, averages, packed):
    monkeypatch.setattr(tiled_attention, "QUERIES", 4)
    monkeypatch.setattr(tiled_attention, "KEYS", 6)
    generator = torch.Generator().manual_seed(0)
    shapes = [(21, 2, heads, 8) for heads in (6, 2, 2, 2)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    bounds = document_bounds(torch.arange(21) // torch.tensor([[4], [9]])) if packed else None
    results = []
    for name in (backend, "naive"):
        outputs = [x for x in attention(*tensors, averages, bounds, name) if x is not None]
        assert len(outputs) == 1 + averages
        results.append([*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], tensors)])
    torch.testing.assert_close(*results)


def test_documents_are_bounded_by_their_first_token_and_the_next_ones():
    bounds = document_bounds(torch.tensor([[0, 0, 1, 1, 1], [3, 4, 4, 5, 5]]))
    assert bounds.tolist() == [[[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]], [[2, 2, 5, 5, 5], [1, 3, 3, 5, 5]]]
    assert document_mask(bounds)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "backend, device, dtype, dim, installed, why",
    [
        ("triton", GPU, BF16, 64, False, "is not installed"),
        ("flash_attn", GPU, BF16, 64, False, "is not installed"),
        ("triton", CPU, BF16, 64, True, "needs a GPU, and this runs on cpu"),
        ("flash_attn", CPU, BF16, 64, True, "needs a GPU, and this runs on cpu"),
        ("triton", GPU, BF16, 48, True, "has heads of 32, 64, 80, 96, 128, not of 48"),
        ("flash_attn", GPU, torch.float32, 64, True, "computes in bf16 or fp16, not in float32"),
        ("flash_attn", GPU, BF16, 512, True, "has no heads of 512"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(monkeypatch, backend, device, dtype, dim, installed, why):
    monkeypatch.setattr(ops, "_not_importable", lambda name: None if installed else "is not installed")
    monkeypatch.setattr(ops, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=f"model.attention_backend is {backend}, which {why}; "):
        choose_backend(backend, device, dtype, dim, True)
    if device is GPU:
        assert choose_backend("auto", device, dtype, dim, backend == "triton") == "torch"


def test_auto_takes_what_is_fast(monkeypatch):
    monkeypatch.setattr(ops, "_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for averages, on_gpu, on_cpu in ((True, "triton", "tiled"), (False, "flash_attn", "torch")):
        assert choose_backend("auto", GPU, BF16, 64, averages) == on_gpu
        assert choose_backend("auto", CPU, BF16, 64, averages) == on_cpu
        assert choose_backend("torch", GPU, BF16, 64, averages) == "torch"


def test_old_gpus_and_broken_packages_are_told(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert ops.unsupported("flash_attn", GPU, BF16, 64) == "cannot be imported (ImportError)"
    monkeypatch.setattr(ops, "_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0 or newer" in ops.unsupported("triton", GPU, BF16, 64)


def test_keys_of_other_tokens_and_no_state_are_refused():
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(5, 1, 2, 8)
    for backend in ops.BACKENDS:
        with pytest.raises(ValueError, match="1 queries and 5 keys"):
            attention(q, k, k, None, backend=backend)
        with pytest.raises(ValueError, match="no position state"):
            attention(k, k, k, None, True, backend=backend)
