"""Convert the `config.json` of a model of transformers, or of this project's exports, to a
ModelConfig.

Settings that affect the model but are not supported raise an error that names them. Imports no
torch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError, FileError, UserError
from megatron_tape.io.records import check_shape, read_record
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, model_config
from megatron_tape.position.rope import yarn_attention_factor

_CONFIG_BYTES = 8 << 20
"""Maximum size of a config.json in bytes. Usual ones have a few kilobytes."""
ENCODED = "encoded_tape"
"""`model_type` of this project's exports that contain the code of their positional encoding."""
PHI3 = "phi3"
"""`model_type` of Phi-3 and Phi-4."""

_LLAMA_DEFAULTS = {"attention_bias": False, "rms_norm_eps": 1e-6}
_QWEN2_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
}
_EXPORT_DEFAULTS = {"attention_bias": False, "qk_norm": False, "rms_norm_eps": 1e-5}
# transformers' defaults for required keys that may be missing in config.json.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_DEFAULTS,
    "mistral": {"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": _QWEN2_DEFAULTS,
    "qwen3": _QWEN2_DEFAULTS | {"attention_bias": False, "head_dim": 128},
    "smollm3": (
        _LLAMA_DEFAULTS
        | {
            "use_sliding_window": False,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        }
    ),
    PHI3: {"rms_norm_eps": 1e-5},
    "tape": _EXPORT_DEFAULTS | {"position_state_precision": "bf16"},
    ENCODED: _EXPORT_DEFAULTS | {"attention_output_gate": False},
}
_DEFAULT_THETAS = {"smollm3": 2e6}
"""Defaults of `rope_theta` by `model_type`. All types that are not listed have 10,000."""
# Fixed settings of an architecture, which override config.json.
_FIXED_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False, "use_sliding_window": False},
    # Mistral and Phi-3 have their window, unless its size is null.
    "mistral": {"attention_bias": False, "qk_norm": False, "use_sliding_window": True},
    "qwen2": {"attention_bias": True, "qk_norm": False},
    "qwen3": {"qk_norm": True},
    "smollm3": {"qk_norm": False},
    PHI3: {"attention_bias": False, "qk_norm": False, "use_sliding_window": True},
    "tape": {"use_sliding_window": False},
    ENCODED: {"use_sliding_window": True},
}
_SUPPORTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "is_causal": True,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
"""Settings of which only one value can be imported."""
# How these architectures differ from Llama.
_OLMO2 = "its norms follow attention and the MLP, and its norms of queries and keys span all heads"
_GEMMA = (
    "its norms multiply by 1 + weight, its embeddings are scaled, and its MLP uses GELU"
    " (hidden_activation)"
)
_GEMMA2 = f"{_GEMMA}; it has more norms, and soft caps"
_GEMMA3 = f"{_GEMMA}; it has more norms"
_EVERY_NTH = "here, only every n-th layer, counted from 1, can be without the window of the others"
# Why models similar to Llama cannot be imported.
_UNLIKE_LLAMA = {
    "olmo": "its norms have no weights, and it clips queries, keys and values (clip_qkv)",
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "cwm": f"its layers 1, 5, 9, ... attend to all tokens; {_EVERY_NTH}",
}
_TAPE_SETTINGS = {
    "gate_input": "gate_input",
    "position_mlp_size": "mlp_size",
    "position_state_precision": "state_precision",
}
"""TAPE's keys in config.json, and the corresponding settings in `model.position`."""
# Keys of each rope_type, in addition to _SHARED_ROPE_KEYS.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "proportional": ("factor",),
}
# `finetuned` records only whether the model was trained with the scaling.
_SHARED_ROPE_KEYS = (
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)


@contextmanager
def errors_of_settings(path: Path) -> Iterator[None]:
    """Within the context, convert errors in the settings of the file `path` to a FileError about
    the file.

    Functions that read settings need not check types: a missing key or a wrong type raises a
    KeyError, TypeError, AttributeError or ArithmeticError.
    """
    try:
        yield
    except KeyError as error:
        raise FileError(
            path, f"has no {error.args[0]}", "give the config.json that belongs to the weights"
        ) from None
    except ConfigError as error:
        raise FileError(
            path,
            f"describes a model that cannot be built: {error.subject} {error.problem}",
            error.fix,
        ) from None
    except (TypeError, AttributeError) as error:
        raise FileError(path, f"contains a setting of the wrong type: {error}") from None
    except ArithmeticError as error:
        raise FileError(path, f"contains an impossible number: {error}") from None


def read_settings(path: Path) -> dict:
    """Return the contents of a `config.json`. Raises FileError if it is missing, too large or not a
    JSON object.
    """
    if not path.is_file():
        raise FileError(path, "is not a file", "give the model's config.json")
    return read_record(path, dict[str, Any], _CONFIG_BYTES)


def padded_vocabulary(rows: int, multiple: int) -> int:
    """Return `rows` rounded up to a multiple of `multiple`."""
    return -(-rows // multiple) * multiple


def shared_settings(settings: dict, vocab_multiple: int) -> dict:
    """Return the settings of a ModelConfig whose keys in config.json are the same in all
    architectures.

    The vocabulary is padded to a multiple of `vocab_multiple`. Raises KeyError for a missing key.
    """
    return {
        "num_layers": settings["num_hidden_layers"],
        "hidden_size": settings["hidden_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "num_attention_heads": settings["num_attention_heads"],
        "vocab_size": padded_vocabulary(settings["vocab_size"], vocab_multiple),
        "unpadded_vocab_size": settings["vocab_size"],
        "norm_epsilon": settings["rms_norm_eps"],
        "tie_embeddings": settings.get("tie_word_embeddings", False),
        "init_std": settings.get("initializer_range", 0.02),
    }


def model_settings(
    settings: dict,
    path: Path,
    position_encoding: str | None = None,
    vocab_multiple: int = 1,
) -> ModelConfig:
    """Return the ModelConfig for `settings`, the contents of the `config.json` at `path`.

    `position_encoding` replaces RoPE by another encoding; None keeps the model's. The vocabulary
    is padded to a multiple of `vocab_multiple`. Raises UserError for unsupported settings, and the
    errors that `errors_of_settings` converts.
    """
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        reason = _UNLIKE_LLAMA.get(str(model_type), "")
        raise cannot_import(settings, path, "model_type", ", ".join(DEFAULTS), reason)

    # This project's exports keep their encoding. All other models have RoPE.
    encodings_of_exports = {"tape": "tape", ENCODED: settings.get("position_encoding")}
    saved_encoding = encodings_of_exports.get(model_type, "rope")
    encoding = position_encoding or saved_encoding
    if model_type in encodings_of_exports and encoding != saved_encoding:
        raise FileError(
            path,
            f"has the positional encoding {saved_encoding!s:.100}, which cannot become {encoding}",
            "omit --position-encoding",
        )

    # null is the same as a missing key, except that it disables a sliding window.
    explicit = {
        key: value
        for key, value in settings.items()
        if value is not None or key == "sliding_window"
    }
    settings = DEFAULTS[model_type] | explicit | _FIXED_SETTINGS[model_type]
    _check_supported(settings, path)

    read_position = _encoding_settings if model_type == ENCODED else _rope_position
    position = read_position(settings, path)
    if model_type == "tape":
        position |= {name: settings[key] for key, name in _TAPE_SETTINGS.items() if key in settings}

    model = model_config(
        {
            "position_encoding": encoding,
            "position": position,
            **shared_settings(settings, vocab_multiple),
            "num_query_groups": settings.get(
                "num_key_value_heads", settings["num_attention_heads"]
            ),
            "kv_channels": settings.get("head_dim"),
            "qkv_bias": settings["attention_bias"],
            "qk_norm": settings["qk_norm"],
            "attention_output_gate": settings.get("attention_output_gate", False),
            "layers_without_positions": _layers_without_positions(settings, path),
            **_windows(settings, path),
            **_temperature(settings),
            "seq_length": settings["max_position_embeddings"],
        }
    )
    validate_model(model)
    return model


def cannot_import(
    settings: dict, path: Path, key: str, accepted: str, reason: str = ""
) -> UserError:
    """Return the error that the value of the setting `key` cannot be imported.

    `accepted` describes the supported values, and `reason` why the value is not one of them.
    """
    problem = f"is {settings.get(key)!r:.200} in {path}, which cannot be imported"
    if reason:
        problem += f" ({reason})"
    return UserError(key, problem, f"supported: {accepted}")


def _check_supported(settings: dict, path: Path) -> None:
    """Raise UserError if a setting that affects the model is not supported."""
    model_type = settings["model_type"]
    for key, accepted in _SUPPORTED.items():
        if key == "partial_rotary_factor" and model_type == PHI3:
            continue  # `_rope_position` reads it
        if settings.get(key, accepted) != accepted:
            raise cannot_import(settings, path, key, format_value(accepted))

    if model_type == "tape" and settings.get("sliding_window") is not None:
        raise cannot_import(
            settings, path, "sliding_window", "null", "TAPE with windows has another type"
        )

    # In these architectures, but not in Qwen2 and TAPE, attention_bias also adds a bias to the
    # output projection.
    if model_type in ("llama", "qwen3", "smollm3") and settings["attention_bias"]:
        raise cannot_import(settings, path, "attention_bias", "false")


def _windows(settings: dict, path: Path) -> dict[str, int]:
    """Return `sliding_window` and `full_attention_every` of a ModelConfig; {} if no layer has a
    window.

    A window that is longer than the context is kept: it hides tokens in longer sequences. Raises
    UserError if the layers without a window are not every n-th one.
    """
    # Qwen's settings contain the size of a window even if it is disabled.
    window = None
    if settings["use_sliding_window"]:
        window = settings.get("sliding_window")
    key, with_window = _layers_with_window(settings, path, has_size=window is not None)
    if not any(with_window):
        return {}
    if window is None:
        raise cannot_import(
            settings,
            path,
            key,
            "full_attention in all layers, or sliding_window with the size of the window and, in"
            " Qwen2, Qwen3 and SmolLM3, use_sliding_window true",
            "no size of a window is set",
        )

    interval = _interval(with_window)
    if interval < 2:
        raise cannot_import(
            settings,
            path,
            key,
            "windows in all layers, or in all except the layers n, 2n, 3n, ...",
            _EVERY_NTH,
        )
    if interval > len(with_window):
        return {"sliding_window": window}
    return {"sliding_window": window, "full_attention_every": interval}


def _layers_with_window(settings: dict, path: Path, has_size: bool) -> tuple[str, list[bool]]:
    """Return the key in config.json that says which layers have a sliding window, and for each
    layer whether it has one.

    `has_size` says whether the size of the window is set. Raises UserError for a list of other
    types or another length.
    """
    model_type = settings["model_type"]
    layers = settings["num_hidden_layers"]
    types = settings.get("layer_types")
    if types is not None:
        # transformers reads a Mistral with this list as a Ministral, which obeys it.
        with_window = [layer_type == "sliding_attention" for layer_type in types]
        is_known = len(types) == layers and set(types) <= {"full_attention", "sliding_attention"}
        # Phi-3 ignores the list.
        is_ignored = model_type == PHI3 and with_window != [has_size] * layers
        if not is_known or is_ignored:
            accepted = f"full_attention or sliding_attention for each of {layers} layers"
            if model_type == PHI3:
                accepted += ", the same for all"
            raise cannot_import(settings, path, "layer_types", accepted)
        return "layer_types", with_window

    if model_type in ("qwen2", "qwen3"):
        num_full = settings["max_window_layers"]
        return "max_window_layers", [has_size and layer >= num_full for layer in range(layers)]
    if model_type == "smollm3":
        # By default, the layers without RoPE have the window.
        interval = _layers_without_positions(settings, path) or layers + 1
        numbers = range(1, layers + 1)
        return "layer_types", [has_size and number % interval == 0 for number in numbers]
    return "sliding_window", [has_size] * layers


def _interval(marks: list) -> int:
    """Return n if all layers are marked except the layers n, 2n, 3n, ..., counted from 1.

    If all layers are marked, n is greater than their number. Returns 0 for other patterns.
    """
    # The number of the first layer without a mark, such as 4 for [1, 1, 1, 0].
    interval = [*marks, 0].index(0) + 1
    if marks != [number % interval > 0 for number in range(1, len(marks) + 1)]:
        return 0
    return interval


def _layers_without_positions(settings: dict, path: Path) -> int | None:
    """Return n if every n-th layer has no positions, None if all layers have positions.

    Raises UserError for other patterns.
    """
    # Of all other models, only this project's exports can have such layers. Their config.json
    # contains the setting of ModelConfig itself.
    if settings["model_type"] != "smollm3":
        return settings.get("layers_without_positions")

    layers = settings["num_hidden_layers"]
    interval = settings["no_rope_layer_interval"]
    key = "no_rope_layer_interval"
    # In spite of its name, this list has 1 for each layer with RoPE. It overrides the interval.
    if has_rope := settings.get("no_rope_layers"):
        key = "no_rope_layers"
        interval = _interval(has_rope)
        if len(has_rope) != layers:
            interval = 0  # refused below

    # With an interval of 1, no layer would have positions.
    if interval < 2:
        raise cannot_import(
            settings, path, key, "layers without positions at a fixed interval of at least 2"
        )
    if interval <= layers:
        return interval
    return None


def _temperature(settings: dict) -> dict:
    """Return the settings of the queries' temperature in a ModelConfig, which only this project's
    exports have.
    """
    if settings["model_type"] != ENCODED:
        return {}
    keys = ("temperature_scale", "temperature_floor_scale")
    return {key: settings[key] for key in keys if key in settings}


def _encoding_settings(settings: dict, path: Path) -> dict:
    """Return `model.position` for an export with `model_type` ENCODED.

    Raises UserError for an unknown encoding or settings that are not a dictionary.
    """
    name = settings["position_encoding"]
    if not isinstance(name, str) or name not in ENCODINGS:
        raise UserError(
            "position_encoding",
            f"is {name!r:.200} in {path}, which is not one of {', '.join(ENCODINGS)}",
        )

    position = settings["position_settings"]
    check_shape(position, dict[str, Any], f"position_settings in {path}")
    return dict(position)


def _rope_position(settings: dict, path: Path) -> dict:
    """Return `model.position` for rotary settings.

    transformers 5 stores them in rope_parameters; older versions use rope_scaling and the top level
    of config.json. Raises UserError for unsupported or contradictory settings.
    """
    is_phi3 = settings["model_type"] == PHI3
    key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = _rope_parameters(settings, key, path)
    new_format = _rope_parameters(settings, "rope_parameters", path)
    # If config.json has both, transformers uses rope_scaling and silently ignores rope_parameters.
    # Both must therefore be equal. Only rope_theta may be missing in one of them; it is compared
    # below.
    if new_format and {**rope, "rope_theta": None} != {**new_format, "rope_theta": None}:
        raise UserError(
            "rope_scaling", f"and rope_parameters differ in {path}", "remove the wrong one"
        )

    # Where several places have a rope_theta, transformers uses that of `rope`. The others must be
    # equal.
    default = _DEFAULT_THETAS.get(settings["model_type"], 10000.0)
    theta = rope.get("rope_theta", settings.get("rope_theta", default))
    for place in (new_format, settings):
        other = place.get("rope_theta", theta)
        if other != theta:
            problem = (
                f"has different values in {path}: {other}, and {theta}, which transformers uses"
            )
            raise UserError("rope_theta", problem, "remove the wrong one")

    rope_type = rope.get("rope_type", "default")
    # The share of the elements of a head that rotate. Phi-3 may have it at the top level.
    share = rope.get("partial_rotary_factor", 1.0)
    if is_phi3:
        share = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
        theta = _theta_of_share(theta, share, settings, path)
    elif share != 1.0 and rope_type != "proportional":
        raise UserError(
            f"{key}.partial_rotary_factor",
            f"is {share} in {path}, which cannot be imported",
            f"with rope_type {rope_type}, only 1 is supported; with rope_type proportional, any"
            " share",
        )

    if rope_type in ("default", "linear", "proportional"):
        # Only linear scaling requires a factor.
        factor = rope["factor"] if rope_type == "linear" else rope.get("factor", 1.0)
        return {"rope_theta": theta, "rope_share": share, "rope_scaling_factor": factor}

    # llama3 and yarn scale relative to the context length of the first training.
    length = settings["max_position_embeddings"]
    original = "original_max_position_embeddings"
    original_length = settings.get(original, rope.get(original, length))
    position = {
        "rope_theta": theta,
        "rope_scaling_type": rope_type,
        "rope_original_seq_length": original_length,
    }
    if rope_type == "yarn":
        return position | _yarn_position(rope, length / original_length)
    return position | {
        "rope_scaling_factor": rope["factor"],
        "rope_low_freq_factor": rope["low_freq_factor"],
        "rope_high_freq_factor": rope["high_freq_factor"],
    }


def _theta_of_share(
    theta: float,
    share: float,
    settings: dict,
    path: Path,
) -> float:
    """Return the `rope_theta` of this project that gives the frequencies of a Phi-3 model.

    Phi-3 rotates R of the D elements of a head (`share` is R / D) at the frequencies
    theta^(-2i / R). This project's `rope_share` rotates as many elements at theta'^(-2i / D). Both
    are equal for theta' = theta^(D / R). Raises UserError if R is not an even number in [2, D].
    """
    dim = settings.get("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    rotated = int(dim * share) if 0 < share <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise UserError(
            "partial_rotary_factor",
            f"is {share} in {path}, which cannot be imported",
            f"supported: shares that rotate an even number of the {dim} elements of a head",
        )
    return theta ** (dim / rotated)


def _yarn_position(rope: dict, length_ratio: float) -> dict:
    """Return yarn's settings in `model.position`.

    A factor of null stands for `length_ratio`, the context length divided by the original one.
    `mscale` and `mscale_all_dim` are DeepSeek's way to give the attention factor.
    """
    factor = length_ratio if rope["factor"] is None else rope["factor"]
    attention_factor = rope.get("attention_factor")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_attention_factor(factor, mscale)
        attention_factor /= yarn_attention_factor(factor, mscale_all_dim)
    # None stands for yarn's own value, which then also follows a later change of the factor.
    if attention_factor is not None and math.isclose(
        attention_factor, yarn_attention_factor(factor)
    ):
        attention_factor = None
    return {
        "rope_scaling_factor": factor,
        "rope_beta_fast": rope.get("beta_fast") or 32.0,
        "rope_beta_slow": rope.get("beta_slow") or 1.0,
        "rope_truncate": rope.get("truncate", True),
        "rope_attention_factor": attention_factor,
    }


def _rope_parameters(settings: dict, key: str, path: Path) -> dict:
    """Return the rotary settings under `key` that are not null, always with `rope_type`; {} if
    there are none.

    Raises UserError for an unsupported rope_type, or a setting that it does not have.
    """
    rope = settings.get(key, {})
    if not rope:
        return {}

    # transformers called it `type` before 4.43.
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    # transformers' Phi-3 supports only default and longrope, and reads yarn as longrope.
    supported = ["default"] if settings["model_type"] == PHI3 else list(_ROPE_KEYS)
    if rope_type not in supported:
        raise UserError(
            f"{key}.rope_type",
            f"is {rope_type!r:.100} in {path}, which cannot be imported",
            f"supported: {', '.join(supported)}",
        )

    known = (*_ROPE_KEYS[rope_type], *_SHARED_ROPE_KEYS)
    # In these settings, null has a meaning of its own. In all others, it is the same as a missing
    # key.
    nullable = ("factor", "truncate") if rope_type == "yarn" else ()
    result = {"rope_type": rope_type}
    for name, value in rope.items():
        if name in ("type", "rope_type") or (value is None and name not in nullable):
            continue
        # A factor of 1 changes nothing, so every rope_type may have it.
        if name not in known and (name, value) != ("factor", 1):
            raise UserError(
                f"{key}.{name[:40]}",
                f"in {path} is not a setting of the rope_type {rope_type} for all layers",
                f"supported: {', '.join(known)}",
            )
        result[name] = value
    return result
