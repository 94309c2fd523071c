"""Counted parameters and activations against models that are built and tensors that are saved."""

import pytest
import torch
from configurations import with_values
from models import build, small_model
from plans import middle_model, of_model, on_cpu, recipe, saved_bytes

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.weights import shard
from megatron_tape.planning.activations import activations
from megatron_tape.planning.parameters import parameter_count, trained_kinds
from megatron_tape.training.trained_parameters import select_trained, trained_by

SHAPES = {
    "tape": {},
    "tape_multi_head": {"num_query_groups": 4},
    "tape_one_group": {"num_query_groups": 1},
    "tape_one_layer": {"num_layers": 1},
    "tape_deep_gate_from_attention": {"num_layers": 6, "gate_input": "attention"},
    "tape_per_head_tied": {"num_query_groups": 4, "token_mixing": "per_head", "tie_embeddings": True},
    "tape_default_position_mlp": {"mlp_size": None},
    "rope": {"position_encoding": "rope"},
    "rope_multi_head": {"position_encoding": "rope", "num_query_groups": None},
    "nope": {"position_encoding": "nope"},
    "nope_one_group": {"position_encoding": "nope", "num_query_groups": 1},
    "tape_biased_wide_heads": {"qkv_bias": True, "kv_channels": 12},
    "tape_qk_norm": {"qk_norm": True},
    "tape_gated_output": {"attention_output_gate": True},
    "tape_qk_norm_one_group": {"qk_norm": True, "num_query_groups": 1},
    "rope_qk_norm": {"position_encoding": "rope", "qk_norm": True},
    "randpe": {"position_encoding": "randpe"},
    "repo": {"position_encoding": "repo", "repo_width": 5},
    "repo_in_all_layers_qk_norm": {"position_encoding": "repo", "repo_first_layer": 0, "qk_norm": True},
    "nope_qk_norm_multi_head": {"position_encoding": "nope", "qk_norm": True, "num_query_groups": 4},
}


def of_layers(model, precision="bf16", recompute="none", tensor_size=1):
    layout = {"parallel__tensor_model_parallel_size": tensor_size}
    return activations(of_model(model, 1, precision, recompute, **layout)).layers


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_built_model_and_of_its_shards(shape):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    parameters = list(build(model)[0].parameters())
    assert parameter_count(model) == sum(p.numel() for p in parameters)
    if model.query_groups % 2 == 0:
        assert parameter_count(model, tensor_size=2) == sum(shard(p, p, 0, 2).numel() for p in parameters)


@pytest.mark.parametrize("precision, recompute", [("bf16", "none"), ("fp32", "selective"), ("bf16", "full")])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_activations_are_those_counted(shape, precision, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    saved = saved_bytes(build(model, recompute=recompute, dtype=dtype)[0], model)
    assert on_cpu(model, 2, precision, recompute) == pytest.approx(saved, rel=0.004)


@pytest.mark.parametrize("shape, recompute", [*((shape, "none") for shape in SHAPES), ("tape", "selective")])
def test_saved_activations_of_packed_documents_are_those_counted(shape, recompute):
    model = small_model(**SHAPES[shape], attention_backend="torch")
    saved = saved_bytes(build(model, recompute=recompute)[0], model, packed=True)
    assert on_cpu(model, 2, "fp32", recompute, data__reset_attention_mask=True) == pytest.approx(saved, rel=0.02)


def test_saved_activations_of_a_larger_model_are_those_counted_and_tape_keeps_little_more_than_rope():
    saved = {}
    for encoding in ("tape", "rope"):
        model = middle_model(encoding)
        saved[encoding] = saved_bytes(build(model)[0], model)
        assert on_cpu(model, 2, "fp32") == pytest.approx(saved[encoding], rel=0.01)
        # GPUs keep no normalised copy.
        assert activations(of_model(model, 2, "fp32")).saved == pytest.approx(saved[encoding], rel=0.15)
    assert saved["rope"] < saved["tape"] <= 1.25 * saved["rope"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "encoding, trains",
    [
        ("tape", ["position", "lora", "embeddings", "norms"]),
        ("rope", ["lora", "embeddings", "norms"]),
        ("rope", ["norms", "output"]),
    ],
)
def test_an_extension_trains_and_saves_what_is_counted(encoding, trains, recompute):
    model, extension = middle_model(encoding), ExtensionConfig(trains=trains, lora_rank=4)
    built, _ = build(model, recompute=recompute, lora=extension if extension.adds_lora else None)
    select_trained(built, trained_by(extension), recompute != "none")
    parameters = list(built.parameters())
    sizes = [sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)]
    assert [parameter_count(model, extension), parameter_count(model, extension, trained_kinds(extension))] == sizes
    saved = saved_bytes(built, model)
    assert on_cpu(model, 2, "fp32", recompute, extension=extension) == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("name", ["tape_155m", "tape_1b", "tape_7b"])
@pytest.mark.parametrize("backend, most", [("triton", 1.25), ("torch", 1.28), ("auto", 1.42)])
def test_layers_of_tape_keep_little_more_than_those_of_rope(backend, most, name, tensor_size, precision):
    """Also where the MLP is as narrow as Llama's and the state travels."""
    model = recipe(name, f"--model.attention_backend={backend}").model
    for width in {model.ffn_hidden_size, 8 * model.hidden_size // 3}:
        for groups in (model.num_attention_heads, model.num_attention_heads // 4):
            same = with_values(model, ffn_hidden_size=width, num_query_groups=groups)
            with_rope = with_values(same, position_encoding="rope", attention_backend="auto")
            tape, rope = (of_layers(changed, precision, tensor_size=tensor_size) for changed in (same, with_rope))
            assert rope < tape <= most * rope, (width, groups)


def test_selective_recomputation_keeps_little_beside_the_layers_of_rope():
    """The shares that docs/training.md names."""
    shares = {"rope": [], "tape": [], "tape with a state in bf16": []}
    for name in ("tape_155m", "tape_1b", "tape_7b"):
        for size in (1, 2):
            tape = recipe(name).model
            rope = with_values(tape, position_encoding="rope")
            rounded = with_values(tape, state_precision="bf16")
            whole = of_layers(rope, tensor_size=size)
            for key, model in zip(shares, (rope, tape, rounded)):
                shares[key].append(of_layers(model, recompute="selective", tensor_size=size) / whole)
    assert {key: (round(min(found), 2), round(max(found), 2)) for key, found in shares.items()} == {
        "rope": (0.10, 0.11),
        "tape": (0.18, 0.28),
        "tape with a state in bf16": (0.17, 0.22),
    }


@pytest.mark.parametrize(
    "encoding, dim, backend", [("tape", 64, "torch_wide"), ("tape", 128, "torch"), ("rope", 64, "torch")]
)
def test_the_backend_that_a_gpu_chooses_is_counted(encoding, dim, backend):
    model = with_values(recipe().model, position_encoding=encoding, kv_channels=dim)
    backends = ("auto", "triton", "torch", "torch_wide")
    kept = {name: of_layers(with_values(model, attention_backend=name)) for name in backends}
    assert kept["auto"] == kept[backend]
    assert encoding == "rope" or kept["triton"] < kept["torch"] < kept["torch_wide"]


@pytest.mark.parametrize("groups", [8, 32])
def test_one_call_for_values_and_states_keeps_them_in_one_tensor_and_copies_an_average(groups):
    """What it keeps more than two calls, in the layers that average the state."""
    model = with_values(recipe().model, num_query_groups=groups)
    wide, twice = (of_layers(with_values(model, attention_backend=name)) for name in ("torch_wide", "torch"))
    heads, dim, averaging = model.num_attention_heads, model.head_dim, model.num_layers - 1
    tensors = 2 * (2 * groups + heads) * dim  # [v | z] and the copy, in bf16
    # The first layer keeps no projection: rotated by constants, and copied.
    first = 2 * (heads + 2 * groups) * dim
    found = averaging * (tensors - 4 * heads) - first  # log-sums of one call
    assert wide - twice == model.seq_length * found
