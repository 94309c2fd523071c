"""Attention backends: all give the same results, and refuse what does not fit together."""

import contextlib
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same, draw_qkvz
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import BACKENDS, choice, cudnn
from megatron_tape.ops.backends import tiled as tiled_attention
from megatron_tape.ops.packing import Packing, causal_mask, document_bounds
from megatron_tape.ops.rotation import rotate_groups

CPU = torch.device("cpu")


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in with flash-attn's interface: (B, S, H, D), or packed (tokens, H, D) with cumulative lengths."""

    def dense(q, k, v, causal, deterministic):
        assert causal and deterministic == torch.are_deterministic_algorithms_enabled() and q.shape[-1] == v.shape[-1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v, q_ends, k_ends, q_longest, k_longest, causal, deterministic):
        for ends, longest in ((q_ends, q_longest), (k_ends, k_longest)):
            assert ends.dtype == torch.int32 and int(ends.diff().max()) == longest
        pieces = [
            dense(q[None, a:b], *(x[None, c:d] for x in (k, v)), causal, deterministic)
            for (a, b), (c, d) in zip(*(ends.unfold(0, 2, 1).tolist() for ends in (q_ends, k_ends)), strict=True)
            if a < b
        ]
        return torch.cat(pieces, dim=1)[0]

    module = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    # Early versions of flash-attn 3 return the logarithms of the sums as well.
    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = lambda *given, **settings: (dense(*given, **settings), torch.zeros(1))
    module.flash_attn_varlen_func = packed
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


@pytest.mark.parametrize("queries", [21, 9, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("backend", ["torch", "tiled", "flash_attn", "flash_attn_3"])
def test_a_backend_gives_what_the_naive_one_does(flash_attn, monkeypatch, backend, averages, packed, queries):
    monkeypatch.setattr(tiled_attention, "QUERIES", 4)
    monkeypatch.setattr(tiled_attention, "KEYS", 6)
    tensors = draw_qkvz(21, 6, 2, 8, queries)
    packing = Packing.of(torch.arange(21) // torch.tensor([[4], [9]])) if packed else None
    ours, theirs = (attention(*tensors, averages, packing, name, rotate=queries == 21) for name in (backend, "naive"))
    assert (ours[1] is not None) == averages
    assert_same(ours, theirs, tensors)


def test_cudnn_computes_with_no_other_kernel(monkeypatch):
    """There is none on a CPU, so that only what torch is asked for can be seen."""
    asked = []

    @contextlib.contextmanager
    def kernels(wanted):
        asked.append(wanted)
        yield
        asked.append(None)

    monkeypatch.setattr(cudnn, "sdpa_kernel", kernels)
    tensors = draw_qkvz(21, 6, 2, 8)
    ours, theirs = (attention(*tensors, True, None, name) for name in ("cudnn", "naive"))
    assert asked == [SDPBackend.CUDNN_ATTENTION, None]
    assert_same(ours, theirs, tensors)
    # It has none for a single key, with which a text begins that is sampled from one token.
    tensors = draw_qkvz(1, 6, 2, 8)
    ours, theirs = (attention(*tensors, True, None, name) for name in ("cudnn", "naive"))
    assert len(asked) == 2
    assert_same(ours, theirs, tensors)


@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_3"])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn_is_asked_for_its_deterministic_kernel(flash_attn, packed, backend):
    tensors = draw_qkvz(21, 6, 2, 8)
    packing = Packing.of(torch.arange(21) // torch.tensor([[4], [9]])) if packed else None
    torch.use_deterministic_algorithms(True)
    try:
        attention(*tensors, False, packing, backend)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("backend", ["torch", "tiled", "flash_attn", "naive"])
def test_decoding_with_a_cache_gives_the_rows_of_the_whole(flash_attn, backend, padding):
    q, k, v, z = draw_qkvz(12, 4, 2, 8)
    # The second sequence is shorter, and so begins with padding.
    bounds = document_bounds((torch.arange(12) >= torch.tensor([[0], [padding]])).long()) if padding else None
    whole = attention(q, k, v, z, True, None if bounds is None else Packing(bounds), "naive")
    turned_q, turned_k = rotate_groups(q, z), rotate_groups(k, z)
    for a, b in ((0, 7), (7, 8), (8, 9), (9, 12)):  # a prompt, tokens one by one, a few at once
        cache = (x[:b] for x in (turned_k, v, z))
        seen = bounds if bounds is None else Packing(bounds[:, :, :b].clamp(max=b))
        ours = attention(turned_q[a:b], *cache, True, seen, backend, rotate=False)
        for x, y in zip(ours, whole, strict=True):
            torch.testing.assert_close(x, y[a:b])


def test_documents_are_bounded_by_their_first_token_and_the_next_ones():
    bounds = document_bounds(torch.tensor([[0, 0, 1, 1, 1], [3, 4, 4, 5, 5]]))
    assert bounds.tolist() == [[[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]], [[2, 2, 5, 5, 5], [1, 3, 3, 5, 5]]]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert causal_mask(5, 5, bounds, CPU)[0, 0].int().tolist() == expected
    assert causal_mask(2, 5, bounds, CPU)[0, 0].int().tolist() == expected[3:]
    assert causal_mask(2, 5, None, CPU).int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]


def test_what_does_not_fit_together_is_refused():
    one, five, six = (torch.zeros(n, 1, 2, 8) for n in (1, 5, 6))
    for message, arguments in (
        (r"queries \(6, .* have keys \(5, .*: each query's own token", (six, five, five, five)),
        ("1 queries have 5 keys: cached keys were rotated .* pass rotate=False", (one, five, five, five)),
        ("there is no position state to average", (five, five, five, None, True)),
        (r"keys \(5, 1, 2, 8\) have values \(6, 1, 2, 8\)", (five, five, six, None)),
        (r"have states \(1, 1, 2, 8\)", (one, five, five, one, True)),
        ("heads of 7 cannot be split into pairs", (five[..., :7], five[..., :7], five[..., :7], five[..., :7])),
        ("3 and 4 axes, not 4", (five[0], five, five, None)),
        ("float64 with values of torch.float32", (five, five, five, five.double())),
        (r"have states \(5, 2, 2, 8\)", (five, five, five, five.expand(-1, 2, -1, -1))),
        (
            r"document bounds \(2, 1, 6\), not \(2, 1, 5\)",
            (five, five, five, None, False, Packing(torch.zeros(2, 1, 6))),
        ),
        ("do not fit", (five[:, :, :1], five, five, None)),
        ("do not fit", (torch.zeros(5, 1, 3, 8), five, five, None)),
        ("do not fit", (torch.zeros(5, 2, 2, 8), five, five, None)),
        ("do not fit", (torch.zeros(5, 1, 2, 16), five, five, None)),
        ("float32, torch.float64 and torch.float32, not of one", (five, five.double(), five, None)),
    ):
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=message):
                attention(*arguments, backend=backend)


def test_unknown_backends_and_documents_out_of_order_are_refused(monkeypatch):
    x = torch.zeros(5, 1, 2, 8)
    for backend in ("auto", "flash"):
        with pytest.raises(ValueError, match=f"backend is '{backend}', not one of triton, tiled, .* choose_backend"):
            attention(x, x, x, None, backend=backend)
    monkeypatch.setattr(choice, "triton_interprets", lambda: True)
    with pytest.raises(ValueError, match="triton, which supports heads of 32.* not 8"):
        attention(x, x, x, None, backend="triton")
    x = torch.zeros(5, 1, 2, 32)
    with pytest.raises(ValueError, match="triton, which computes bfloat16 incorrectly in the interpreter"):
        attention(x.bfloat16(), x.bfloat16(), x.bfloat16(), None, backend="triton")
    monkeypatch.setattr(choice, "why_not_interpreted", lambda dtype: None)
    many = x[:1].expand(1, 2**15, 2, 32)
    with pytest.raises(ValueError, match="32768 sequences of 2 heads exceed the 65535 heads of one launch"):
        attention(many, many, many, None, backend="triton")
    monkeypatch.setattr(choice, "triton_interprets", lambda: False)
    with pytest.raises(ValueError, match="triton, which needs a GPU, and this runs on cpu"):
        attention(x, x, x, None, backend="triton")
    with pytest.raises(ValueError, match="padding comes before a sequence"):
        document_bounds(torch.tensor([[1, 1, 0]]))
    assert document_bounds(torch.tensor([[False, True]])).tolist() == [[[0, 1]], [[1, 2]]]
