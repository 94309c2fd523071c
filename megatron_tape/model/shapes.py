"""Shapes of a model's parameters and their tensor-parallel sharding, from the settings alone.
Imports no torch.

A whole parameter is an unsharded one. Axes: C hidden size, H query heads, G key/value groups, D
head dimension.
"""

from math import prod
from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import (
    EMBEDDING,
    FUSED,
    NORM,
    OUTPUT,
    POSITION,
    hugging_face_name,
    hugging_face_prefix,
    layer_name,
    split_layer,
)
from megatron_tape.position import encoding_of


class ParameterShape(NamedTuple):
    """The shape of one parameter, and how tensor parallelism shards it."""

    whole: tuple[int, ...]
    """The shape before sharding."""
    partition_dim: int | None = None
    """The axis that tensor parallelism shards; None if every rank has the whole parameter."""

    def elements(self, tensor_size: int = 1) -> int:
        """Return the number of elements of the parameter on one of `tensor_size` tensor-parallel
        ranks.
        """
        elements = prod(self.whole)
        return elements if self.partition_dim is None else elements // tensor_size


class Factor(NamedTuple):
    """A or B, one of the two matrices of a LoRA layer."""

    target: str
    """The adapted projection: q, k, v or o."""
    side: str
    """A, which maps the projection's input to `lora_rank` elements, or B, which maps these to the
    output.
    """
    shape: tuple[int, int]
    """The shape before sharding."""
    partition_dim: int | None
    """The axis that tensor parallelism shards; None if every rank has the whole matrix."""


def lora_widths(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of the projections q, k, v and o, which LoRA can adapt."""
    C = model_config.hidden_size
    D = model_config.head_dim
    heads = model_config.num_attention_heads * D
    groups = model_config.query_groups * D
    return {"q": (C, heads), "k": (C, groups), "v": (C, groups), "o": (heads, C)}


def lora_factors(model_config: ModelConfig, extension: ExtensionConfig | None) -> dict[str, Factor]:
    """Return the LoRA factors of one layer by their names in the layer; empty if `extension` adds
    no LoRA.
    """
    if extension is None or not extension.adds_lora:
        return {}
    rank = extension.lora_rank
    factors = {}
    for target, (width_in, width_out) in lora_widths(model_config).items():
        if target not in extension.lora_targets:
            continue
        # Tensor parallelism shards heads: they are the outputs of q, k and v (the rows of B), and
        # the input of o (the columns of A).
        linear = "linear_qkv"
        dim_a, dim_b = None, 0
        if target == "o":
            linear = "linear_proj"
            dim_a, dim_b = 1, None
        name = f"self_attention.{linear}.lora.{target}"
        factors[f"{name}_A"] = Factor(target, "A", (rank, width_in), dim_a)
        factors[f"{name}_B"] = Factor(target, "B", (width_out, rank), dim_b)
    return factors


def sharded_shapes(
    model_config: ModelConfig, extension: ExtensionConfig | None = None
) -> dict[str, ParameterShape]:
    """Return shape and sharding of every parameter by name, in layer order; includes `extension`'s
    LoRA layers.

    Layers have the same parameters, apart from those of the positional encoding.
    """
    C = model_config.hidden_size
    H = model_config.num_attention_heads
    G = model_config.query_groups
    D = model_config.head_dim
    F = model_config.ffn_hidden_size
    qkv = (H + 2 * G) * D

    # The second argument of `ParameterShape` is the axis that tensor parallelism shards.
    layer = {
        "input_layernorm.weight": ParameterShape((C,)),
        "self_attention.linear_qkv.weight": ParameterShape((qkv, C), 0),
    }
    if model_config.qkv_bias:
        layer["self_attention.linear_qkv.bias"] = ParameterShape((qkv,), 0)
    if model_config.qk_norm:
        layer["self_attention.q_layernorm.weight"] = ParameterShape((D,))
        layer["self_attention.k_layernorm.weight"] = ParameterShape((D,))
    if model_config.attention_output_gate:
        layer["self_attention.linear_gate.weight"] = ParameterShape((H * D, C), 0)
    layer |= {
        "self_attention.linear_proj.weight": ParameterShape((C, H * D), 1),
        "pre_mlp_layernorm.weight": ParameterShape((C,)),
        "mlp.linear_fc1.weight": ParameterShape((2 * F, C), 0),
        "mlp.linear_fc2.weight": ParameterShape((C, F), 1),
    }
    for name, factor in lora_factors(model_config, extension).items():
        layer[name] = ParameterShape(factor.shape, factor.partition_dim)

    shapes = {EMBEDDING: ParameterShape((model_config.vocab_size, C), 0)}
    for index in range(model_config.num_layers):
        for name, shape in layer.items():
            shapes[layer_name(index, name)] = shape
        for name, declared in encoding_of(model_config).parameters(index).items():
            shapes[layer_name(index, POSITION + name)] = ParameterShape(
                declared.shape, declared.partition_dim
            )
    shapes[NORM] = ParameterShape((C,))
    if not model_config.tie_embeddings:
        shapes[OUTPUT] = ParameterShape((model_config.vocab_size, C), 0)
    return shapes


def parameter_shapes(
    model_config: ModelConfig, extension: ExtensionConfig | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every parameter by name; includes `extension`'s LoRA factors."""
    return {name: shape.whole for name, shape in sharded_shapes(model_config, extension).items()}


def is_diagonal(
    model_config: ModelConfig,
    layer: int | None,
    suffix: str,
) -> bool:
    """Return whether a parameter is a vector that exported models store as a diagonal matrix.

    `layer` and `suffix` are its layer and its name in the layer, as returned by `split_layer`.
    """
    if not suffix.startswith(POSITION):
        return False
    declared = encoding_of(model_config).parameters(layer)
    return declared[suffix.removeprefix(POSITION)].diagonal


def hugging_face_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of an exported model by Hugging Face's name, in layer
    order.
    """
    widths = lora_widths(model_config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(model_config).items():
        layer, suffix = split_layer(name)
        prefix = hugging_face_prefix(layer)
        if match := FUSED.fullmatch(suffix):
            for p in "qkv":
                _, output_size = widths[p]
                shapes[f"{prefix}self_attn.{p}_proj.{match[1]}"] = (output_size, *shape[1:])
        elif suffix == "mlp.linear_fc1.weight":
            for p in ("gate", "up"):
                shapes[f"{prefix}mlp.{p}_proj.weight"] = (shape[0] // 2, *shape[1:])
        elif is_diagonal(model_config, layer, suffix):
            shapes[hugging_face_name(layer, suffix)] = shape * 2  # (H,) becomes (H, H)
        else:
            shapes[hugging_face_name(layer, suffix)] = shape
    return shapes
