"""Activation checkpointing in which recomputation does not repeat attention."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from comparing import assert_same, draw, draw_qkvz, with_gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear, scaled_dot_product_attention

from megatron_tape.ops.activation_checkpointing import (
    AttentionRecorder,
    saved_without_copy,
)
from megatron_tape.ops.attention import attention
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.visibility import Visibility

S = 20
H = 4
G = 2
D = 8
IN_DOCUMENTS = Visibility.of(torch.tensor([[0] * 5 + [1] * 15, [0] * 20]))


def inputs():
    return draw_qkvz(S, H, G, D)


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("visibility", [None, IN_DOCUMENTS, IN_DOCUMENTS.with_window(4)])
def test_recorded_attention_has_the_same_gradients(backend, visibility):
    tensors = inputs()
    run = partial(AttentionRecorder().run, "layer")
    with torch.no_grad():
        first = attention(
            *tensors, average_state=True, visibility=visibility, backend=backend, run=run
        )
    second = attention(
        *tensors, average_state=True, visibility=visibility, backend=backend, run=run
    )
    plain = attention(*tensors, average_state=True, visibility=visibility, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert_same(second, plain, tensors, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_recorded_bias_is_the_same():
    """SDPA adds a bias in its mask; with a gradient of the mask, torch selects another kernel."""
    tensors = inputs()
    slopes = torch.linspace(0.1, 0.4, H, dtype=torch.float64).requires_grad_()
    tokens = torch.arange(S, dtype=torch.float64)
    bias = Bias(
        lambda rows, columns, x: x[None, :, None, None] * (tokens[columns] - tokens[rows, None]),
        (slopes,),
    )
    run = partial(AttentionRecorder().run, "layer")
    with torch.no_grad():
        attention(*tensors, bias=bias, run=run)
    ours = attention(*tensors, bias=bias, run=run)
    assert_same(
        ours,
        attention(*tensors, bias=bias),
        [*tensors, slopes],
        rtol=1e-12,
        atol=1e-12,
    )


def test_attention_runs_once_and_its_inputs_are_freed():
    calls = []
    recorder = AttentionRecorder()

    def function(q, k, v):
        calls.append(torch.is_grad_enabled())
        return (scaled_dot_product_attention(q, k, v),)

    q, k, v = (x.detach()[:, :, :G].permute(1, 2, 0, 3) for x in inputs()[:3])
    alive = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v)]
    values = [x.clone() for x in (q, k, v)]
    with torch.no_grad():
        (output,) = recorder.run(0, function, q, k, v)
    del q, k, v
    gc.collect()
    assert all(ref.expired() for ref in alive)
    copies = [x.requires_grad_() for x in values]
    (second,) = recorder.run(0, function, *copies)
    assert second.data_ptr() == output.data_ptr()  # the recorded output is not copied
    ours = with_gradients(second, copies)
    assert calls == [True]
    assert all(torch.equal(a, b) for a, b in zip(ours, with_gradients(function(*copies), copies)))


def test_a_parameter_gets_one_gradient():
    """ZeRO's hooks read a parameter's gradient whenever one is accumulated."""
    recorder = AttentionRecorder()
    parameter = torch.nn.Parameter(torch.arange(3.0))
    x = torch.ones(3)
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def function(x, parameter):
        return (x * parameter,)

    with torch.no_grad():
        recorder.run(0, function, x, parameter)
    (output,) = recorder.run(0, function, x.requires_grad_(), parameter)
    output.sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.ones(3))


@pytest.mark.parametrize("backend", ["torch", "tiled"])
def test_a_forward_pass_without_a_backward_pass_is_freed(backend):
    places = []

    def forward(recorder):
        with torch.no_grad():
            q, k, v, z = (x.clone() for x in inputs())
            outputs = attention(
                q,
                k,
                v,
                z,
                average_state=True,
                backend=backend,
                run=partial(recorder.run, 0),
            )
        places.extend(StorageWeakRef(x.untyped_storage()) for x in (q, k, v, z, *outputs))

    gc.disable()
    try:
        forward(AttentionRecorder())
        assert len(places) == 6
        assert all(place.expired() for place in places)
    finally:
        gc.enable()


def test_each_call_in_a_layer_restores_its_own_graph():
    """Shifted sparse attention calls attention twice in a layer; layers are recomputed from last to
    first.
    """
    recorder = AttentionRecorder()
    inputs = [[draw(S, 2, H, D, seed=3 * i + j) for j in range(3)] for i in range(4)]

    def run(i, run_attention):
        return attention(*inputs[i], None, backend="tiled", run=run_attention)[0]

    layers = [partial(recorder.run, layer) for layer in (0, 0, 1, 1)]
    with torch.no_grad():
        first = [run(i, layers[i]) for i in range(4)]
    second = {i: run(i, layers[i]) for i in (2, 3, 0, 1)}
    for i in (3, 0, 1, 2):
        assert torch.equal(second[i], first[i])
        plain = attention(*inputs[i], None, backend="tiled")
        assert_same(second[i], plain, inputs[i], rtol=0, atol=0)


@pytest.mark.parametrize("is_part", [True, False])
def test_a_projection_keeps_the_output_of_attention_instead_of_its_copy(is_part):
    """The output is a part of [o | u], which attention keeps, or a tensor of its own."""
    averages = draw(5, 2, 3, 16).requires_grad_()
    weight = draw(7, 24, seed=1).requires_grad_()

    def project(save):
        o = averages[..., :8] if is_part else averages[..., :8].contiguous()
        with save(o) as flat:
            memory = StorageWeakRef(flat.untyped_storage())
            return linear(flat, weight), memory

    ours, memory = project(saved_without_copy)
    plain, plain_memory = project(lambda o: nullcontext(o.flatten(2)))
    # A tensor of its own is not copied.
    assert memory.expired() == is_part
    assert not plain_memory.expired()
    slope = draw(5, 2, 7, seed=2)
    gradients, expected = (
        torch.autograd.grad(output, (averages, weight), slope) for output in (ours, plain)
    )
    assert all(map(torch.equal, gradients, expected))
