"""Find the model that a run extends, and check that the run's settings fit it. Imports no torch."""

import dataclasses
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import (
    MANIFEST,
    CheckpointState,
    list_checkpoints,
    read_state,
)
from megatron_tape.checkpoint.locate import find_checkpoint, find_source
from megatron_tape.checkpoint.saved_settings import (
    CHANGEABLE_MODEL_KEYS,
    change_sentence,
    model_differences,
)
from megatron_tape.checkpoint.saved_tokenizer import (
    TOKENIZER,
    check_same_tokenizer,
    load_saved_tokenizer,
    with_saved_tokenizer,
)
from megatron_tape.config.schema import (
    ExtensionConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from megatron_tape.config.sections import as_dict, build, keys_of, merge, settings_of
from megatron_tape.data.tokenizer import TokenizerRecord, load_tokenizer, tokenizer_record
from megatron_tape.errors import CheckpointError, ConfigError, UserError
from megatron_tape.huggingface.imports.config_json import (
    errors_of_settings,
    model_settings,
    padded_vocabulary,
    read_settings,
)
from megatron_tape.huggingface.imports.model_weights import open_model
from megatron_tape.huggingface.imports.weight_files import check_weights
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, encoding_of, model_config

KEY = "extension.from"
_FACTOR_KEY = "extension.context_factor"
_SCALING_KEYS = {
    "linear": (),
    "llama3": ("rope_original_seq_length", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": ("rope_original_seq_length", "rope_beta_slow", "rope_beta_fast", "rope_truncate"),
}
"""Settings of `model.position` that belong to a type of scaling, by the type. An extension that
keeps the type keeps their values.
"""
_LAYER_KEYS = (
    "sliding_window",
    "full_attention_every",
    "layers_without_positions",
    "temperature_scale",
    "temperature_floor_scale",
)
"""Settings of `model` that select the layers with windows and without positions."""
_LAYER_POSITION_KEYS = ("rope_scaling_layers", "rope_local_theta")
"""Settings of `model.position` that apply to some layers only."""
_REQUIRED_MODEL_KEYS = {
    setting.key for setting in settings_of(ModelConfig) if setting.default is dataclasses.MISSING
}
"""Settings of a model that have no default."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Matches the names of models on the Hugging Face Hub."""


@dataclass(frozen=True)
class Base:
    """A complete model to extend."""

    path: Path
    """A checkpoint of this project, or a directory of a Hugging Face model."""
    model: ModelConfig
    state: CheckpointState | None
    """The contents of the checkpoint's state.json; None for a Hugging Face model."""

    @classmethod
    def made_by(cls, config: RunConfig) -> "Base":
        """Return the model that a run with these settings will have trained when it is finished.

        Its `state` has only the keys that checks of the settings read.
        """
        directory = Path(config.logging.directory)
        tokenizer = config.data.tokenizer
        state: Any = {"progress": {}, "config": {"data": {"tokenizer": tokenizer}}}
        return cls(directory, config.model, state)

    @property
    def tokenizer(self) -> Path | None:
        """The path of the model's tokenizer, or None if there is none."""
        if self.state is None:
            return self.path
        path = self.path / TOKENIZER
        if not self.path.is_dir():  # a run that has not started, from `made_by`
            named = self.state["config"]["data"]["tokenizer"]
            if named is None:
                return None
            path = Path(named)
        return path if path.exists() else None

    @property
    def identity(self) -> str:
        """A digest of a Hugging Face model: of its config.json, and of the names, sizes and
        modification times of its weight files.
        """
        # A digest of the weights themselves would take minutes to compute.
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self.path.glob("*.safetensors*")):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def with_base_settings(values: dict, base: Base | None = None) -> dict:
    """Return the settings `values`, with those of the model that the run extends as defaults.

    `values` are nested dicts as in YAML. The model is `base`, by default that of `extension.from`;
    if both are given, they must agree. Without either, `values` is returned. Raises ConfigError.

    - If the model is a run, `extension.from` in the result is the run's newest complete checkpoint,
      so that the configuration names exact weights.
    - `extension.context_factor` sets `model.seq_length` and `model.position.rope_scaling_factor`.
      In the result it is null, so that a run that continues does not multiply them again. The
      scaling stays if all layers with positions have a window that does not grow.
    """
    extension = values.get("extension", {})
    section = build(ExtensionConfig, extension, "extension")
    source = section.from_
    if base is not None:
        if source not in (None, str(base.path)):
            raise ConfigError(
                KEY,
                f"is {source}, but run_all.sh extends the model that its pretraining job makes",
                f"remove {KEY}, or set it to null",
            )
        source = str(base.path)

    model = values.get("model", {})
    position = model.get("position", {}) if isinstance(model, dict) else None
    if not isinstance(position, dict):
        return values  # building the sections later raises the error

    # A complete section `model` does not need the settings of the model to extend.
    is_complete = model.keys() >= _REQUIRED_MODEL_KEYS
    factor = section.context_factor
    if source is None:
        _check_needs_no_base(factor, inherits=extension and not is_complete)
        return values

    if factor is not None:
        _check_determined(model, position)
    try:
        base = base or find_base(source)
    except ConfigError:
        # A run that has started has all settings, and may no longer need the model. If it does need
        # it, `check_base` raises the error later.
        if is_complete:
            return values
        raise

    encoding = str(model.get("position_encoding") or base.model.position_encoding)
    inherited = _inherited(base.model, encoding)
    # Settings that have no effect without another one are not inherited.
    if "sliding_window" in model and model["sliding_window"] is None:
        del inherited["full_attention_every"]
    if model.get("temperature_scale") == 0:
        del inherited["temperature_floor_scale"]
    if factor is not None:
        inherited["seq_length"] = round(factor * base.model.seq_length)
    if "rope_scaling_factor" in inherited["position"]:
        layers = {key: model[key] for key in _LAYER_KEYS if key in model}
        unscaled = build(ModelConfig, merge(ModelConfig, inherited, layers), "model")
        # Windows may keep the positions within attention in the trained range.
        position_factor = factor
        if unscaled.rotated_length <= base.model.rotated_length:
            position_factor = None
        _scale_positions(inherited["position"], position, position_factor, base)

    # The import of a Hugging Face model pads the vocabulary for the run's tensor-parallel size.
    if base.state is None:
        parallel = build(ParallelConfig, values.get("parallel", {}), "parallel")
        inherited["vocab_size"] = padded_vocabulary(
            base.model.vocab_size, parallel.tensor_model_parallel_size
        )
    return values | {
        "model": merge(ModelConfig, inherited, model),
        "extension": extension | {"from": str(base.path), "context_factor": None},
    }


def _check_needs_no_base(factor: float | None, inherits: bool) -> None:
    """Raise ConfigError if settings that name no model to extend need one.

    `factor` is `extension.context_factor`. `inherits` is true if the run must inherit settings of
    the model: it has a section `extension`, but not all required settings.
    """
    if factor is not None:
        raise ConfigError(
            (_FACTOR_KEY, KEY),
            f"is {factor}, but {KEY} names no model to extend",
            f"set {KEY}, or remove {_FACTOR_KEY}",
        )
    if inherits:
        raise ConfigError(
            KEY,
            "is not set",
            "set it to the model to extend: a run, a checkpoint, or the directory of a Hugging Face"
            " model",
        )


def _scale_positions(inherited: dict, given: dict, factor: float | None, base: Base) -> None:
    """Adapt in place the settings of `model.position` that a run inherits from `base`.

    `given` are the run's own settings of `model.position`, which may choose another type of
    scaling. `factor` is `extension.context_factor`; None leaves the factor of the scaling as it is.
    Raises ConfigError if the scaling cannot be multiplied.
    """
    kind = given.get("rope_scaling_type", "linear")
    # Linear scaling ignores `rope_original_seq_length`. The other types scale relative to it, so a
    # change to one of them needs the length of the context before scaling.
    if _scaling_of(base.model) in (None, "linear") and kind != "linear":
        unscaled_length = base.model.seq_length / base.model.position.rope_scaling_factor
        inherited["rope_original_seq_length"] = round(unscaled_length)
    if factor is not None:
        _check_kept_scaling(given, base)
        inherited["rope_scaling_factor"] *= factor


def _check_determined(model: dict, position: dict) -> None:
    """Raise ConfigError if the run sets a value that `extension.context_factor` determines.

    `model` and `position` are the run's own settings of `model` and of `model.position`.
    """
    for section, settings, name in (
        ("model", model, "seq_length"),
        ("model.position", position, "rope_scaling_factor"),
    ):
        if name in settings:
            raise ConfigError(
                (f"{section}.{name}", _FACTOR_KEY),
                f"is given, but {_FACTOR_KEY} determines it",
                f"remove one of them; {_FACTOR_KEY} null disables it",
            )


def _check_kept_scaling(position: dict, base: Base) -> None:
    """Raise ConfigError if `extension.context_factor` cannot multiply the scaling of `base`.

    `position` are the run's own settings of `model.position`.
    """
    scaling = _scaling_of(base.model)
    kind = position.get("rope_scaling_type", scaling)
    key = "model.position.rope_scaling_type"
    if scaling is not None and kind != scaling:
        raise ConfigError(
            (key, _FACTOR_KEY, KEY),
            f"is {kind}, but {KEY} {base.path} has the scaling {scaling}, which {_FACTOR_KEY}"
            " keeps",
            f"remove {key}; to replace the scaling, give model.seq_length and"
            f" model.position.rope_scaling_factor instead of {_FACTOR_KEY}, and set"
            " extension.allow_other_scaling: true",
        )
    attention_factor = getattr(base.model.position, "rope_attention_factor", None)
    if (
        scaling == "yarn"
        and attention_factor is not None
        and "rope_attention_factor" not in position
    ):
        raise ConfigError(
            ("model.position.rope_attention_factor", _FACTOR_KEY, KEY),
            f"is {attention_factor} in {KEY} {base.path}, which is not yarn's default, so the value"
            " for longer contexts is unknown",
            "set it; null uses yarn's default for the new factor",
        )


def _scaling_of(model: ModelConfig) -> str | None:
    """Return the type of a model's RoPE scaling, such as `yarn`, or None if it is not scaled."""
    # Encodings without rotation have no `rope_scaling_factor`.
    if getattr(model.position, "rope_scaling_factor", 1.0) == 1.0:
        return None
    return model.position.rope_scaling_type


def _keys_of_position(encoding: str) -> set[str]:
    """Return the keys of a positional encoding's settings; none for an unknown encoding."""
    if encoding in ENCODINGS:
        return keys_of(ENCODINGS[encoding].Settings)
    return set()


def find_base(source: str) -> Base:
    """Return the model to extend: a run's newest checkpoint, one checkpoint, or a Hugging Face
    model.

    Checks the sizes of a checkpoint's files, but not their digests. Raises ConfigError if the model
    is damaged, incomplete or cannot be extended.
    """
    path = Path(source)
    if not path.is_dir():
        fix = (
            "give a run, one of its checkpoints, or the directory of a Hugging Face model; to"
            " continue a run that has started, give --config RUN/config.yaml instead"
        )
        if _HUB_NAME.fullmatch(source) and not path.parent.exists():
            fix += (
                "; to download this model from the Hugging Face Hub:"
                f" hf download {source} --local-dir DIR"
            )
        raise ConfigError(KEY, f"is {source}, which is not a directory", fix)

    try:
        if (path / "config.json").is_file() and not (path / MANIFEST).exists():
            return _from_transformers(path)
        return _from_checkpoint(find_checkpoint(path, deep=False))
    except UserError as error:
        raise ConfigError(
            KEY,
            f"is {source}, which cannot be extended: {error.subject} {error.problem}",
            error.fix,
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(
            KEY, f"is {source}, which cannot be extended: {error}", "repair it, or give another"
        ) from None


def _from_transformers(path: Path) -> Base:
    """Return the Hugging Face model in directory `path`.

    Raises UserError, ValueError or OSError if it is damaged or of an unknown kind.
    """
    config_file = path / "config.json"
    settings = read_settings(config_file)
    with errors_of_settings(config_file):
        model = model_settings(settings, config_file)
    check_weights(open_model(path, model), model, str(path))
    return Base(path, model, None)


def _from_checkpoint(path: Path) -> Base:
    """Return the model in checkpoint `path`.

    Raises CheckpointError if it has another architecture or LoRA layers, or if the checkpoint with
    its frozen weights is missing.
    """
    state = read_state(path)
    find_source(path, state)  # raises if the checkpoint with frozen weights is missing
    settings = state["config"]["model"]
    try:
        model = model_config(settings)
        validate_model(model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, f"has another architecture or version ({error})") from None

    trained = state["config"].get("extension", {}).get("trains", ())
    if "lora" in trained:
        raise CheckpointError(
            path,
            "has LoRA layers",
            f"merge them first: tools/convert_checkpoint.py to-hf --checkpoint {path} --output NEW,"
            " and extend NEW",
        )
    return Base(path, model, state)


def _inherited(base: ModelConfig, encoding: str) -> dict:
    """Return the settings of `model` that a run inherits from its base model.

    `encoding` is the run's positional encoding. Settings of `position` that this encoding does not
    have are omitted.
    """
    inherited = as_dict(base)
    # The backend depends on the machine, so the run chooses its own.
    del inherited["attention_backend"]
    if encoding != base.position_encoding:
        del inherited["position_encoding"]
    if encoding in ENCODINGS and base.position_encoding in ENCODINGS[encoding].replaces:
        # The new encoding, such as nope, has no positions in any layer.
        del inherited["layers_without_positions"]
    keys = _keys_of_position(encoding)
    position = inherited["position"].items()
    inherited["position"] = {key: value for key, value in position if key in keys}
    return inherited


def starts_from_base(config: RunConfig) -> bool:
    """Return whether a run starts from the model that it extends.

    Return False if it extends no model, or if it continues a checkpoint, whose weights are extended
    already.
    """
    if config.extension.from_ is None:
        return False
    resume = config.checkpoint.resume
    if resume == "auto":
        return not list_checkpoints(config.checkpoint.directory)
    return resume == "none"


def check_base(config: RunConfig, base: Base | None = None) -> None:
    """Raise ConfigError if a run's settings do not fit the model that it extends.

    Checks the model, the context length, the tokenizer and the trained parameters. `base` is by
    default the model of `extension.from`. A shorter context and another scaling must be allowed by
    `extension`. Warns if positions are scaled by less than the context grows. Logs which changes of
    windows and layers change the model's outputs.
    """
    base = base or find_base(config.extension.from_)
    _check_same_model(config.model, base)
    _check_length(config, base)
    _check_scaling(config, base)
    _log_changed_layers(config.model, base)

    # Parameters of the encoding that the base model lacks are initialized, so they must be trained.
    new = _encoding_parameters(config.model) - _encoding_parameters(base.model)
    if new and not {"position", "all"} & set(config.extension.trains):
        raise ConfigError(
            ("extension.trains", KEY),
            f"does not include position, but {KEY} {base.path} does not have the parameter"
            f" {min(new)}, so new parameters would not be trained",
            "add position, or keep the base model's setting",
        )
    _check_tokenizer(config, base)


def _check_same_model(model: ModelConfig, base: Base) -> None:
    """Raise ConfigError if `model` differs from the base model in what must stay the same.

    The model may get another positional encoding that starts as the old one or replaces it.
    """
    base_encoding = base.model.position_encoding
    new_encoding = model.position_encoding
    # The encodings that the model may get instead of its own, such as `tape` instead of `rope`.
    possible_encodings = [
        name
        for name, encoding in ENCODINGS.items()
        if name != base_encoding
        and (encoding.starts_as == base_encoding or base_encoding in encoding.replaces)
    ]
    # `changeable` are the settings that the message lists, such as those of RoPE's scaling. Only
    # differences outside of `may_differ` are refused. It also contains settings that differ because
    # this extension changes the encoding or imports the model.
    changeable = {*CHANGEABLE_MODEL_KEYS, *_LAYER_KEYS}
    changeable |= {f"position.{key}" for key in _keys_of_position("rope")}
    changeable |= {f"position.{key}" for key in ENCODINGS[new_encoding].extended_by}
    may_differ = set(changeable)
    if new_encoding in possible_encodings:
        may_differ |= {
            "position_encoding",
            *(f"position.{key}" for key in _keys_of_position(new_encoding)),
        }
    # Only some encodings have `increments`. Weights that were trained with learned increments would
    # mean something else with signed or fixed ones.
    if getattr(base.model.position, "increments", "fixed") != "fixed":
        changeable.discard("position.increments")
        may_differ.discard("position.increments")
    if base.state is None and model.vocab_size >= base.model.vocab_size:
        may_differ.add("vocab_size")  # an import adds the missing rows

    differences = model_differences(as_dict(base.model), as_dict(model), free=may_differ)
    if differences:
        keys = ", ".join(f"model.{key}" for key in sorted(changeable))
        fix = (
            "remove these settings from the recipe or the command line: an extension changes only"
            f" {keys}"
        )
        if possible_encodings:
            fix += (
                f", and model.position_encoding from {base_encoding} to one of:"
                f" {', '.join(possible_encodings)}"
            )
        if new_encoding != base_encoding:
            fix += f"; to keep its encoding, set model.position_encoding to {base_encoding}"
        raise ConfigError(
            KEY,
            f"{base.path} is another model than these settings describe ({'; '.join(differences)})",
            fix,
        )

    # The weights of the encoding in the base model must fit the new one.
    shapes = parameter_shapes(model)
    for name, shape in parameter_shapes(base.model).items():
        if kind_of(name) == "position" and shapes.get(name) != shape:
            raise ConfigError(
                (KEY, "model.position_encoding"),
                f"{base.path} has the parameter {name}, which {new_encoding} does not have or has"
                " in another shape",
                f"keep model.position_encoding {base_encoding}, or extend a model without it",
            )


def _check_length(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if a run's context is shorter than that of its base model.

    With `extension.allow_shorter_context`, it may be.
    """
    length = config.model.seq_length
    base_length = base.model.seq_length
    if length < base_length and not config.extension.allow_shorter_context:
        raise ConfigError(
            ("model.seq_length", "extension.allow_shorter_context", KEY),
            f"is {length}, but {KEY} {base.path} has contexts of {base_length} tokens",
            f"for contexts twice as long, set {_FACTOR_KEY}: 2 instead of model.seq_length and"
            " model.position.rope_*; to train on shorter contexts, set"
            " extension.allow_shorter_context: true",
        )


def _check_scaling(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if a run's RoPE scaling does not fit that of its base model.

    The scaling may be replaced only with `extension.allow_other_scaling`. A larger
    `rope_scaling_factor` or `rope_theta` does not count as replacing it. `rope_original_seq_length`
    must not exceed the base model's context. It may be smaller, because some models state a longer
    context than they were trained on. Warns if positions leave the trained range.
    """
    position = config.model.position
    if "rope_theta" not in _keys_of_position(config.model.position_encoding):
        return
    if not config.extension.allow_other_scaling:
        _check_not_replaced(position, base)

    base_position = base.model.position
    scaling = _scaling_of(base.model)
    kind = position.rope_scaling_type
    factor = position.rope_scaling_factor
    # With a factor of 1 there is no scaling, so a type that the run has chosen itself is a mistake.
    # The run has not chosen `linear`, the default, or the base model's type, which it inherits.
    if factor == 1.0 and kind not in ("linear", base_position.rope_scaling_type):
        raise ConfigError(
            ("model.position.rope_scaling_factor", "model.position.rope_scaling_type"),
            f"is 1, so model.position.rope_scaling_type {kind} has no effect",
            "set it to the new context length divided by the old one",
        )

    # Positions stay in the trained range if the factor grows at least as much as the context. The
    # factors cannot be compared if the base model has another type of scaling. A larger
    # `rope_theta` may replace a larger factor.
    growth = config.model.rotated_length / base.model.rotated_length
    needed_factor = base_position.rope_scaling_factor * growth
    if (
        scaling in (None, kind)
        and factor < needed_factor
        and position.rope_theta <= base_position.rope_theta
    ):
        command_line.log(
            f"warning: model.position.rope_scaling_factor is {factor:g}, but contexts of {KEY}"
            f" {base.path} grow from {base.model.rotated_length} to"
            f" {config.model.rotated_length} tokens; set it to {needed_factor:g} unless this is"
            " intended"
        )

    # llama3 and yarn scale relative to the context on which the model was trained without scaling.
    if factor != 1.0 and kind != "linear":
        trained_length = base.model.seq_length
        if scaling in ("llama3", "yarn"):
            trained_length = base_position.rope_original_seq_length
        if position.rope_original_seq_length > trained_length:
            raise ConfigError(
                ("model.position.rope_original_seq_length", KEY),
                f"is {position.rope_original_seq_length}, but contexts of {KEY} {base.path} have"
                f" {trained_length} tokens",
                f"set it to {trained_length}",
            )


def _check_not_replaced(position: Any, base: Base) -> None:
    """Raise ConfigError if a run replaces the RoPE scaling of its base model.

    `position` are the run's settings of `model.position`.
    """
    base_position = base.model.position
    scaling = _scaling_of(base.model)

    # A larger `rope_theta` or factor continues the scaling of the base model for longer contexts. A
    # smaller one undoes it. `rope_share` decides how many frequencies rotate at all.
    replaced = []
    if position.rope_share != base_position.rope_share:
        replaced.append("rope_share")
    if position.rope_theta < base_position.rope_theta:
        replaced.append("rope_theta")
    if _local_theta(position) < _local_theta(base_position):
        replaced.append("rope_local_theta")
    if scaling is not None and position.rope_scaling_type != scaling:
        replaced.append("rope_scaling_type")
    if scaling is not None and position.rope_scaling_layers != base_position.rope_scaling_layers:
        replaced.append("rope_scaling_layers")
    if scaling is not None and position.rope_scaling_factor < base_position.rope_scaling_factor:
        replaced.append("rope_scaling_factor")
    # Compare the settings of a scaling type only if the type is the same: they have no meaning for
    # another type.
    if position.rope_scaling_type == scaling:
        keys = _SCALING_KEYS[scaling]
        replaced += [key for key in keys if getattr(position, key) != getattr(base_position, key)]

    if not replaced:
        return
    first = replaced[0]
    raise ConfigError(
        (*(f"model.position.{key}" for key in replaced), "extension.allow_other_scaling", KEY),
        f"is {getattr(position, first)}, but {KEY} {base.path} has {getattr(base_position, first)}",
        f"to keep its scaling, remove model.position.rope_*, and set {_FACTOR_KEY}: 2 instead of"
        " model.seq_length for contexts twice as long; to replace it, set"
        " extension.allow_other_scaling: true",
    )


def _local_theta(position: Any) -> float:
    """Return the base of the frequencies in layers with a window, for settings of
    `model.position`.
    """
    if position.rope_local_theta is None:
        return position.rope_theta
    return position.rope_local_theta


def _log_changed_layers(model: ModelConfig, base: Base) -> None:
    """Log which settings of windows and layers differ from those of the base model, and whether
    this changes the model's outputs.
    """
    sentences = []
    for section, new, old, keys in (
        ("model", model, base.model, _LAYER_KEYS),
        ("model.position", model.position, base.model.position, _LAYER_POSITION_KEYS),
    ):
        for key in keys:
            # Only encodings with a rotation have the settings of `model.position`.
            was = getattr(old, key, None)
            now = getattr(new, key, was)
            if now != was:
                sentences.append(change_sentence(f"{section}.{key}", was, now))
    if not sentences:
        return

    unchanged = _unchanged_length(base.model, model)
    if unchanged is None:
        effect = "outputs do not change"
    elif unchanged == 0:
        effect = "outputs change"
    else:
        effect = f"outputs change for texts of more than {unchanged:,} tokens"
    command_line.log(f"{'; '.join(sentences)}: {effect}")


def _unchanged_length(old: ModelConfig, new: ModelConfig) -> int | None:
    """Return the number of tokens up to which texts have the same outputs in both models, as far as
    windows, layers without positions, temperature and frequencies decide. None if all texts do.
    """
    # One number for each difference.
    lengths = []
    windows_have_frequencies = _have_window_frequencies(old) or _have_window_frequencies(new)
    for layer in range(new.num_layers):
        windows = {old.window_of(layer), new.window_of(layer)}
        if len(windows) > 1:
            lengths.append(min(windows - {None}))
        if old.has_positions(layer) != new.has_positions(layer):
            lengths.append(0)
        # A layer that gets or loses a window then rotates by other angles.
        gets_or_loses_window = len(windows) > 1 and None in windows
        if gets_or_loses_window and windows_have_frequencies and new.has_positions(layer):
            lengths.append(0)

    temperatures = {
        (model.temperature_scale, model.temperature_floor_scale)
        for model in (old, new)
        if model.temperature_scale > 0
    }
    if len(temperatures) > 1 or (old.temperature_scale > 0) != (new.temperature_scale > 0):
        # The factor of a text's last token differs from 1 first.
        lengths.append(min(floor_scale for _, floor_scale in temperatures) - 1)

    # Where frequencies or positions change, outputs of all lengths do.
    if old.position_encoding in ENCODINGS[new.position_encoding].replaces:
        lengths.append(0)
    unscaled = _scaling_of(old) is None and _scaling_of(new) is None
    for key in _keys_of_position("rope"):
        was = getattr(old.position, key, None)
        differs = getattr(new.position, key, was) != was
        if differs and not (unscaled and key == "rope_scaling_layers"):
            lengths.append(0)
    return min(lengths, default=None)


def _have_window_frequencies(model: ModelConfig) -> bool:
    """Return whether layers with a window have other frequencies than layers without one."""
    # Encodings without a rotation have no frequencies.
    return getattr(encoding_of(model), "with_window_frequencies", None) is not None


def _encoding_parameters(model: ModelConfig) -> set[str]:
    """Return the names of the parameters of a model's positional encoding."""
    return {name for name in parameter_shapes(model) if kind_of(name) == "position"}


def _check_tokenizer(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if `data.tokenizer` differs from the tokenizer of the base model.

    Do nothing if one of them does not exist, or if the base model is a Hugging Face model whose
    tokenizer cannot be loaded.
    """
    path = config.data.tokenizer
    directory = base.tokenizer
    if path is None or directory is None or not Path(path).exists():
        return

    tokenizer = None
    if base.state is not None and base.path.is_dir():
        tokenizer = load_saved_tokenizer(base.path)
    else:  # a Hugging Face model, or a run that has not started
        with suppress(ValueError, OSError):
            tokenizer = load_tokenizer(directory)
    if tokenizer is not None:
        check_same_tokenizer(path, tokenizer, f"that of {KEY} {base.path}", f"give {directory}")


def with_base_tokenizer(config: RunConfig, base: Base) -> tuple[RunConfig, TokenizerRecord | None]:
    """Return `config` with `data.tokenizer` set to that of the model that the run extends, and the
    tokenizer's record.

    For a Hugging Face model, return `config` unchanged and None if the model's tokenizer cannot be
    used, or if `data` already has a tokenizer or a generator. Raises ConfigError if the model is a
    checkpoint and `data.tokenizer` differs from its tokenizer.
    """
    if base.state is not None:
        return with_saved_tokenizer(config, base.path), base.state["progress"].get("tokenizer")
    if config.data.tokenizer is None and config.data.generator is None:
        with suppress(ValueError, OSError):
            record = tokenizer_record(load_tokenizer(base.path))
            return replace(config, data=replace(config.data, tokenizer=str(base.path))), record
    return config, None


def check_command(config: RunConfig, extends: bool) -> None:
    """Raise ConfigError if `config` is not for the command that was started.

    `extends` is true for `pretrain.extend_context`, which requires `extension.from`. It is false
    for `pretrain.train`, which requires the defaults of the section `extension`.
    """
    if extends and config.extension.from_ is None:
        raise ConfigError(KEY, "is not set", "set it to the model to extend, or run pretrain.train")
    if not extends and config.extension != ExtensionConfig():
        raise ConfigError(
            "extension",
            "has settings, but pretrain.train does not use this section",
            "remove them, or run pretrain.extend_context",
        )
