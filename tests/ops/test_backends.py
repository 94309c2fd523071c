"""All attention backends give the same results and refuse inconsistent arguments."""

import contextlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same, draw, draw_qkvz
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import BACKENDS, choice, flash, sdpa, sdpa_wide
from megatron_tape.ops.backends import tiled as tiled_attention
from megatron_tape.ops.rotation import rotate_groups
from megatron_tape.ops.visibility import Visibility, causal_mask, document_bounds

CPU = torch.device("cpu")
DOCUMENTS = torch.arange(21) // torch.tensor([[4], [9]])
IN_DOCUMENTS = Visibility.of(DOCUMENTS)
WHOLE = Visibility.of_whole(DOCUMENTS)
# Tiles have 4 queries and 6 keys. The last window is longer than the sequences.
WINDOWS = [
    *(WHOLE.with_window(size) for size in (1, 2, 6, 8, 20, 30)),
    *(IN_DOCUMENTS.with_window(size) for size in (1, 3, 7)),
]


@pytest.fixture
def flash_attn(monkeypatch):
    """Return a function that installs a stand-in for a version of flash-attn.

    The interface is flash-attn's: (B, S, H, D), or packed (tokens, H, D) with cumulative lengths.
    """
    module = ModuleType("flash_attn")

    def dense(q, k, v, causal, deterministic, window_size=(-1, -1)):
        assert causal
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        wide = v.shape[-1] > q.shape[-1]
        # FlashAttention-4's backward pass refuses wide values of grouped queries.
        assert not wide or q.shape[2] == k.shape[2] == v.shape[2]
        module.widths.append(v.shape[-1] // q.shape[-1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # A query sees `left` keys before the one at its place, and `right` keys after it, both
        # inclusive. The last query is at the place of the last key.
        left, right = window_size
        if left < 0:
            mask = causal_lower_right(q.shape[2], k.shape[2])
        else:
            places = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            distance = torch.arange(k.shape[2]) - places
            mask = (distance >= -left) & (distance <= right)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **settings):
        pieces = []
        for q_ends, k_ends in zip(
            cu_seqlens_q.unfold(0, 2, 1),
            cu_seqlens_k.unfold(0, 2, 1),
        ):
            queries = q[None, slice(*q_ends)]
            assert queries.shape[1] <= max_seqlen_q
            assert k_ends.diff() <= max_seqlen_k
            if queries.shape[1]:
                pieces.append(
                    dense(
                        queries,
                        *(x[None, slice(*k_ends)] for x in (k, v)),
                        **settings,
                    )
                )
        return torch.cat(pieces, dim=1)[0]

    def install(version):
        module.widths = []
        module.flash_attn_func = dense
        module.flash_attn_varlen_func = packed
        if version == 4:
            # It also returns the log-sum-exp.
            module.flash_attn_func = lambda *x, **settings: (dense(*x, **settings), None)
            module.flash_attn_varlen_func = lambda *x, **settings: (packed(*x, **settings), None)
            module.FwdConfig = module.BwdConfig = lambda *values: values
            module._tile_size_fwd_sm90 = module._tile_size_bwd_sm90 = lambda *_, **named: "theirs"
        monkeypatch.setattr(flash, "flash_attn_version", lambda device: version)
        monkeypatch.setattr(flash, "takes_wide_value", lambda device, dim: version == 4)
        return module

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, module)
    install(2)
    return install


@pytest.mark.parametrize("queries", [21, 9, 1])
@pytest.mark.parametrize("visibility", [None, IN_DOCUMENTS, *WINDOWS])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize(
    "backend", ["torch", "torch_wide", "tiled", "flash_attn 2", "flash_attn 4"]
)
def test_a_backend_equals_the_naive_backend(
    flash_attn, monkeypatch, backend, averages, visibility, queries
):
    backend, _, version = backend.partition(" ")
    if version:
        flash_attn(int(version))
    monkeypatch.setattr(tiled_attention, "QUERIES", 4)
    monkeypatch.setattr(tiled_attention, "KEYS", 6)
    monkeypatch.setattr(sdpa_wide, "sdpa_kernel", lambda kernel: contextlib.nullcontext())
    tensors = draw_qkvz(21, 6, 2, 8, queries)
    ours, theirs = (
        attention(
            *tensors,
            average_state=averages,
            visibility=visibility,
            backend=name,
            rotate=queries == 21,
        )
        for name in (backend, "naive")
    )
    assert (ours[1] is not None) == averages
    assert_same(ours, theirs, tensors)


@pytest.mark.parametrize("queries", [21, 9, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8, 21, 30])
def test_a_window_contains_the_token_and_those_before_it(window, packed, queries):
    """Compares the naive backend with a mask that is written down pair by pair."""
    seen = torch.zeros(2, 1, queries, 21, dtype=torch.bool)
    for sequence in range(2):
        for query in range(queries):
            token = 21 - queries + query
            for key in range(token + 1):
                same = DOCUMENTS[sequence, key] == DOCUMENTS[sequence, token]
                seen[sequence, 0, query, key] = token - key < window and (same or not packed)

    q, k, v, z = draw_qkvz(21, 6, 2, 8, queries)
    visibility = (IN_DOCUMENTS if packed else WHOLE).with_window(window)
    ours = attention(
        q,
        k,
        v,
        z,
        average_state=True,
        visibility=visibility,
        backend="naive",
        rotate=False,
    )
    by_head = [x.permute(1, 2, 0, 3) for x in (q, k, v, z)]
    theirs = [
        F.scaled_dot_product_attention(*by_head[:2], value, seen, enable_gqa=True)
        for value in by_head[2:]
    ]
    assert_same(ours, [x.permute(2, 0, 1, 3) for x in theirs], [q, k, v, z])


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
    ours = attention(*tensors, average_state=True, backend="torch_wide")
    assert requests == [SDPBackend.CUDNN_ATTENTION, None]
    assert values == [16]
    assert_same(ours, attention(*tensors, average_state=True, backend="naive"), tensors)
    # But not for a single key (the first step of sampling from one token), nor with a mask.
    for inputs, visibility in (
        (draw_qkvz(1, 6, 2, 8), None),
        (tensors, IN_DOCUMENTS),
        (tensors, WHOLE.with_window(5)),
    ):
        ours, theirs = (
            attention(*inputs, average_state=True, visibility=visibility, backend=name)
            for name in ("torch_wide", "naive")
        )
        assert len(requests) == 2
        assert_same(ours, theirs, inputs)


def test_cudnn_is_disabled_for_masks_on_a_gpu(monkeypatch):
    """At lengths of 64 modulo 128 its gradient of queries can be NaN (pytorch issue 196678)."""
    requests = []
    monkeypatch.setattr(sdpa, "sdpa_kernel", partial(recorded, requests))
    on_gpu = SimpleNamespace(is_cuda=True)
    for mask in (None, torch.zeros(1)):
        with sdpa._without_cudnn(on_gpu, mask):
            assert bool(requests) == (mask is not None)
    assert SDPBackend.CUDNN_ATTENTION not in requests[0]
    assert SDPBackend.MATH in requests[0]


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_flash_attn_4_averages_v_and_z_in_one_call_with_our_tile_sizes(flash_attn, groups):
    module = flash_attn(4)
    tensors = draw_qkvz(21, 4, groups, 8)
    for _ in range(2):
        ours = attention(*tensors, average_state=True, backend="flash_attn")
    assert module.widths == [2, 2]
    assert_same(ours, attention(*tensors, average_state=True, backend="naive"), tensors)
    forward = module._tile_size_fwd_sm90
    backward = module._tile_size_bwd_sm90
    assert forward(128, 256, True, False, sparse_block_size_q=None)[:2] == (128, 96)
    assert backward(64, 128, True, False)[:2] == (64, 128)
    assert forward(128, 128, True, False) == backward(96, 192) == "theirs"
    # Such values were not tried with a window.
    window = WHOLE.with_window(5)
    attention(*tensors, average_state=True, visibility=window, backend="flash_attn")
    assert module.widths == [2, 2, 1, 1]


def test_the_gradients_of_a_groups_heads_are_summed_in_fp32():
    x = draw(21, 2, 3, 8, dtype=torch.bfloat16)
    gradients = draw(21, 2, 48, 8, dtype=torch.bfloat16).detach()
    (ours,) = torch.autograd.grad(flash._for_each_head(x, heads=48), x, gradients)
    exact = gradients.double().unflatten(2, (3, 16)).sum(3)
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=0)


def test_flash_attn_gets_the_deterministic_flag(flash_attn):
    torch.use_deterministic_algorithms(True)
    try:
        attention(*draw_qkvz(21, 6, 2, 8), backend="flash_attn")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("backend", ["torch", "tiled", "flash_attn", "naive"])
def test_decoding_with_a_cache_equals_the_whole_sequence(flash_attn, backend, padding, window):
    q, k, v, z = draw_qkvz(12, 4, 2, 8)
    # The second sequence is shorter and starts with padding.
    documents = (torch.arange(12) >= torch.tensor([[0], [padding]])).long()

    def visibility_of(tokens):
        visibility = None
        if padding:
            visibility = Visibility.of(documents[:, :tokens])
        elif window is not None:
            visibility = Visibility.of_whole(documents[:, :tokens])
        if window is not None:
            visibility = visibility.with_window(window)
        return visibility

    whole = attention(q, k, v, z, average_state=True, visibility=visibility_of(12), backend="naive")
    rotated_q = rotate_groups(q, z)
    rotated_k = rotate_groups(k, z)
    for a, b in ((0, 7), (7, 8), (8, 9), (9, 12)):  # a prompt, tokens one by one, a few at once
        cache = rotated_k[:b], v[:b], z[:b]
        ours = attention(
            rotated_q[a:b],
            *cache,
            average_state=True,
            visibility=visibility_of(b),
            backend=backend,
            rotate=False,
        )
        for x, y in zip(ours, whole, strict=True):
            torch.testing.assert_close(x, y[a:b])


def test_document_bounds_are_the_starts_of_this_and_the_next_document():
    bounds = document_bounds(torch.tensor([[0, 0, 1, 1, 1], [3, 4, 4, 5, 5]]))
    assert bounds.tolist() == [
        [[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]],
        [[2, 2, 5, 5, 5], [1, 3, 3, 5, 5]],
    ]
    assert document_bounds(torch.tensor([[False, True]])).tolist() == [[[0, 1]], [[1, 2]]]
    with pytest.raises(ValueError, match="pad on the left"):
        document_bounds(torch.tensor([[1, 1, 0]]))
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert causal_mask(5, 5, bounds, CPU)[0, 0].int().tolist() == expected
    assert causal_mask(2, 5, bounds, CPU)[0, 0].int().tolist() == expected[3:]


def test_bounds_of_a_window_stay_within_documents_and_sequences():
    documents = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 4]])
    visibility = Visibility.of(documents).with_window(2)
    assert visibility.bounds_2BT.tolist() == [
        [[0, 0, 2, 2, 3], [0, 0, 1, 2, 3]],
        [[2, 2, 4, 5, 5], [2, 3, 4, 5, 5]],
    ]
    assert torch.equal(visibility.documents_2BT, document_bounds(documents))
    assert visibility.first_seen(3) == ([1, 2, 3], [2, 2, 3])
    whole = Visibility.of_whole(documents).with_window(2)
    assert torch.equal(whole.bounds_2BT[:, 0], visibility.bounds_2BT[:, 1])
    assert whole.documents_2BT is None


def test_inconsistent_arguments_are_refused():
    one, five, six = (torch.zeros(n, 1, 2, 8) for n in (1, 5, 6))
    for message, tensors, options in (
        ("each query's own token", (six, five, five, five), {}),
        ("pass rotate=False", (one, five, five, five), {}),
        ("no position state to average", (five, five, five), {"average_state": True}),
        ("v_TBGD has shape", (five, five, six), {}),
        ("z_TBGD has shape", (five, five, five, five.expand(-1, 2, -1, -1)), {}),
        ("z_TBGD has shape", (one, five, five, one), {"average_state": True}),
        (
            "bounds of the visible tokens",
            (five, five, five),
            {"visibility": Visibility.within(torch.zeros(2, 1, 6))},
        ),
        ("do not fit", (torch.zeros(5, 1, 3, 8), five, five), {}),
        ("do not fit", (torch.zeros(5, 2, 2, 8), five, five), {}),
        ("; use one", (five, five.double(), five), {}),
    ):
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=message):
                attention(*tensors, backend=backend, **options)


def test_unsupported_backends_are_refused(monkeypatch):
    x = torch.zeros(5, 1, 2, 8)
    with pytest.raises(ValueError, match="choose_backend"):
        attention(x, x, x, None, backend="auto")
    monkeypatch.setattr(choice, "triton_interprets", lambda: True)
    with pytest.raises(ValueError, match="supports head dimensions"):
        attention(x, x, x, None, backend="triton")
    many = torch.zeros(1, 1, 2, 32).expand(
        1,
        2**15,
        2,
        32,
    )
    with pytest.raises(ValueError, match="exceed the 65535 heads of one launch"):
        attention(many, many, many, None, backend="triton")
