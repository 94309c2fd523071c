"""Import checkpoints of the TAPE authors' code (https://github.com/VITA-Group/TAPE)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import keys_of
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import (
    cannot_import,
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

# By `rpe_type` of the released code: the encoding of this project.
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
# By `rpe_type`: keys that must be positive integers.
_REQUIRED_SETTINGS = {
    "t5rb": ("relative_attention_num_buckets", "relative_attention_max_distance"),
    "yarn": ("original_max_position_embeddings",),
}
# The end of the names of FIRE's thresholds in the released code.
_FIRE_THRESHOLD = "self_attn.rotary_emb.init_L"


def import_released(
    weights: str | Path,
    config: str | Path,
    output: str | Path,
    vocab_multiple: int = 1,
    token_mixing: str = "full",
    allow_pickle: bool = False,
) -> None:
    """Import the released checkpoint `weights`, with settings in the JSON file `config`, as the new
    checkpoint `output`.

    The vocabulary is padded to a multiple of `vocab_multiple`. `token_mixing` is the setting of
    TAPE, `full` or `per_head`. `allow_pickle` allows `weights` to be a pickle. Raises UserError or
    OSError if weights and settings do not match, or if this project does not support the model.
    """
    refuse_existing(output, fix="choose another output, or move it away")
    settings = read_settings(Path(config))
    with errors_of_settings(Path(config)):
        model = _model_config(settings, Path(config), vocab_multiple, token_mixing)
    released = open_files([Path(weights)], allow_pickle)

    # The released code stores FIRE's threshold with the weights; here it is a setting.
    threshold = FireSettings.fire_threshold
    for key in released:
        if key.endswith(_FIRE_THRESHOLD):
            # The tensor of a threshold usually has one element, which must equal this project's
            # default. A tensor of more elements is refused; the message shows the first ten.
            thresholds = released[key].flatten()[:10].tolist()
            if thresholds != [threshold]:
                values = ", ".join(f"{value:g}" for value in thresholds)
                raise FileError(
                    weights,
                    f"has FIRE's init_L {values}, which cannot be imported",
                    f"supported: {threshold:g}",
                )

    unread_prefixes: tuple[str, ...] = ()
    if model.position_encoding == "tape":
        # Nothing reads the position state after the last layer. So in this project, the last layer
        # has no parameters that update the state, and those of the checkpoint are left out.
        unread_prefixes = (f"model.layers.{model.num_layers - 1}.position.",)
    write_imported(
        output,
        model,
        _renamed(released, unread_prefixes),
        origin=f"a checkpoint of the TAPE authors' code, {Path(weights).name}",
    )
    advise(output, model)  # prints the commands that train the imported model


def _renamed(released: Mapping[str, Tensor], unread_prefixes: tuple[str, ...]) -> LazyTensors:
    """Return the weights of the released code under the names of this project's exports.

    Names that start with one of `unread_prefixes` are left out.
    """
    # By a weight's name in exports: its name in the released code.
    sources = {}
    for key in released:
        names: Iterable[str]
        try:
            # Only the new names are needed here, so a tensor without data stands for the weight.
            names = from_released({key: torch.empty(1, 1, device="meta")})
        # Not a name of the released code. It is kept, and `write_imported` names it in an error.
        except (KeyError, ValueError):
            names = [key]
        sources |= {name: key for name in names if not name.startswith(unread_prefixes)}

    def load_weight(name: str) -> Tensor:
        """Read a weight by its name in exports, and convert it from the released code's format."""
        key = sources[name]
        return from_released({key: released[key]})[name]

    return LazyTensors(sources, load_weight)


def _model_config(
    settings: dict, path: Path, vocab_multiple: int, token_mixing: str
) -> ModelConfig:
    """Return the ModelConfig for `settings`, the contents of the JSON file at `path`.

    Raises UserError for unsupported settings, and the errors that `errors_of_settings` converts.
    """
    rpe_type = settings.get("rpe_type")
    # A tuple, since the test `in` a dictionary raises TypeError if the value in the file is a list.
    if rpe_type not in tuple(_ENCODINGS):
        raise cannot_import(settings, path, "rpe_type", ", ".join(_ENCODINGS))
    if settings.get("hidden_act", "silu") != "silu":
        raise cannot_import(settings, path, "hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        if settings.get(key):
            raise cannot_import(settings, path, key, "false or null")

    encoding = _ENCODINGS[rpe_type]
    position = {
        "rope_theta": settings.get("rope_theta", 10000.0),
        **_position_settings(settings, path),
    }
    if encoding == "tape":
        position |= {"mlp_size": settings["position_size"], "token_mixing": token_mixing}
    # `position` has settings of rotation and scaling even if this encoding does not have them.
    keys = keys_of(ENCODINGS[encoding].Settings)
    groups = settings.get("num_key_value_heads") or settings["num_attention_heads"]
    model = model_config(
        {
            "position_encoding": encoding,
            "position": {key: value for key, value in position.items() if key in keys},
            **shared_settings(settings, vocab_multiple),
            "num_query_groups": groups,
            "seq_length": settings["max_position_embeddings"],
        }
    )
    validate_model(model)
    return model


def _position_settings(settings: dict, path: Path) -> dict:
    """Return the settings of the encoding and of its scaling, by this project's names.

    Raises UserError for unsupported values.
    """
    rpe_type = settings["rpe_type"]
    for key in _REQUIRED_SETTINGS.get(rpe_type, ()):
        if type(settings.get(key)) is not int or settings[key] < 1:
            raise cannot_import(settings, path, key, "a positive integer")
    scaling = settings.get("rope_scaling") or {"type": "linear", "factor": 1.0}
    expected = "yarn" if rpe_type == "yarn" else "linear"
    if scaling.get("type", scaling.get("rope_type")) != expected:
        raise cannot_import(settings, path, "rope_scaling", expected)

    if rpe_type == "yarn":
        # The released code ignores the factor in rope_scaling. Its factor is the context length
        # divided by the original one, rounded up.
        original = settings["original_max_position_embeddings"]
        return {
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": -(-settings["max_position_embeddings"] // original),
            "rope_original_seq_length": original,
        }
    position: dict[str, Any] = {"rope_scaling_factor": scaling["factor"]}
    if rpe_type == "t5rb":
        position["t5_num_buckets"] = settings["relative_attention_num_buckets"]
        position["t5_max_distance"] = settings["relative_attention_max_distance"]
    return position
