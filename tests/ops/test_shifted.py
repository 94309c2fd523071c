"""Shifted sparse attention equals attention with explicit masks, outputs and all gradients."""

from functools import partial

import pytest
import torch
from comparing import assert_same, draw_qkvz

from megatron_tape.ops.attention import attention
from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import tiled
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.rescore import Rescore
from megatron_tape.ops.rotation import rotate_groups
from megatron_tape.ops.shifted import ShiftedSegments, attend_in_segments, unshifted_groups
from megatron_tape.ops.visibility import Visibility

T = 48
B = 2
D = 32
DOCUMENTS = torch.stack([torch.arange(T) >= 20, torch.arange(T) // 17])


def explicit(q, k, v, z, average, documents, window=None):
    """Compute attention with a mask per head: segments of a quarter of the tokens, half of the
    heads shifted, and a window.
    """
    heads = q.shape[2]
    groups = k.shape[2]
    length = T // 4
    shifted = torch.arange(heads) // (heads // groups) >= groups // 2
    segments = (torch.arange(T) + length // 2 * shifted[:, None]) // length
    seen = (
        (segments[:, :, None] == segments[:, None])
        .tril()
        .expand(
            B,
            -1,
            -1,
            -1,
        )
    )
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    if window is not None:
        seen = seen & (torch.arange(T)[:, None] - torch.arange(T) < window)
    k, v, z = (x.repeat_interleave(heads // groups, dim=2) for x in (k, v, z))
    scores = (
        torch.einsum(
            "sbhd,tbhd->bhst",
            rotate_groups(q, z),
            rotate_groups(k, z),
        )
        / D**0.5
    )
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return [torch.einsum("bhst,tbhd->sbhd", p, x) for x in ([v, z] if average else [v])]


def shifted_attention(q, k, v, z, segments, averages=False, backend="torch", **more):
    inputs = AttentionInputs(z, averages, q_SBHD=q, k_TBGD=k, v_TBGD=v, **more)
    return attend_in_segments(inputs, segments, backend)


@pytest.mark.parametrize("backend", ["naive", "torch", "tiled"])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 1, 5, 9])
def test_every_backend_equals_explicit_masks(
    monkeypatch, backend, groups, averages, documents, window
):
    monkeypatch.setattr(tiled, "QUERIES", 4)
    monkeypatch.setattr(tiled, "KEYS", 8)
    tensors = draw_qkvz(T, 3 * groups, groups, D)
    visibility = None if documents is None else Visibility.of(documents)
    segments = ShiftedSegments.of(torch.zeros(B, T), visibility, unshifted_groups(groups))
    if window is not None:
        segments = segments.with_window(window)
    ours = shifted_attention(*tensors, segments, averages, backend)
    plain = explicit(*tensors, averages, documents, window)
    assert_same(ours, plain, tensors)


@pytest.mark.parametrize("window", [None, 7])
def test_triton_is_as_exact_as_explicit_masks(window):
    tensors = draw_qkvz(T, 9, 3, D, dtype=torch.float32)
    segments = ShiftedSegments.of(
        torch.zeros(B, T),
        Visibility.of(DOCUMENTS),
        unshifted_groups(3),
    )
    if window is not None:
        segments = segments.with_window(window)
    ours = partial(shifted_attention, segments=segments, averages=True, backend="triton")
    plain = partial(explicit, average=True, documents=DOCUMENTS, window=window)
    assert inexact(ours, plain, tensors, torch.float32) is None


def test_segments_are_quarters_and_do_not_wrap():
    segments = ShiftedSegments.of(torch.zeros(1, 16), None, 1)
    starts, ends = segments.plain.bounds_2BT[:, 0].tolist()
    assert starts == [token // 4 * 4 for token in range(16)]
    assert ends == [start + 4 for start in starts]
    starts, ends = segments.shifted.bounds_2BT[:, 0].tolist()
    assert starts == [0] * 2 + [2] * 4 + [6] * 4 + [10] * 4 + [14] * 2
    assert ends == [2] * 2 + [6] * 4 + [10] * 4 + [14] * 4 + [16] * 2
    with pytest.raises(ValueError, match="12 tokens"):
        ShiftedSegments.of(torch.zeros(1, 12), None, 1)


@pytest.mark.parametrize("backend", ["naive", "torch", "tiled"])
def test_shifted_heads_get_their_own_biases_and_gates(backend):
    q, k, v, _ = draw_qkvz(T, 9, 3, D)
    slopes = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    gates = -torch.rand(T, B, 9, dtype=torch.float64)

    def tile(rows, columns, slopes):
        keys = torch.arange(columns.start, columns.stop)
        return slopes[None, :, None, None] * (keys - torch.arange(rows.start, rows.stop)[:, None])

    segments = ShiftedSegments.of(torch.zeros(B, T), None, unshifted_groups(3))
    for more in (dict(bias=Bias(tile, (slopes,))), dict(log_gate_TBH=gates)):
        ours, _ = shifted_attention(q, k, v, None, segments, backend=backend, **more)
        for visibility, heads in ((segments.plain, slice(0, 3)), (segments.shifted, slice(3, 9))):
            whole, _ = attention(
                q,
                k,
                v,
                None,
                visibility=visibility,
                backend="naive",
                **more,
            )
            torch.testing.assert_close(ours[:, :, heads], whole[:, :, heads])
    with pytest.raises(ValueError, match="cannot be combined with scores of whole rows"):
        shifted_attention(
            q,
            k,
            v,
            None,
            segments,
            rescore=Rescore(lambda scores, *_: scores),
        )


def test_only_the_head_decides_whether_attention_is_shifted():
    for groups in (2, 3, 9, 32):
        for size in (size for size in range(1, groups + 1) if groups % size == 0):
            of_ranks = [list(range(first, first + size)) for first in range(0, groups, size)]
            counts = [unshifted_groups(groups, own) for own in of_ranks]
            unshifted = [group for own, n in zip(of_ranks, counts) for group in own[:n]]
            assert unshifted == list(range(groups // 2))
    assert unshifted_groups(9, [3, 3, 4, 4]) == 2
