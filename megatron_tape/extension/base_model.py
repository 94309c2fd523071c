"""The model that a run extends: found, and compared with the run's settings. Imports no torch."""

import dataclasses
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import MANIFEST, State, list_checkpoints, read_state
from megatron_tape.checkpoint.locate import IMPORTED, NoCheckpoint, find_checkpoint, find_source
from megatron_tape.checkpoint.saved_settings import CHANGEABLE_MODEL_KEYS, model_differences
from megatron_tape.checkpoint.saved_tokenizer import (
    TOKENIZER,
    check_same_tokenizer,
    load_saved_tokenizer,
    with_saved_tokenizer,
)
from megatron_tape.config.schema import ExtensionConfig, LoggingConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_tape.config.sections import as_dict, build, keys_of, merge, settings_of
from megatron_tape.data.tokenizer import TokenizerRecord, load_tokenizer, record_of
from megatron_tape.errors import CheckpointError, ConfigError, UserError, refuse
from megatron_tape.huggingface.imports.config_json import (
    errors_of_settings,
    model_settings,
    padded_vocabulary,
    read_settings,
)
from megatron_tape.huggingface.imports.weight_files import check_weights, open_directory
from megatron_tape.io.records import read_yaml
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.validation import validate_model
from megatron_tape.position import ENCODINGS, model_config

KEY = "extension.from"
_REQUIRED = {setting.key for setting in settings_of(ModelConfig) if setting.default is dataclasses.MISSING}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Base:
    """A complete model that can be extended."""

    path: Path
    """A checkpoint of this project, or a directory in the format of transformers."""
    model: ModelConfig
    state: State | None
    """The checkpoint's state; None for a directory in the format of transformers."""
    is_import_of_run: bool = False
    """Whether it stands for a directory in the format of transformers that is gone, and that the run had imported."""

    @classmethod
    def made_by(cls, config: RunConfig) -> "Base":
        """Return what a run of ours will have made when it is finished."""
        directory, tokenizer = Path(config.logging.directory), config.data.tokenizer
        state: Any = {"progress": {}, "config": {"data": {"tokenizer": tokenizer}}}
        return cls(directory, config.model, state)

    @property
    def tokenizer(self) -> Path | None:
        """Where its tokenizer is, if it has one."""
        if self.state is None:
            return self.path
        if self.path.is_dir():
            return self.path / TOKENIZER if (self.path / TOKENIZER).is_dir() else None
        named = self.state["config"]["data"]["tokenizer"]  # a run that is still to be made
        return Path(named) if named is not None and Path(named).exists() else None

    @property
    def identity(self) -> str:
        """A digest of the settings, and of the names, sizes and times of the files, of a directory of transformers."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self.path.glob("*.safetensors*")):
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def with_base_settings(values: dict[str, Any], base: Base | None = None, run: str | None = None) -> dict[str, Any]:
    """Add the settings of the model that a run extends, by default `extension.from`, to those that are given.

    With a `base`, `extension.from` must not be given, or be that. `run` is the default of `logging.directory`.

    A run as the model to extend becomes its newest complete checkpoint, so that the configuration names the weights
    themselves. Raises ConfigError.
    """
    extension = values.get("extension", {})
    given = build(ExtensionConfig, extension, "extension").from_
    if base is not None:
        problem = f"is {given}, but the chain extends what it pretrains"
        refuse(given not in (None, str(base.path)), KEY, problem, "remove it, or set it to null")
        given = str(base.path)
    model = values.get("model", {})
    if not isinstance(model, dict) or not isinstance(position := model.get("position", {}), dict):
        return values  # which are refused when they are built
    encoding = str(model.get("position_encoding") or "")
    complete = model.keys() >= _REQUIRED
    refuse(
        given is None and not complete and bool(extension),
        KEY,
        "is not set",
        "give pretrain.extend_context a model: a run, a checkpoint, or a directory in the format of transformers",
    )
    if given is None:
        return values
    try:
        directory = build(LoggingConfig, values.get("logging", {}), "logging").directory
        base = base or find_base(given, directory or run)
    except ConfigError:
        if complete:  # perhaps the run has begun; one that has not is refused later
            return values
        raise
    inherited = _inherited(base.model, encoding or base.model.position_encoding)
    if (
        position.get("rope_scaling_type", "linear") != "linear"
        and inherited["position"].get("rope_scaling_factor") == 1  # of an encoding that scales
    ):
        inherited["position"]["rope_original_seq_length"] = base.model.seq_length
    if base.state is None:
        tensor_size = build(ParallelConfig, values.get("parallel", {}), "parallel").tensor_model_parallel_size
        inherited["vocab_size"] = padded_vocabulary(base.model.vocab_size, tensor_size)
    named = given if base.is_import_of_run else str(base.path)
    return values | {"model": merge(ModelConfig, inherited, model), "extension": extension | {"from": named}}


def _keys_of_position(encoding: str) -> set[str]:
    """Return the settings of a positional encoding; none for one that does not exist."""
    return keys_of(ENCODINGS[encoding].Settings) if encoding in ENCODINGS else set()


def find_base(given: str, run: str | None = None) -> Base:
    """Return the model to extend: a run's newest checkpoint, one checkpoint, or a directory of transformers.

    If such a directory is gone, that is its import in the directory `run` of a run that has begun. Looks at the sizes
    of a checkpoint's files, not at their bytes. Raises ConfigError for what is damaged, incomplete or
    cannot be extended.
    """
    path = Path(given)
    if not path.is_dir() and run is not None and (imported := _imported_by(Path(run), path)):
        return imported
    fix = (
        "give a run, one of its checkpoints, or a directory in the format of transformers, or continue a run that has "
        "begun with --config RUN/config.yaml"
    )
    if _HUB_NAME.fullmatch(given) and not path.parent.exists():
        fix += f"; a model of that name on the Hugging Face hub is fetched with: hf download {given} --local-dir DIR"
    refuse(not path.is_dir(), KEY, f"is {given}, which is not a directory", fix)
    try:
        if (path / "config.json").is_file() and not (path / MANIFEST).exists():
            return _from_transformers(path)
        return _from_checkpoint(find_checkpoint(path, deep=False))
    except NoCheckpoint:
        fix = "give a run, one of its checkpoints, or the complete directory of a model in the format of transformers"
        raise ConfigError(KEY, f"is {given}, which holds neither a checkpoint nor a config.json", fix) from None
    except UserError as error:
        problem = f"{given} cannot be extended: {error.subject} {error.problem}"
        raise ConfigError(KEY, problem, error.fix) from None
    except (ValueError, FileNotFoundError, PermissionError) as error:
        raise ConfigError(KEY, f"{given} cannot be extended: {error}") from None


def _imported_by(run: Path, source: Path) -> Base | None:
    """Return what a run that has begun imported from `source`; None if it extends another model or imported none."""
    try:
        extended = read_yaml(run / "config.yaml", dict[str, dict[str, Any]])["extension"]["from"]
    except (OSError, ValueError, KeyError):
        return None
    imported = run / IMPORTED
    if not isinstance(extended, str) or Path(extended) != source or not (imported / MANIFEST).is_file():
        return None
    return replace(_from_checkpoint(find_checkpoint(imported, deep=False)), is_import_of_run=True)


def _from_transformers(path: Path) -> Base:
    settings = read_settings(path / "config.json")
    with errors_of_settings(path / "config.json"):
        model = model_settings(settings, path / "config.json")
    check_weights(open_directory(path, allow_pickle=False), model, str(path))
    return Base(path, model, None)


def _from_checkpoint(path: Path) -> Base:
    state = read_state(path)
    find_source(path, state)
    settings = state["config"]["model"]
    try:
        model = model_config(settings)
        validate_model(model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(path), f"is of another architecture or version ({error})") from None
    trained = state["config"].get("extension", {}).get("trains")
    if isinstance(trained, list) and "lora" in trained:
        fix = f"merge them first: tools/convert_checkpoint.py to-hf --checkpoint {path} --output NEW, and extend NEW"
        raise CheckpointError(str(path), "has LoRA layers", fix)
    return Base(path, model, state)


def _inherited(base: ModelConfig, encoding: str) -> dict[str, Any]:
    """Return the settings that an extension with this positional encoding has from its base unless it gives others."""
    own, before = _keys_of_position(encoding), base.position_encoding
    others = {"attention_backend", *(["position_encoding"] if encoding != before else [])}
    if encoding in ENCODINGS and before in ENCODINGS[encoding].replaces:
        others.add("layers_without_positions")  # then all of them are
    inherited = {key: value for key, value in as_dict(base).items() if key not in others}
    return inherited | {"position": {key: value for key, value in inherited["position"].items() if key in own}}


def starts_from_base(config: RunConfig) -> bool:
    """Return whether a run begins with the model that it extends: it has no checkpoints of its own to continue."""
    resume = config.checkpoint.resume
    own = list_checkpoints(config.checkpoint.directory)
    return config.extension.from_ is not None and (resume == "none" or (resume == "auto" and not own))


def check_base(config: RunConfig, base: Base | None = None) -> None:
    """Raise ConfigError if a run's model, lengths, tokenizer or trained parts do not fit the model that it extends.

    By default, that is what `extension.from` says. Warns if positions are scaled from a length below the model's.
    """
    base = base or find_base(config.extension.from_, config.logging.directory)
    was, now = base.model.position_encoding, config.model.position_encoding
    added = was != now and ENCODINGS[now].starts_as == was
    extended = {f"position.{key}" for key in ENCODINGS[now].extended_by}
    free = {*CHANGEABLE_MODEL_KEYS, *(f"position.{key}" for key in _keys_of_position("rope")), *extended}
    dropped = was in ENCODINGS[now].replaces
    if added or dropped:
        free |= {"position_encoding", *(f"position.{key}" for key in _keys_of_position(now))}
    if dropped:
        free.add("layers_without_positions")
    if getattr(base.model.position, "increments", "fixed") != "fixed":
        free.remove("position.increments")
    if base.state is None and config.model.vocab_size >= base.model.vocab_size:
        free.add("vocab_size")  # an import adds the rows that are missing
    differences = model_differences(as_dict(base.model), as_dict(config.model), free)
    refuse(
        bool(differences),
        KEY,
        f"{base.path} is another model than these settings describe ({'; '.join(differences)})",
        "remove them from the recipe or the command line: an extension changes only model.seq_length, "
        "model.attention_backend, model.position.rope_*, model.position.randpe_range, model.position.state_precision, "
        "model.position_encoding from rope to tape or nope, and model.position.increments from fixed to learned or "
        "signed",
    )
    held, read = parameter_shapes(base.model), parameter_shapes(config.model)
    unfit = [name for name, shape in held.items() if kind_of(name) == "position" and read.get(name) != shape]
    refuse(
        bool(unfit),
        (KEY, "model.position_encoding"),
        f"{base.path} has parameters, {', '.join(unfit)}, that {now} does not have or has in another shape",
        f"keep model.position_encoding {was}, or extend a model without them",
    )
    _check_lengths(config.model, base)
    trains, new = config.extension.trains, f"model.position_encoding is {now}"
    if not added and _of_encoding(config.model) > _of_encoding(base.model):
        added, new = True, f"model.position.increments is {config.model.position.increments}"
    refuse(
        added and not {"position", "all"} & set(trains),
        ("extension.trains", KEY),
        f"does not name position, but {new}, which {KEY} {base.path} does not have yet, so it would stay as it is",
        "add position, or leave that out",
    )
    _check_tokenizer(config, base)


def _check_lengths(model: ModelConfig, base: Base) -> None:
    """Raise ConfigError if positions are scaled although contexts become shorter, or from a longer one than the base's.

    A shorter one may be meant, as some models state more tokens than they were trained on. Warns about positions that
    linear scaling leaves beyond the trained ones.
    """
    position, was = model.position, base.model.position
    factor, before = (getattr(settings, "rope_scaling_factor", 1.0) for settings in (position, was))
    refuse(
        factor > before and model.seq_length < base.model.seq_length,
        ("model.seq_length", "model.position.rope_scaling_factor", KEY),
        f"is {model.seq_length}, but {KEY} {base.path} has {base.model.seq_length}, and "
        f"model.position.rope_scaling_factor {factor:g} is for longer contexts",
        f"set it to more than that, or, to train on shorter contexts, model.position.rope_scaling_factor to {before:g}",
    )
    if factor == 1:
        kind = getattr(position, "rope_scaling_type", "linear")
        refuse(
            kind not in ("linear", getattr(was, "rope_scaling_type", "linear")),
            ("model.position.rope_scaling_factor", "model.position.rope_scaling_type"),
            f"is 1, with which model.position.rope_scaling_type {kind} changes nothing",
            "set it to the new length over the old one",
        )
        return
    scaling = was.rope_scaling_type if before != 1 else None
    if position.rope_scaling_type == "linear":
        whole = before * model.seq_length / base.model.seq_length
        if factor < whole and scaling in (None, "linear"):
            command_line.say(
                f"warning: model.position.rope_scaling_factor is {factor:g}, but contexts of {KEY} {base.path} grow "
                f"from {base.model.seq_length} to {model.seq_length} tokens; set it to {whole:g}, unless this is meant"
            )
        return
    own = was.rope_original_seq_length if scaling in ("llama3", "yarn") else base.model.seq_length
    key, given = "model.position.rope_original_seq_length", position.rope_original_seq_length
    problem = f"is {given}, but contexts of {KEY} {base.path} have {own} tokens"
    refuse(given > own, (key, KEY), problem, f"set it to {own}")


def _of_encoding(model: ModelConfig) -> set[str]:
    return {name for name in parameter_shapes(model) if kind_of(name) == "position"}


def _check_tokenizer(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if `data.tokenizer` is another tokenizer than that of the model, as far as that is known."""
    given = config.data.tokenizer
    if given is None or not Path(given).exists():
        return
    directory, name = base.tokenizer, f"that of {KEY} {base.path}"
    own = None
    if base.state is not None and base.path.is_dir():
        own = load_saved_tokenizer(base.path)
    elif directory is not None:
        with suppress(ValueError, OSError):
            own = load_tokenizer(directory)
    if own is not None:
        check_same_tokenizer(given, own, name, f"give {directory}")


def with_base_tokenizer(config: RunConfig, base: Base) -> tuple[RunConfig, TokenizerRecord | None]:
    """Return the settings with the tokenizer of the model that a run extends, and what the model says of its own.

    A directory of transformers whose tokenizer cannot be used changes nothing. Raises ConfigError.
    """
    if base.state is not None:
        return with_saved_tokenizer(config, base.path), base.state["progress"].get("tokenizer")
    if config.data.tokenizer is None and config.data.generator is None:
        with suppress(ValueError, OSError):
            record = record_of(load_tokenizer(base.path))
            return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(base.path))), record
    return config, None


def check_command(config: RunConfig, extends: bool) -> None:
    """Raise ConfigError if a configuration is not for the command that was given it: the one that extends, or not."""
    given = config.extension.from_
    fix = "set it, or train with pretrain.train"
    refuse(extends and given is None, KEY, "is not set, so there is nothing to extend", fix)
    problem = f"is {given}, which pretrain.train does not extend"
    refuse(not extends and given is not None, KEY, problem, "run pretrain.extend_context")
    refuse(
        not extends and config.extension != ExtensionConfig(),
        "extension",
        "has settings, which pretrain.train does not use",
        "remove them, or run pretrain.extend_context",
    )
