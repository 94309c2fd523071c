"""Convert between Hugging Face's weights and the model's sharded parameters, by their names (see
`model.names`).

Hugging Face's weights are unsharded, and have the names of Llama that `model.reference.forward`
uses. Megatron fuses q, k and v into one matrix (for each group: its queries, its key, its value),
and the gate and up projections of the MLP into another. It shards matrices over the tensor-parallel
ranks.
"""

import itertools
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.errors import FileError
from megatron_tape.model.names import (
    FUSED,
    hugging_face_name,
    hugging_face_prefix,
    layer_name,
    split_layer,
)
from megatron_tape.model.shapes import is_diagonal, lora_factors
from megatron_tape.parallel.partitions import is_sharded

_LORA = re.compile(r"self_attention\.linear_(?:qkv|proj)\.lora\.([qkvo])_([AB])")
"""The model's names of LoRA factors without the layer prefix, such as
`self_attention.linear_qkv.lora.q_A` for factor A of q.
"""


def to_megatron(
    weights: Mapping[str, Tensor],
    name: str,
    model_config: ModelConfig,
) -> Tensor:
    """Return the model's unsharded parameter `name` from Hugging Face's `weights`.

    Raises KeyError if `weights` lacks one that is needed, and FileError if a matrix that Megatron
    stores as a vector is not diagonal.
    """
    layer, suffix = split_layer(name)
    prefix = hugging_face_prefix(layer)
    if match := FUSED.fullmatch(suffix):
        qkv = [weights[f"{prefix}self_attn.{p}_proj.{match[1]}"] for p in "qkv"]
        # Megatron's order: for each group its queries, its key, its value.
        by_group = [weight.unflatten(0, (model_config.query_groups, -1)) for weight in qkv]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    if suffix == "mlp.linear_fc1.weight":
        gate = weights[f"{prefix}mlp.gate_proj.weight"]
        up = weights[f"{prefix}mlp.up_proj.weight"]
        return torch.cat([gate, up])
    if match := _LORA.fullmatch(suffix):
        return weights[lora_name(prefix, *match.groups())]
    hugging_face = hugging_face_name(layer, suffix)
    tensor = weights[hugging_face]
    if not is_diagonal(model_config, layer, suffix):
        return tensor
    if torch.count_nonzero(tensor - tensor.diag().diag()):
        raise FileError(
            f"tensor {hugging_face}",
            "has nonzero elements off its diagonal, which token_mixing per_head cannot represent",
            "set model.position.token_mixing to full; to import a model, pass --token-mixing full",
        )
    return tensor.diag()


def from_megatron(
    name: str,
    tensor: Tensor,
    model_config: ModelConfig,
) -> dict[str, Tensor]:
    """Return the Hugging Face weights by name that make up the model's unsharded parameter
    `name`.
    """
    layer, suffix = split_layer(name)
    prefix = hugging_face_prefix(layer)
    if match := FUSED.fullmatch(suffix):
        D = model_config.head_dim
        G = model_config.query_groups
        # The rows of one group's queries, key and value.
        sizes = [model_config.num_attention_heads // G * D, D, D]
        qkv = tensor.unflatten(0, (G, -1)).split(sizes, dim=1)
        weights = {}
        for p, weight in zip("qkv", qkv):
            weights[f"{prefix}self_attn.{p}_proj.{match[1]}"] = weight.flatten(0, 1)
        return weights
    if suffix == "mlp.linear_fc1.weight":
        gate, up = tensor.chunk(2)
        return {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
    if match := _LORA.fullmatch(suffix):
        return {lora_name(prefix, *match.groups()): tensor}
    if is_diagonal(model_config, layer, suffix):
        tensor = tensor.diag()
    return {hugging_face_name(layer, suffix): tensor}


def lora_pairs(model_config: ModelConfig, extension: ExtensionConfig) -> dict[str, dict[str, str]]:
    """Return, for each adapted matrix by its Hugging Face name, the model's names of its LoRA
    factors A and B.
    """
    pairs: dict[str, dict[str, str]] = {}
    for index in range(model_config.num_layers):
        for name, factor in lora_factors(model_config, extension).items():
            matrix = f"model.layers.{index}.self_attn.{factor.target}_proj.weight"
            pairs.setdefault(matrix, {})[factor.side] = layer_name(index, name)
    return pairs


def lora_name(
    prefix: str,
    target: str,
    side: str,
) -> str:
    """Return peft's name of LoRA factor `side` (A or B) of projection `target` (q, k, v or o) in a
    layer.
    """
    return f"{prefix}self_attn.{target}_proj.lora_{side}.weight"


def shard(
    whole: Tensor,
    parameter: Tensor,
    rank: int,
    size: int,
) -> Tensor:
    """Return the shard of `whole` on tensor-parallel rank `rank` of `size`, by Megatron's
    attributes of `parameter`.
    """
    if size == 1 or not is_sharded(parameter):
        return whole
    # The fused matrix of gate and up has stride 2: it is cut into two pieces per rank, so that each
    # rank has a part of both. Other parameters have stride 1.
    dim = parameter.partition_dim
    stride = parameter.partition_stride
    pieces = whole.chunk(size * stride, dim=dim)
    return torch.cat(pieces[rank::size], dim=dim)


def unshard(parts: list[Tensor], parameter: Tensor) -> Tensor:
    """Concatenate the shards of all tensor-parallel ranks: the inverse of `shard`."""
    if len(parts) == 1 or not is_sharded(parameter):
        return parts[0]
    dim = parameter.partition_dim
    stride = parameter.partition_stride
    pieces = [part.chunk(stride, dim=dim) for part in parts]
    # The first pieces of all ranks, then the second ones.
    interleaved = itertools.chain(*zip(*pieces))
    return torch.cat([*interleaved], dim=dim)


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    weights: dict[str, Tensor],
    model_config: ModelConfig,
    rank: int,
    size: int,
) -> None:
    """Load unsharded weights by Hugging Face's names into a `LanguageModel`.

    This process is tensor-parallel rank `rank` of `size`.
    """
    for name, parameter in model.named_parameters():
        whole = to_megatron(weights, name, model_config)
        parameter.copy_(shard(whole, parameter, rank, size))
