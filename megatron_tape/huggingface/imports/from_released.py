"""Import checkpoints of the TAPE authors' code (https://github.com/VITA-Group/TAPE)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import (
    cannot_import,
    check_sizes,
    errors_of_settings,
    read_settings,
    shared_settings,
)
from megatron_tape.huggingface.imports.new_checkpoint import advise, write_imported
from megatron_tape.huggingface.imports.weight_files import LazyTensors, open_files
from megatron_tape.io.files import refuse_existing
from megatron_tape.model.reference import from_released
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, model_config
from megatron_tape.position.fire import FireSettings

_ENCODINGS = {
    "adape": "tape",
    "rope": "rope",
    "nope": "nope",
    "alibi": "alibi",
    "t5rb": "t5",
    "fire": "fire",
    "sincos": "sincos",
    "xpos": "xpos",
    "yarn": "rope",
}
_OWN_SETTINGS = {
    "t5rb": ("relative_attention_num_buckets", "relative_attention_max_distance"),
    "yarn": ("original_max_position_embeddings",),
}
_THRESHOLD = "self_attn.rotary_emb.init_L"


def import_released(
    weights: str | Path,
    config: str | Path,
    output: str | Path,
    vocab_multiple: int = 1,
    token_mixing: str = "full",
    allow_pickle: bool = False,
) -> None:
    """Import the released checkpoint `weights`, with settings in the JSON file `config`, as the
    checkpoint `output`.

    Raises UserError or OSError if weights and settings do not match, or if this project does not
    support the model.
    """
    refuse_existing(output, fix="choose another output, or move it away")
    settings = read_settings(Path(config))
    with errors_of_settings(Path(config)):
        model = _model(settings, Path(config), vocab_multiple, token_mixing)
    released = open_files([Path(weights)], allow_pickle)
    for key in (key for key in released if key.endswith(_THRESHOLD)):
        found = released[key].flatten()[:10].tolist()
        if found != [FireSettings.fire_threshold]:
            problem = (
                f"has FIRE's init_L {', '.join(f'{value:g}' for value in found)}, which cannot be"
                " imported"
            )
            raise FileError(str(weights), problem, f"supported: {FireSettings.fire_threshold:g}")
    source = _renamed(released)
    # Nothing reads the position state after the last layer, so the last layer has no update.
    unread = f"model.layers.{model.num_layers - 1}.position."
    write_imported(
        output,
        model,
        source,
        f"a checkpoint of the TAPE authors' code, {Path(weights).name}",
        unread=(unread,) if model.position_encoding == "tape" else (),
    )
    advise(output, model)


def _renamed(released: Mapping[str, Tensor]) -> LazyTensors:
    """Return the weights of the released code under the names of this project's exports."""
    sources = {}
    for key in released:
        try:
            names = from_released({key: torch.empty(1, 1, device="meta")})
        except (KeyError, ValueError):  # not a name of the released code
            names = [key]
        sources |= dict.fromkeys(names, key)

    def read(name: str) -> Tensor:
        key = sources[name]
        tensor = released[sources[name]]
        try:
            return from_released({key: tensor})[name]
        except (IndexError, RuntimeError):
            problem = (
                f"has the shape {tuple(tensor.shape)!s:.100}, which this parameter cannot have"
            )
            raise FileError(
                key[:100], problem, "give the config.json that belongs to the weights"
            ) from None

    return LazyTensors(sources, read)


def _model(
    settings: dict[str, Any], path: Path, vocab_multiple: int, token_mixing: str
) -> ModelConfig:
    if settings.get("rpe_type") not in tuple(_ENCODINGS):
        raise cannot_import(settings, path, "rpe_type", ", ".join(_ENCODINGS))
    check_sizes(settings, path)
    if settings.get("hidden_act", "silu") != "silu":
        raise cannot_import(settings, path, "hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        if settings.get(key):
            raise cannot_import(settings, path, key, "false or null")
    encoding = _ENCODINGS[settings["rpe_type"]]
    position = {"rope_theta": settings.get("rope_theta", 10000.0), **_own_settings(settings, path)}
    if encoding == "tape":
        position |= {"mlp_size": settings["position_size"], "token_mixing": token_mixing}
    names = {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}
    model = model_config(
        {
            "position_encoding": encoding,
            "position": {key: value for key, value in position.items() if key in names},
            **shared_settings(settings, vocab_multiple),
            "num_query_groups": (
                settings.get("num_key_value_heads") or settings["num_attention_heads"]
            ),
            "seq_length": settings["max_position_embeddings"],
        }
    )
    validate_model(model)
    return model


def _own_settings(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of the encoding and of its scaling, with this project's keys. Raises
    UserError.
    """
    scaling = settings.get("rope_scaling") or {"type": "linear", "factor": 1.0}
    kind = "yarn" if settings["rpe_type"] == "yarn" else "linear"
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != kind:
        raise cannot_import(
            settings, path, "rope_scaling", kind if kind == "yarn" else "null or linear"
        )
    own: dict[str, Any] = {"rope_scaling_factor": scaling["factor"]}
    needed = _OWN_SETTINGS.get(settings["rpe_type"], ())
    if missing := [
        key for key in needed if type(settings.get(key)) is not int or settings[key] < 1
    ]:
        raise cannot_import(settings, path, missing[0], "a positive integer")
    if kind == "yarn":
        # The released code ignores the factor. It divides the context length by the original one
        # and rounds up.
        original = settings["original_max_position_embeddings"]
        factor = -(-settings["max_position_embeddings"] // original)
        own = {
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": factor,
            "rope_original_seq_length": original,
        }
    if settings["rpe_type"] == "t5rb":
        own |= {
            f"t5_{key}": settings[f"relative_attention_{key}"]
            for key in ("num_buckets", "max_distance")
        }
    return own
