"""Names and shapes of parameters: whole weights have Hugging Face's Llama names, one rank's shares Megatron's.

The whole, unsharded names are those of `model.reference.forward`. Megatron fuses q, k and v (for each group:
its queries, its key, its value) and the two halves of the gated MLP, and cuts matrices over the tensor-parallel ranks.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_tape.config.lora import lora_factors
from megatron_tape.config.schema import OF_ENCODING, ExtensionConfig, ModelConfig
from megatron_tape.position import PositionEncoding, encoding_of

WRAPPED = "gpt."
"""Prefix that `LanguageModel` and checkpoints add to the names of `GPTModel` parameters."""
POSITION = "position."
"""Prefix of a positional encoding's parameters within a layer, here and in Hugging Face's names."""
_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}

_FUSED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_LORA = re.compile(r"self_attention\.linear_(?:qkv|proj)\.lora\.([qkvo])_([AB])")


def _split_layer(name: str) -> tuple[str, str, str]:
    """Split a Megatron name into (Megatron prefix, Hugging Face prefix, rest)."""
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        return f"decoder.layers.{match[1]}.", f"model.layers.{match[1]}.", match[2]
    return "", "", name


def kind_of(name: str) -> str:
    """Return which of `config.schema.PARAMETER_KINDS` the parameter of a `GPTModel` or `LanguageModel` is."""
    if f".{POSITION}" in name:
        return "position"
    if ".lora." in name:
        return "lora"
    if name.removeprefix(WRAPPED).startswith(("embedding.", "output_layer.")):
        return "embeddings"
    if name.endswith(".bias"):
        return "biases"
    return "norms" if name.endswith("layernorm.weight") else "matrices"


def part_of(name: str) -> str:
    """Return which part of the model a parameter is: one of `config.schema.TRAINABLE`, or `matrices` or `biases`."""
    kind = kind_of(name)
    if kind == "embeddings" and name.removeprefix(WRAPPED).startswith("output_layer."):
        return "output"
    return OF_ENCODING if kind == "position" else kind


def parameter_shapes(model: ModelConfig, extension: ExtensionConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and whole shape of every `GPTModel` parameter, in the order of the layers.

    Those of LoRA layers are included if `extension` adds them.
    """
    C, H, G, D = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding = encoding_of(model)
    bias = {"self_attention.linear_qkv.bias": ((H + 2 * G) * D,)} if model.qkv_bias else {}
    norms = {f"self_attention.{x}_layernorm.weight": (D,) for x in "qk"} if model.qk_norm else {}
    layer = {
        "input_layernorm.weight": (C,),
        "self_attention.linear_qkv.weight": ((H + 2 * G) * D, C),
        **bias,
        **norms,
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


def initial_parameters(encoding: PositionEncoding, layer: int, seed: int) -> dict[str, Tensor]:
    """Draw the encoding's parameters of layer `layer`, from 0: whole float32 tensors by name.

    They have a random stream of their own, so a model's other weights depend on the seed, but not on the encoding.
    """
    generator = torch.Generator().manual_seed((seed + 7919 * (layer + 1)) % 2**63)
    drawn = {}
    for name, declared in encoding.parameters(layer).items():
        if declared.std:
            drawn[name] = torch.empty(declared.shape).normal_(0.0, declared.std, generator=generator)
        else:
            drawn[name] = torch.tensor(declared.value, dtype=torch.float32).expand(declared.shape).clone()
    return drawn


def current_name(stored: str) -> str:
    """Return the current name of a parameter that a checkpoint may hold under an older name."""
    return stored.replace(".position_update.", f".{POSITION}")


def to_megatron(weights: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    """Return the whole tensor of the `GPTModel` parameter `name`; KeyError if `weights` lacks a part of it."""
    _, prefix, rest = _split_layer(name)
    if match := _FUSED.fullmatch(rest):
        parts = [weights[f"{prefix}self_attn.{p}_proj.{match[1]}"] for p in "qkv"]
        return torch.cat([part.unflatten(0, (model.query_groups, -1)) for part in parts], dim=1).flatten(0, 1)
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([weights[f"{prefix}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    if match := _LORA.fullmatch(rest):
        return weights[lora_name(prefix, *match.groups())]
    tensor = weights[prefix + _PLAIN.get(rest, rest)]
    if rest == f"{POSITION}token_mixing" and model.token_mixing == "per_head":
        if torch.count_nonzero(tensor - tensor.diag().diag()):
            raise ValueError(f"{prefix + rest} mixes heads; it needs model.token_mixing: full")
        return tensor.diag()
    return tensor


def whole_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the Hugging Face name and the shape of every whole weight, in the order of the layers."""
    shapes = {}
    for name, shape in parameter_shapes(model).items():
        for part, tensor in from_megatron(name, torch.empty(shape, device="meta"), model).items():
            shapes[part] = tuple(tensor.shape)
    return shapes


def from_megatron(name: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Return the Hugging Face parts of the whole `GPTModel` parameter `name`."""
    _, prefix, rest = _split_layer(name)
    if match := _FUSED.fullmatch(rest):
        D, G = model.head_dim, model.query_groups
        sizes = [model.num_attention_heads // G * D, D, D]
        parts = tensor.unflatten(0, (G, -1)).split(sizes, dim=1)
        return {f"{prefix}self_attn.{p}_proj.{match[1]}": part.flatten(0, 1) for p, part in zip("qkv", parts)}
    if rest == "mlp.linear_fc1.weight":
        return {f"{prefix}mlp.{p}_proj.weight": part for p, part in zip(("gate", "up"), tensor.chunk(2))}
    if match := _LORA.fullmatch(rest):
        return {lora_name(prefix, *match.groups()): tensor}
    if rest == f"{POSITION}token_mixing" and tensor.dim() == 1:
        tensor = tensor.diag()
    return {prefix + _PLAIN.get(rest, rest): tensor}


def lora_pairs(model: ModelConfig, extension: ExtensionConfig) -> dict[str, dict[str, str]]:
    """Return the `GPTModel` names of the LoRA factors A and B by the Hugging Face name of the matrix they add to."""
    pairs: dict[str, dict[str, str]] = {}
    for index in range(model.num_layers):
        for name, factor in lora_factors(model, extension).items():
            matrix = f"model.layers.{index}.self_attn.{factor.target}_proj.weight"
            pairs.setdefault(matrix, {})[factor.side] = f"decoder.layers.{index}.{name}"
    return pairs


def lora_name(prefix: str, target: str, side: str) -> str:
    """Return peft's name of a factor of projection `target` (q, k, v or o) in the layer with this prefix."""
    return f"{prefix}self_attn.{target}_proj.lora_{side}.weight"


def shard(whole: Tensor, parameter: Tensor, rank: int, size: int) -> Tensor:
    """Return tensor-parallel rank `rank`'s share of `whole`; `parameter` has the attributes that say how to cut."""
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat(whole.chunk(size * stride, dim=dim)[rank::size], dim=dim)


def unshard(parts: list[Tensor], parameter: Tensor) -> Tensor:
    """Join all tensor-parallel ranks' shares: the inverse of `shard`."""
    if len(parts) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return parts[0]
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces = [part.chunk(stride, dim=dim) for part in parts]
    return torch.cat([piece[i] for i in range(stride) for piece in pieces], dim=dim)


@torch.no_grad()
def load_weights(gpt: torch.nn.Module, weights: dict[str, Tensor], model: ModelConfig, rank: int, size: int) -> None:
    """Fill a `GPTModel` on tensor-parallel rank `rank` of `size` from whole weights by Hugging Face's names."""
    for name, parameter in gpt.named_parameters():
        parameter.copy_(shard(to_megatron(weights, name, model), parameter, rank, size))
