"""Find the model that a run extends, and complete the run's settings with those of the model.
Imports no torch.
"""

import dataclasses
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import (
    MANIFEST,
    CheckpointState,
    list_checkpoints,
    read_state,
)
from megatron_tape.checkpoint.locate import find_checkpoint, find_source
from megatron_tape.checkpoint.saved_tokenizer import (
    TOKENIZER,
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
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, model_config

KEY = "extension.from"
FACTOR_KEY = "extension.context_factor"
LAYER_KEYS = (
    "sliding_window",
    "full_attention_every",
    "layers_without_positions",
    "temperature_scale",
    "temperature_floor_scale",
)
"""Settings of `model` that select the layers with windows and without positions."""
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
        layers = {key: model[key] for key in LAYER_KEYS if key in model}
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
            (FACTOR_KEY, KEY),
            f"is {factor}, but {KEY} names no model to extend",
            f"set {KEY}, or remove {FACTOR_KEY}",
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
    if scaling_of(base.model) in (None, "linear") and kind != "linear":
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
                (f"{section}.{name}", FACTOR_KEY),
                f"is given, but {FACTOR_KEY} determines it",
                f"remove one of them; {FACTOR_KEY} null disables it",
            )


def _check_kept_scaling(position: dict, base: Base) -> None:
    """Raise ConfigError if `extension.context_factor` cannot multiply the scaling of `base`.

    `position` are the run's own settings of `model.position`.
    """
    scaling = scaling_of(base.model)
    kind = position.get("rope_scaling_type", scaling)
    key = "model.position.rope_scaling_type"
    if scaling is not None and kind != scaling:
        raise ConfigError(
            (key, FACTOR_KEY, KEY),
            f"is {kind}, but {KEY} {base.path} has the scaling {scaling}, which {FACTOR_KEY} keeps",
            f"remove {key}; to replace the scaling, give model.seq_length and"
            f" model.position.rope_scaling_factor instead of {FACTOR_KEY}, and set"
            " extension.allow_other_scaling: true",
        )
    attention_factor = getattr(base.model.position, "rope_attention_factor", None)
    if (
        scaling == "yarn"
        and attention_factor is not None
        and "rope_attention_factor" not in position
    ):
        raise ConfigError(
            ("model.position.rope_attention_factor", FACTOR_KEY, KEY),
            f"is {attention_factor} in {KEY} {base.path}, which is not yarn's default, so the value"
            " for longer contexts is unknown",
            "set it; null uses yarn's default for the new factor",
        )


def scaling_of(model: ModelConfig) -> str | None:
    """Return the type of a model's RoPE scaling, such as `yarn`, or None if it is not scaled."""
    # Encodings without rotation have no `rope_scaling_factor`.
    if getattr(model.position, "rope_scaling_factor", 1.0) == 1.0:
        return None
    return model.position.rope_scaling_type


def keys_of_position(encoding: str) -> set[str]:
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
    keys = keys_of_position(encoding)
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
