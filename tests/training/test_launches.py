"""A training step launches few kernels for each layer, counted without a GPU."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from configurations import make_alone
from launches import CountLaunches, counting_triton
from models import build, random_batch, small_model
from torch.autograd.function import Function

from megatron_tape.model import backend as model_backend
from megatron_tape.model.backend import FusedKernels
from megatron_tape.ops import attention, attention_inputs, linear_cross_entropy
from megatron_tape.ops.backends import choice, sdpa_wide
from megatron_tape.training import gradients
from megatron_tape.training.engine import Engine


class LibraryAttention(Function):
    """A library's attention kernel, with the layouts of its results but without their values."""

    @staticmethod
    def forward(ctx, launches, q, k, v):
        ctx.launches = launches
        ctx.save_for_backward(q, k, v)
        launches.counts["attention"] += 1
        B, H, S, _ = q.shape
        return q.new_empty(S, B, H, v.shape[-1]).permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx, gradient):
        # The products of outputs and gradients, the gradients, and a conversion of those of q.
        ctx.launches.counts["attention backward"] += 3
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors)


class LibraryNorm(Function):
    """torch's fused RMSNorm, which a CPU computes in many operations."""

    @staticmethod
    def forward(ctx, launches, x, weight):
        ctx.launches = launches
        ctx.save_for_backward(x, weight)
        launches.counts["norm"] += 1
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        # The gradient of the input, and that of the weight.
        ctx.launches.counts["norm backward"] += 2
        return None, *(torch.empty_like(x) for x in ctx.saved_tensors)


@pytest.fixture
def on_gpu(monkeypatch):
    """Backends, kernels and small gradients as on a GPU where torch has cuDNN."""
    for module in (choice, model_backend, attention):
        monkeypatch.setattr(module, "unsupported", lambda *arguments: None)
    monkeypatch.setattr(sdpa_wide, "sdpa_kernel", lambda kernel: contextlib.nullcontext())
    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    # In this small model, as in a large one, only norms and matrices that do not have the hidden
    # size as an axis must count as small.
    monkeypatch.setattr(gradients, "SMALL", 500)


def launches_of_a_step(encoding, backend, layers, grouped=False, micro_batches=1):
    """Return the launches of the second training step by operation. With `grouped`, two query heads
    share keys and values.
    """
    model = small_model(
        position_encoding=encoding,
        attention_backend=backend,
        num_layers=layers,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2 if grouped else 4,
    )
    kernels = FusedKernels(position_update=True, swiglu=True, loss=True)
    built, layout = build(model, dtype=torch.bfloat16, fused=kernels)
    config = make_alone(
        model,
        train__precision="bf16",
        train__micro_batch_size=2,
        train__global_batch_size=2 * micro_batches,
    )
    engine = Engine(built, config, layout)
    batches = [random_batch(seed, batch=2) for seed in range(micro_batches)]
    launches = CountLaunches()

    def library_attention(q, k, v, **options):
        return LibraryAttention.apply(launches, q, k, v)

    def library_norm(x, shape, weight, eps):
        return LibraryNorm.apply(launches, x, weight)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", library_attention),
        mock.patch.object(F, "rms_norm", library_norm),
        counting_triton(launches),
    ):
        # The first step creates the optimizer's state.
        engine.train_step(batches, 0.01)
        launches.counts.clear()
        with launches:
            engine.train_step(batches, 0.01)
    engine.close()
    return launches.counts


@pytest.mark.parametrize(
    "encoding, backend, grouped, expected",
    [
        ("rope", "torch", False, 34),
        ("rope", "torch", True, 36),
        ("tape", "torch_wide", False, 48),
        ("tape", "torch_wide", True, 50),
        ("tape", "torch", False, 52),
        ("tape", "triton", False, 46),
    ],
)
def test_a_layer_launches_few_kernels(on_gpu, encoding, backend, grouped, expected):
    """`expected` is the number for a layer and a micro-batch, forward and backward: the update of
    the weights launches nothing for each layer. With grouped queries, two more operations copy the
    queries and concatenate the gradients.
    """
    of_4_layers = launches_of_a_step(encoding, backend, 4, grouped)
    of_3_layers = launches_of_a_step(encoding, backend, 3, grouped)
    of_a_layer = of_4_layers - of_3_layers
    assert of_a_layer.total() == expected, of_a_layer


@pytest.mark.parametrize(
    "encoding, backend, expected",
    [("rope", "torch", 2074), ("tape", "torch_wide", 2698)],
)
def test_a_step_of_the_155m_model_launches_few_kernels(
    on_gpu, monkeypatch, encoding, backend, expected
):
    """12 layers, four micro-batches, and the loss of each in four chunks."""
    monkeypatch.setattr(linear_cross_entropy, "chunk_size", lambda *arguments: 8)
    launches = launches_of_a_step(encoding, backend, layers=12, micro_batches=4)
    assert launches.total() == expected, launches
