"""Small models for tests."""

import torch
from configurations import model_config
from released import load

from megatron_tape.model.initialization import initialize_weights, weight_initializations
from megatron_tape.model.language_model import LanguageModel, transformer_config
from megatron_tape.model.lora import add_lora
from megatron_tape.model.names import kind_of
from megatron_tape.model.reference import ReferenceConfig
from megatron_tape.model.weights import from_megatron, load_weights
from megatron_tape.parallel.layout import initialize_distributed, seed_everything
from megatron_tape.parallel.partitions import allocate

SMALL = dict(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    vocab_size=64,
    mlp_size=6,
    init_std=0.1,
)
# Heads of size 8 have four frequencies: the first is kept, the last divided, and those between are
# interpolated.
YARN = dict(
    rope_scaling_type="yarn",
    rope_scaling_factor=4.0,
    rope_original_seq_length=16,
    rope_theta=10.0,
    rope_beta_fast=2.0,
    rope_beta_slow=0.5,
)
LLAMA3 = dict(rope_scaling_type="llama3", rope_scaling_factor=8.0, rope_original_seq_length=32)
LEARNED = {"increments": "learned"}
SIGNED = {"increments": "signed"}
UNIT = {"state_norm": "unit"}
INCREMENTS = {
    "rope_learned": {"position_encoding": "rope", **LEARNED},
    "rope_learned_yarn": {"position_encoding": "rope", **LEARNED, **YARN},
    "tape_learned": LEARNED,
    "tape_llama3_one_group": {"num_query_groups": 1, **LEARNED, **LLAMA3},
    "rope_signed": {"position_encoding": "rope", **SIGNED},
    "tape_signed_llama3": SIGNED | LLAMA3,
    "tape_share": {"rope_share": 0.5} | SIGNED,
    "unit": UNIT,
    "both_yarn": LEARNED | UNIT | YARN,
    "both_from_attention": {"gate_input": "attention", "num_query_groups": 4} | LEARNED | UNIT,
    "one_layer": {"num_layers": 1} | LEARNED | UNIT,
}
SOME_LAYERS = {
    "rope_some_layers": {
        "position_encoding": "rope",
        "num_layers": 4,
        "layers_without_positions": 2,
    },
    "tape_some_layers": {"num_layers": 6, "layers_without_positions": 3},
}
WINDOWS = {
    "rope_window": {"position_encoding": "rope", "sliding_window": 5},
    "tape_window": {"sliding_window": 5, "full_attention_every": 2},
    "tape_window_of_two": {"sliding_window": 2, "full_attention_every": 3},
    # Layers that attend to all tokens have no positions, but a temperature.
    "swan": {
        "position_encoding": "rope",
        "num_layers": 4,
        "sliding_window": 3,
        "full_attention_every": 2,
        "layers_without_positions": 2,
        "temperature_scale": 0.5,
        "temperature_floor_scale": 3,
    },
    "tape_swan": {
        "num_layers": 6,
        "sliding_window": 4,
        "full_attention_every": 3,
        "layers_without_positions": 3,
    },
    # Layers with a window have frequencies of their own, as in OLMo 3 and Gemma 3.
    "rope_scaled_full_layers": {
        "position_encoding": "rope",
        "sliding_window": 5,
        "full_attention_every": 3,
        "rope_scaling_layers": "full",
        **YARN,
    },
    "tape_scaled_full_layers": {
        "num_layers": 4,
        "sliding_window": 5,
        "full_attention_every": 3,
        "rope_scaling_layers": "full",
        **YARN,
    },
    "tape_local_theta": {
        "num_layers": 4,
        "sliding_window": 5,
        "full_attention_every": 2,
        "rope_local_theta": 3.0,
        "state_norm": "unit",
    },
    "tape_local_theta_some_layers": {
        "num_layers": 6,
        "sliding_window": 5,
        "full_attention_every": 2,
        "layers_without_positions": 3,
        "rope_local_theta": 3.0,
        "rope_scaling_factor": 2.0,
    },
}


def small_model(**changes):
    return model_config(**(SMALL | changes))


def build(
    model,
    tp=1,
    recompute="none",
    seed=0,
    randomize=True,
    sequence_parallel=None,
    dtype=torch.float32,
    device="cpu",
    lora=None,
    shifted_sparse=False,
    cp=1,
    fused=None,
):
    """Build this process's shard of a model; `randomize` changes parameters whose initial values
    have no effect.

    `lora` are settings of a context extension that adds LoRA layers.
    """
    layout = initialize_distributed(tp, context_parallel_size=cp)
    seed_everything(seed)
    sp = tp > 1 if sequence_parallel is None else sequence_parallel
    translated = transformer_config(model, tp, sp, dtype)
    built = LanguageModel(
        model, translated, layout.groups, device, shifted_sparse, recompute, fused
    )
    if lora is not None:
        add_lora(built, model, lora)
    begin(built, model, layout, seed, lora)
    if randomize:
        randomize_tape(built)
    return built.to(device), layout


def begin(built, model, layout, seed=0, lora=None):
    """Allocate and initialize a newly built model."""
    allocate(built, "cpu")
    ranks = layout.tensor_parallel_rank, layout.tensor_parallel_size
    initialize_weights(built, weight_initializations(model, lora), seed, *ranks)
    return built


@torch.no_grad()
def randomize_tape(built):
    generators = {seed: torch.Generator().manual_seed(seed) for seed in (98, 99)}

    def draw(parameter, std, seed=99):
        return torch.randn(parameter.shape, generator=generators[seed]) * std

    for name, parameter in built.named_parameters():
        if name.endswith("position.increments"):
            generators[98].manual_seed(98)
            parameter.copy_(draw(parameter, 0.5, seed=98))
    for update in built.updating_encodings():
        for parameter in update.parameters():
            parameter.copy_(draw(parameter, parameter.shape[-1] ** -0.5))
    for name, parameter in built.named_parameters():
        if name.endswith(("linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight")):
            parameter.add_(draw(parameter, 0.3))
        if ".position." in name and not parameter.any():
            parameter.copy_(draw(parameter, 0.1))
        if kind_of(name) == "lora" and name.endswith("_B"):
            parameter.copy_(draw(parameter, 0.3))


@torch.no_grad()
def move_positions(built):
    """Move the parameters of a model's positional encoding far from their initial values."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in built.named_parameters():
        if ".position." in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return built


def whole_weights(built, model):
    """Return the weights of a single-process model by the reference's names."""
    weights = {}
    for name, parameter in built.named_parameters():
        weights |= from_megatron(name, parameter.detach(), model)
    return weights


def reference_config(model):
    position = vars(model.position)
    own = {
        key: value
        for key, value in position.items()
        if key.startswith("rope_") or key in ("gate_input", "state_norm", "increments")
    }
    return ReferenceConfig(
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        norm_epsilon=model.norm_epsilon,
        layers_without_positions=model.layers_without_positions,
        temperature_scale=model.temperature_scale,
        temperature_floor_scale=model.temperature_floor_scale,
        sliding_window=model.sliding_window,
        full_attention_every=model.full_attention_every,
        **own,
    )


def _released_scaling(config):
    scaling = config["rope_scaling"] or {"type": "linear", "factor": 1.0}
    if scaling["type"] == "linear":
        return {"rope_scaling_factor": scaling["factor"]}
    original = config["original_max_position_embeddings"]
    factor = -(
        -config["max_position_embeddings"] // original
    )  # the released code ignores the factor
    return {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_original_seq_length": original,
    }


def released_model(name, dtype=torch.float32, **changes):
    """Build the released code's model `name` and return (model settings, module, the file's
    contents).
    """
    config, weights, gradients, rest = load(name)
    model = model_config(
        position_encoding={"adape": "tape", "t5rb": "t5", "yarn": "rope"}.get(
            config["rpe_type"], config["rpe_type"]
        ),
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        mlp_size=config["position_size"],
        vocab_size=config["vocab_size"],
        seq_length=24,
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        **_released_scaling(config),
        **changes,
    )
    built, _ = build(model, dtype=dtype)
    return model, built, weights, gradients, rest


def load_whole(built, weights, model, layout):
    load_weights(built, weights, model, layout.tensor_parallel_rank, layout.tensor_parallel_size)


def random_batch(seed, batch=1):
    """Return tokens and the labels that follow them, as arguments of the model."""
    tokens = random_tokens(batch, 17, seed=seed)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def random_tokens(batch=2, length=16, vocabulary=64, seed=3):
    return torch.randint(
        vocabulary,
        (batch, length),
        generator=torch.Generator().manual_seed(seed),
    )
