"""All attention backends give the same results and refuse inconsistent arguments."""

import contextlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same, draw_qkvz
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import BACKENDS, choice, flash, sdpa, sdpa_wide
from megatron_tape.ops.backends import tiled as tiled_attention
from megatron_tape.ops.packing import Packing, causal_mask, document_bounds
from megatron_tape.ops.rotation import rotate_groups

CPU = torch.device("cpu")


@pytest.fixture
def flash_attn(monkeypatch):
    """Return a function that installs a stand-in for a version of flash-attn.

    The interface is flash-attn's: (B, S, H, D), or packed (tokens, H, D) with cumulative lengths.
    """
    widths = {1}

    def dense(q, k, v, causal, deterministic):
        assert causal and deterministic == torch.are_deterministic_algorithms_enabled()
        assert v.shape[-1] // q.shape[-1] in widths
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic
    ):
        q_ends = cu_seqlens_q
        k_ends = cu_seqlens_k
        for ends, longest in ((q_ends, max_seqlen_q), (k_ends, max_seqlen_k)):
            assert ends.dtype == torch.int32 and int(ends.diff().max()) == longest
        pieces = [
            dense(q[None, a:b], *(x[None, c:d] for x in (k, v)), causal, deterministic)
            for (a, b), (c, d) in zip(
                *(ends.unfold(0, 2, 1).tolist() for ends in (q_ends, k_ends)), strict=True
            )
            if a < b
        ]
        return torch.cat(pieces, dim=1)[0]

    module = ModuleType("flash_attn")
    module.flash_attn_func = dense
    module.flash_attn_varlen_func = packed
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    # Early versions of flash-attn 3 also return the log-sum-exp.
    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = lambda *given, **settings: (dense(*given, **settings), torch.zeros(1))
    module.flash_attn_varlen_func = packed
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    # Version 4 always does, and supports wide values; these are its functions for tile sizes on
    # Hopper.
    module = ModuleType("flash_attn.cute.interface")
    module.flash_attn_func = lambda *given, **settings: (dense(*given, **settings), torch.zeros(1))
    module.flash_attn_varlen_func = lambda *given, **settings: (
        packed(*given, **settings),
        torch.zeros(1),
    )
    module.FwdConfig = module.BwdConfig = lambda *values: values
    module._tile_size_fwd_sm90 = module._tile_size_bwd_sm90 = (
        lambda head_dim, head_dim_v, *rest, **more: "theirs"
    )
    for name in ("flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, module)

    def install(version):
        monkeypatch.setattr(flash, "flash_attn_version", lambda device: version)
        monkeypatch.setattr(
            flash, "takes_wide_value", lambda device, dim, grouped: version == 4 and not grouped
        )
        widths.update({1, 2} if version == 4 else {1})
        return module

    install(2)
    return install


@pytest.mark.parametrize("queries", [21, 9, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize(
    "backend", ["torch", "tiled", "flash_attn 2", "flash_attn 3", "flash_attn 4"]
)
def test_a_backend_equals_the_naive_backend(
    flash_attn, monkeypatch, backend, averages, packed, queries
):
    backend, _, version = backend.partition(" ")
    if version:
        flash_attn(int(version))
    monkeypatch.setattr(tiled_attention, "QUERIES", 4)
    monkeypatch.setattr(tiled_attention, "KEYS", 6)
    tensors = draw_qkvz(21, 6, 2, 8, queries)
    if packed:
        packing = Packing.of(torch.arange(21) // torch.tensor([[4], [9]]))
    else:
        packing = None
    ours, theirs = (
        attention(*tensors, averages, packing, name, rotate=queries == 21)
        for name in (backend, "naive")
    )
    assert (ours[1] is not None) == averages
    assert_same(ours, theirs, tensors)


@contextlib.contextmanager
def recorded(requests, requested):
    requests.append(requested)
    yield
    requests.append(None)


def test_a_wide_value_takes_one_call_restricted_to_cudnn(monkeypatch):
    """A CPU has no cuDNN, so the test checks only what torch is requested to use."""
    requests = []
    values = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(sdpa_wide, "sdpa_kernel", partial(recorded, requests))
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, **more: values.append(v.shape[-1]) or attend(q, k, v, **more),
    )
    tensors = draw_qkvz(21, 6, 2, 8)
    ours = attention(*tensors, True, None, "torch_wide")
    assert requests == [SDPBackend.CUDNN_ATTENTION, None] and values == [16]
    assert_same(ours, attention(*tensors, True, None, "naive"), tensors)
    # But not for a single key (the first step of sampling from one token), nor with a mask.
    packing = Packing.of(torch.arange(21) // torch.tensor([[4], [9]]))
    for inputs, documents in ((draw_qkvz(1, 6, 2, 8), None), (tensors, packing)):
        ours, theirs = (
            attention(*inputs, True, documents, name) for name in ("torch_wide", "naive")
        )
        assert len(requests) == 2
        assert_same(ours, theirs, inputs)


def test_cudnn_is_disabled_for_masks_on_a_gpu(monkeypatch):
    """At lengths of 64 modulo 128 its gradient of queries can be NaN (pytorch issue 196678)."""
    requests = []
    monkeypatch.setattr(sdpa, "sdpa_kernel", partial(recorded, requests))
    on_gpu = SimpleNamespace(is_cuda=True)
    with sdpa._without_cudnn(on_gpu, torch.zeros(1)):
        assert (
            requests
            and SDPBackend.CUDNN_ATTENTION not in requests[0]
            and SDPBackend.MATH in requests[0]
        )
    with sdpa._without_cudnn(on_gpu, None):
        assert len(requests) == 2


def test_flash_attn_4_averages_v_and_z_in_one_call_with_our_tile_sizes(flash_attn, monkeypatch):
    module = flash_attn(4)
    values = []
    attend = module.flash_attn_func
    module.flash_attn_func = lambda q, k, v, **settings: (
        values.append(v.shape[-1]) or attend(q, k, v, **settings)
    )
    tensors = draw_qkvz(21, 4, 4, 8)
    for _ in range(2):
        ours = attention(*tensors, True, None, "flash_attn")
    assert values == [16, 16]
    assert_same(ours, attention(*tensors, True, None, "naive"), tensors)
    assert module._tile_size_fwd_sm90(128, 256, True, False, sparse_block_size_q=None)[:2] == (
        128,
        96,
    )
    assert module._tile_size_bwd_sm90(64, 128, True, False)[:2] == (64, 128)
    assert (
        module._tile_size_fwd_sm90(128, 128, True, False)
        == module._tile_size_bwd_sm90(96, 192)
        == "theirs"
    )


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn_gets_the_deterministic_flag(flash_attn, packed, version):
    flash_attn(version)
    tensors = draw_qkvz(21, 6, 2, 8)
    if packed:
        packing = Packing.of(torch.arange(21) // torch.tensor([[4], [9]]))
    else:
        packing = None
    torch.use_deterministic_algorithms(True)
    try:
        attention(*tensors, False, packing, "flash_attn")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("backend", ["torch", "tiled", "flash_attn", "naive"])
def test_decoding_with_a_cache_equals_the_whole_sequence(flash_attn, backend, padding):
    q, k, v, z = draw_qkvz(12, 4, 2, 8)
    # The second sequence is shorter and starts with padding.
    if padding:
        bounds = document_bounds((torch.arange(12) >= torch.tensor([[0], [padding]])).long())
    else:
        bounds = None
    whole = attention(q, k, v, z, True, None if bounds is None else Packing(bounds), "naive")
    rotated_q = rotate_groups(q, z)
    rotated_k = rotate_groups(k, z)
    for a, b in ((0, 7), (7, 8), (8, 9), (9, 12)):  # a prompt, tokens one by one, a few at once
        cache = (x[:b] for x in (rotated_k, v, z))
        if bounds is None:
            seen = bounds
        else:
            seen = Packing(bounds[:, :, :b].clamp(max=b))
        ours = attention(rotated_q[a:b], *cache, True, seen, backend, rotate=False)
        for x, y in zip(ours, whole, strict=True):
            torch.testing.assert_close(x, y[a:b])


def test_document_bounds_are_the_starts_of_this_and_the_next_document():
    bounds = document_bounds(torch.tensor([[0, 0, 1, 1, 1], [3, 4, 4, 5, 5]]))
    assert bounds.tolist() == [
        [[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]],
        [[2, 2, 5, 5, 5], [1, 3, 3, 5, 5]],
    ]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert causal_mask(5, 5, bounds, CPU)[0, 0].int().tolist() == expected
    assert causal_mask(2, 5, bounds, CPU)[0, 0].int().tolist() == expected[3:]
    assert causal_mask(2, 5, None, CPU).int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]


def test_inconsistent_arguments_are_refused():
    one, five, six = (torch.zeros(n, 1, 2, 8) for n in (1, 5, 6))
    for message, arguments in (
        ("each query's own token", (six, five, five, five)),
        ("pass rotate=False", (one, five, five, five)),
        ("no position state to average", (five, five, five, None, True)),
        ("values have shape", (five, five, six, None)),
        ("state z_TBGD has shape", (five, five, five, five.expand(-1, 2, -1, -1))),
        ("state z_TBGD has shape", (one, five, five, one, True)),
        ("split into pairs", (five[..., :7], five[..., :7], five[..., :7], five[..., :7])),
        ("document bounds", (five, five, five, None, False, Packing(torch.zeros(2, 1, 6)))),
        ("do not fit", (torch.zeros(5, 1, 3, 8), five, five, None)),
        ("do not fit", (torch.zeros(5, 2, 2, 8), five, five, None)),
        ("convert them to one", (five, five.double(), five, None)),
    ):
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=message):
                attention(*arguments, backend=backend)


def test_unsupported_backends_and_padding_after_a_sequence_are_refused(monkeypatch):
    x = torch.zeros(5, 1, 2, 8)
    with pytest.raises(ValueError, match="choose_backend"):
        attention(x, x, x, None, backend="auto")
    monkeypatch.setattr(choice, "triton_interprets", lambda: True)
    with pytest.raises(ValueError, match="supports head dimensions"):
        attention(x, x, x, None, backend="triton")
    many = torch.zeros(1, 1, 2, 32).expand(1, 2**15, 2, 32)
    with pytest.raises(ValueError, match="exceed the 65535 heads of one launch"):
        attention(many, many, many, None, backend="triton")
    with pytest.raises(ValueError, match="pad on the left"):
        document_bounds(torch.tensor([[1, 1, 0]]))
    assert document_bounds(torch.tensor([[False, True]])).tolist() == [[[0, 1]], [[1, 2]]]
