"""Names and shapes of a model's parameters: whole weights have Hugging Face's names, others Megatron's. No torch."""

import re

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.lora_shapes import lora_factors
from megatron_tape.position import encoding_of

WRAPPED = "gpt."
"""Prefix that `LanguageModel` and checkpoints add to the names of `GPTModel` parameters."""
POSITION = "position."
"""Prefix of a positional encoding's parameters within a layer, here and in Hugging Face's names."""
OUTPUT = "lm_head.weight"
"""Hugging Face's name of the output layer's matrix."""
PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": OUTPUT,
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_gate.weight": "self_attn.gate_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
FUSED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")


def split_layer(name: str) -> tuple[str, str, str]:
    """Split a Megatron name into (Megatron prefix, Hugging Face prefix, rest)."""
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        return f"decoder.layers.{match[1]}.", f"model.layers.{match[1]}.", match[2]
    return "", "", name


def whole_name(prefix: str, rest: str) -> str:
    """Return Hugging Face's name of an unfused parameter, given the last two results of `split_layer`."""
    return prefix + (f"{rest}.weight" if rest.startswith(POSITION) else PLAIN.get(rest, rest))


def parameter_shapes(model: ModelConfig, extension: ExtensionConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and whole shape of every `GPTModel` parameter, in the order of the layers.

    Those of LoRA layers are included if `extension` adds them.
    """
    C, H, G, D = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding = encoding_of(model)
    bias = {"self_attention.linear_qkv.bias": ((H + 2 * G) * D,)} if model.qkv_bias else {}
    norms = {f"self_attention.{x}_layernorm.weight": (D,) for x in "qk"} if model.qk_norm else {}
    gate = {"self_attention.linear_gate.weight": (H * D, C)} if model.attention_output_gate else {}
    layer = {
        "input_layernorm.weight": (C,),
        "self_attention.linear_qkv.weight": ((H + 2 * G) * D, C),
        **bias,
        **norms,
        **gate,
        "self_attention.linear_proj.weight": (C, H * D),
        "pre_mlp_layernorm.weight": (C,),
        "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size, C),
        "mlp.linear_fc2.weight": (C, model.ffn_hidden_size),
    }
    if extension is not None:
        layer |= {name: factor.shape for name, factor in lora_factors(model, extension).items()}
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.vocab_size, C)}
    for index in range(model.num_layers):
        own = {f"{POSITION}{name}": declared.shape for name, declared in encoding.parameters(index).items()}
        shapes |= {f"decoder.layers.{index}.{name}": shape for name, shape in (layer | own).items()}
    shapes["decoder.final_layernorm.weight"] = (C,)
    return shapes if model.tie_embeddings else shapes | {"output_layer.weight": (model.vocab_size, C)}


def whole_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the Hugging Face name and the shape of every whole weight, in the order of the layers."""
    dim, groups = model.head_dim, model.query_groups
    rows = {"q": model.num_attention_heads * dim, "k": groups * dim, "v": groups * dim}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(model).items():
        _, prefix, rest = split_layer(name)
        if match := FUSED.fullmatch(rest):
            shapes |= {f"{prefix}self_attn.{p}_proj.{match[1]}": (rows[p], *shape[1:]) for p in "qkv"}
        elif rest == "mlp.linear_fc1.weight":
            shapes |= {f"{prefix}mlp.{p}_proj.weight": (model.ffn_hidden_size, *shape[1:]) for p in ("gate", "up")}
        else:
            square = rest == f"{POSITION}token_mixing" and len(shape) == 1
            shapes[whole_name(prefix, rest)] = shape * 2 if square else shape
    return shapes
