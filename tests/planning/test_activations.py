"""Estimated parameters and activations equal those of built models and saved tensors."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from models import WINDOWS, build, small_model
from plans import middle_model, of_model, on_cpu, saved_bytes

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model import language_model
from megatron_tape.model.backend import FusedKernels
from megatron_tape.model.weights import shard
from megatron_tape.ops import attention_inputs
from megatron_tape.ops.backends import choice, flash
from megatron_tape.ops.backends.table import BLACKWELL, CPU, HOPPER, OTHER_GPU
from megatron_tape.planning.activations import activations
from megatron_tape.planning.parameters import parameter_count, trained_kinds
from megatron_tape.position import encoding_of
from megatron_tape.training.model_building import freeze_parameters, parameter_filter

SHAPES = {
    "tape": {},
    "tape_deep_gate_from_attention": {"num_layers": 6, "gate_input": "attention"},
    "tape_per_head_tied": {
        "num_query_groups": 4,
        "token_mixing": "per_head",
        "tie_embeddings": True,
    },
    "rope": {"position_encoding": "rope"},
    "nope": {"position_encoding": "nope"},
    "tape_biased_wide_heads": {"qkv_bias": True, "kv_channels": 12},
    "tape_qk_norm": {"qk_norm": True},
    "tape_gated_output": {"attention_output_gate": True},
    "repo_in_all_layers_qk_norm": {
        "position_encoding": "repo",
        "repo_first_layer": 0,
        "qk_norm": True,
    },
    "nope_qk_norm_multi_head": {
        "position_encoding": "nope",
        "qk_norm": True,
        "num_query_groups": 4,
    },
}

SHAPES |= WINDOWS


@pytest.mark.parametrize("shape", SHAPES)
def test_estimated_parameters_equal_those_of_the_built_model_and_its_shards(shape):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    parameters = list(build(model)[0].parameters())
    assert parameter_count(model) == sum(p.numel() for p in parameters)
    if model.query_groups % 2 == 0:
        assert parameter_count(model, tensor_size=2) == sum(
            shard(p, p, 0, 2).numel() for p in parameters
        )


@pytest.mark.parametrize(
    "precision, recompute", [("bf16", "none"), ("fp32", "selective"), ("bf16", "full")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_activations_equal_the_estimate(shape, precision, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    saved = saved_bytes(build(model, recompute=recompute, dtype=dtype)[0], model)
    # Autograd does not see tensors that recomputed layers share.
    if recompute != "none":
        saved += phase_bytes(model, dtype)
    # With selective recomputation, attention's mask is saved with its call.
    if recompute == "full" and model.needs_window:
        saved += 2 * model.seq_length**2 * dtype.itemsize
    assert on_cpu(model, 2, precision, recompute) == pytest.approx(saved, rel=0.004)


def phase_bytes(model, dtype):
    """Return the bytes of the phases of layers with a window."""
    positions = torch.arange(model.seq_length)[:, None]
    phases = encoding_of(model).window_phases(positions, dtype)
    if phases is None:
        return 0
    return phases.nbytes


@pytest.mark.parametrize(
    "shape, recompute", [*((shape, "none") for shape in SHAPES), ("tape", "selective")]
)
def test_saved_activations_of_packed_documents_equal_the_estimate(shape, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    saved = saved_bytes(build(model, recompute=recompute)[0], model, packed=True)
    assert on_cpu(model, 2, "fp32", recompute, data__reset_attention_mask=True) == pytest.approx(
        saved, rel=0.02
    )


@pytest.fixture
def fused_kernels(monkeypatch):
    """The kernels of a model on a GPU. They launch nothing, but the functions around them save
    tensors.
    """
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(attention_inputs, "supports_rotation_kernels", lambda x: True)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    return FusedKernels(position_update=True, swiglu=True)


@pytest.fixture
def flash_attn_4(monkeypatch):
    """Install a stand-in, for a model on the CPU as if it were on Hopper."""
    from megatron_tape.planning.rehearsal import FlashAttention4

    module = ModuleType("flash_attn.cute.interface")
    module.has_our_tiles = True
    module.flash_attn_func = lambda *tensors, **options: FlashAttention4.apply(*tensors)
    module.flash_attn_varlen_func = module.flash_attn_func
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "flash_attn_version", lambda device: 4)
    for wide in (flash, choice):
        monkeypatch.setattr(wide, "takes_wide_value", lambda device, dim: dim in (64, 128))
    monkeypatch.setattr(language_model, "chosen_backend", lambda *_: "flash_attn")


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("encoding", ["tape", "rope"])
def test_saved_activations_with_flash_attention_4_equal_the_estimate(
    flash_attn_4, fused_kernels, encoding, groups, head_dim, recompute
):
    model = small_model(
        position_encoding=encoding,
        num_query_groups=groups,
        kv_channels=head_dim,
        attention_backend="flash_attn",
    )
    built, _ = build(model, recompute=recompute, dtype=torch.bfloat16, fused=fused_kernels)
    saved = saved_bytes(built, model)
    assert on_cpu(model, 2, "bf16", recompute) == pytest.approx(saved, rel=0.004)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("groups", [4, 2])
def test_saved_activations_of_windows_with_flash_attention_4_equal_the_estimate(
    flash_attn_4, fused_kernels, groups, recompute
):
    """Only the full layers average values and position state in one call."""
    model = small_model(
        sliding_window=5,
        full_attention_every=2,
        num_layers=4,
        num_query_groups=groups,
        kv_channels=64,
        attention_backend="flash_attn",
    )
    built, _ = build(model, recompute=recompute, dtype=torch.bfloat16, fused=fused_kernels)
    saved = saved_bytes(built, model)
    assert on_cpu(model, 2, "bf16", recompute) == pytest.approx(saved, rel=0.004)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("encoding", ["rope", "nope"])
def test_saved_activations_of_documents_with_flash_attention_4_equal_the_estimate(
    flash_attn_4, encoding, groups, qk_norm, batch, recompute
):
    model = small_model(
        position_encoding=encoding,
        num_query_groups=groups,
        qk_norm=qk_norm,
        kv_channels=64,
        attention_backend="flash_attn",
    )
    built, _ = build(model, recompute=recompute, dtype=torch.bfloat16)
    saved = saved_bytes(built, model, batch, packed=True)
    estimate = on_cpu(model, batch, "bf16", recompute, data__reset_attention_mask=True)
    assert estimate == pytest.approx(saved, rel=0.004)


def test_saved_activations_of_a_larger_model_equal_the_estimate_and_tape_adds_little():
    saved = {}
    for encoding in ("tape", "rope"):
        model = middle_model(encoding)
        saved[encoding] = saved_bytes(build(model)[0], model)
        assert on_cpu(model, 2, "fp32") == pytest.approx(saved[encoding], rel=0.01)
    assert saved["rope"] < saved["tape"] <= 1.25 * saved["rope"]


def test_the_chunks_of_the_loss_depend_on_the_generation_of_the_gpu():
    model = small_model(vocab_size=2**15, seq_length=2**14)
    plan = of_model(model)
    loss = {}
    for generation in (CPU, OTHER_GPU, HOPPER, BLACKWELL):
        loss[generation] = activations(dataclasses.replace(plan, generation=generation)).loss
    assert loss[CPU] == loss[OTHER_GPU]
    assert loss[HOPPER] == loss[BLACKWELL]
    # The logits of a chunk are in fp32 and in bf16.
    assert loss[HOPPER] - loss[CPU] == (4 + 2) * (2**28 - 2**26)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "encoding, trains",
    [
        ("tape", ["position", "lora", "embeddings", "norms"]),
        ("rope", ["lora", "embeddings", "norms"]),
        ("rope", ["norms", "output"]),
    ],
)
def test_trainable_parameters_and_activations_of_an_extension_equal_the_estimate(
    encoding, trains, recompute
):
    model = middle_model(encoding)
    extension = ExtensionConfig(trains=trains, lora_rank=4)
    lora = extension if extension.adds_lora else None
    built, _ = build(model, recompute=recompute, lora=lora)
    freeze_parameters(built, parameter_filter(extension))
    parameters = list(built.parameters())
    sizes = [
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
    ]
    assert [
        parameter_count(model, extension),
        parameter_count(model, extension, trained_kinds(extension)),
    ] == sizes
    saved = saved_bytes(built, model)
    assert on_cpu(model, 2, "fp32", recompute, extension=extension) == pytest.approx(
        saved, rel=0.02
    )
