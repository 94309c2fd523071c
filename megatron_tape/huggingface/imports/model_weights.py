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
_ROTATED_WEIGHTS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def open_model(directory: Path, model: ModelConfig, allow_pickle: bool = False) -> LazyTensors:
    """Return the weights in `directory` of a model with the settings `model`, by the names of
    Llama's weights.

    Raises FileError if a file is missing or damaged, or a pickle without `allow_pickle`.
    """
    weights = open_directory(directory, allow_pickle)
    if read_settings(directory / "config.json").get("model_type") == PHI3:
        return _split_fused(weights, model, str(directory))
    return weights


def _split_fused(weights: LazyTensors, model: ModelConfig, origin: str) -> LazyTensors:
    """Return Phi-3's weights by the names of Llama's weights.

    Raises FileError about `origin`, the model's directory, if a fused weight is missing or has
    another number of rows.
    """
    expected = hugging_face_shapes(model)
    shapes = dict(weights.shapes)
    # All names of Phi-3's weights. The loop below removes those of fused weights.
    unfused_names = dict.fromkeys(weights)
    # For each of Llama's weights that is fused: the name of the fused weight, and its rows there.
    rows_by_name = {}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for suffix, parts in _FUSED.items():
            fused = f"{prefix}{suffix}"
            if fused not in weights:
                raise FileError(origin, f"lacks the parameter {fused}", MISMATCH)
            del unfused_names[fused]
            start = 0
            for part in parts:
                stop = start + expected[prefix + part][0]
                rows_by_name[prefix + part] = fused, slice(start, stop)
                start = stop
            # The shape of a pickled weight is not known before the weight is read. The default of
            # `pop` then passes this check.
            if shapes.pop(fused, (stop,))[0] != stop:
                raise FileError(origin, f"gives {fused} another shape than {stop} rows", MISMATCH)

    def load_weight(name: str) -> Tensor:
        """Read a weight by Llama's name: rows of a fused weight, or Phi-3's weight of this name."""
        if name not in rows_by_name:
            return weights[name]
        fused, rows = rows_by_name[name]
        part = weights[fused][rows]
        if name.endswith(_ROTATED_WEIGHTS):
            return _reordered_for_rope_share(part, model)
        return part

    return LazyTensors([*unfused_names, *rows_by_name], load_weight, shapes)


def _reordered_for_rope_share(weight: Tensor, model: ModelConfig) -> Tensor:
    """Return the projection `weight` (N D, C) of Phi-3 to queries or keys of N heads, with its rows
    in the order that this project's setting `rope_share` expects.

    Of the D elements of a head, Phi-3 rotates the first R, in pairs (i, i + R/2). With
    `rope_share`, pairs are (i, i + D/2), and the first R/2 of them rotate. Scores do not change,
    because queries and keys are reordered alike.
    """
    import torch

    half_dim = model.head_dim // 2
    # Positional encodings without `rope_share` get 1, which leaves the order unchanged.
    num_pairs = int(getattr(model.position, "rope_share", 1.0) * model.head_dim // 2)
    # In Phi-3's order: the first and the second elements of rotated pairs, then the others.
    first_of_pairs, second_of_pairs, others = torch.arange(model.head_dim).split(
        [num_pairs, num_pairs, model.head_dim - 2 * num_pairs]
    )
    # Elements i and i + D/2 of this order are a pair.
    order = torch.cat(
        [
            first_of_pairs,
            others[: half_dim - num_pairs],
            second_of_pairs,
            others[half_dim - num_pairs :],
        ]
    )
    return weight.unflatten(0, (-1, model.head_dim))[:, order].flatten(0, 1)
