"""Open the weights of a model of transformers by the names of Llama's weights.

Phi-3 is Llama with fused projections. It may also rotate only the first elements of each head
(partial rotary). torch is imported only when a tensor is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import PHI3, read_settings
from megatron_tape.huggingface.imports.weight_files import MISMATCH, LazyTensors, open_directory
from megatron_tape.model.shapes import hugging_face_shapes

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = {
    "self_attn.qkv_proj.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
"""Phi-3's fused weights, and Llama's weights that they concatenate."""
_ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def open_model(directory: Path, model: ModelConfig, allow_pickle: bool = False) -> LazyTensors:
    """Return the weights of a model with the settings `model`, by the names of Llama's weights.

    Raises FileError.
    """
    weights = open_directory(directory, allow_pickle)
    if read_settings(directory / "config.json").get("model_type") == PHI3:
        return _split(weights, model, str(directory))
    return weights


def _split(weights: LazyTensors, model: ModelConfig, origin: str) -> LazyTensors:
    """Return Phi-3's weights by the names of Llama's weights.

    Raises FileError if a fused weight is missing or has another number of rows.
    """
    expected = hugging_face_shapes(model)
    shapes = dict(weights.shapes)
    names = dict.fromkeys(weights)
    # For each of Llama's weights: the name of the fused weight, and its rows there.
    places = {}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for suffix, parts in _FUSED.items():
            fused = f"{prefix}{suffix}"
            if fused not in weights:
                raise FileError(origin, f"lacks the parameter {fused}", MISMATCH)
            del names[fused]
            start = 0
            for part in parts:
                stop = start + expected[prefix + part][0]
                places[prefix + part] = fused, slice(start, stop)
                start = stop
            if shapes.pop(fused, (stop,))[0] != stop:
                raise FileError(origin, f"gives {fused} another shape than {stop} rows", MISMATCH)

    def read(name: str) -> Tensor:
        if name not in places:
            return weights[name]
        fused, rows = places[name]
        part = weights[fused][rows]
        if name.endswith(_ROTATED):
            return _in_pairs(part, model)
        return part

    return LazyTensors([*names, *places], read, shapes)


def _in_pairs(weight: Tensor, model: ModelConfig) -> Tensor:
    """Return a projection (N D, C) to queries or keys in the order of elements of `rope_share`.

    Of the D elements of a head, Phi-3 rotates the first R, in pairs (i, i + R/2). With
    `rope_share`, pairs are (i, i + D/2), and the first R/2 of them rotate. Scores of queries and
    keys do not depend on the order.
    """
    import torch

    half = model.head_dim // 2
    pairs = int(getattr(model.position, "rope_share", 1.0) * model.head_dim // 2)
    first, second, others = torch.arange(model.head_dim).split(
        [pairs, pairs, model.head_dim - 2 * pairs]
    )
    order = torch.cat([first, others[: half - pairs], second, others[half - pairs :]])
    return weight.unflatten(0, (-1, model.head_dim))[:, order].flatten(0, 1)
