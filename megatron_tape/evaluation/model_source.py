"""Find and describe the model that a user gives with --model. Imports no torch."""

import functools
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import MANIFEST, read_state
from megatron_tape.checkpoint.index import check_average, read_index
from megatron_tape.checkpoint.locate import find_checkpoint, model_digest
from megatron_tape.checkpoint.saved_tokenizer import TOKENIZER, load_saved_tokenizer
from megatron_tape.config.schema import ModelConfig, RunConfig, config_dict
from megatron_tape.config.sections import as_dict
from megatron_tape.data.tokenizer import (
    Tokenizer,
    TokenizerRecord,
    load_run_tokenizer,
    load_tokenizer,
    tokenizer_record,
)
from megatron_tape.errors import CheckpointError, ConfigError, FileError
from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.extension.rope_scaling import RopeScaling
from megatron_tape.huggingface.export.remote_code import AUTO_MAP, ENCODED_AUTO_MAP, is_own_code
from megatron_tape.huggingface.imports.config_json import ENCODED, read_settings
from megatron_tape.huggingface.tokenizer_files import export_problem
from megatron_tape.io.files import digest
from megatron_tape.io.records import read_record
from megatron_tape.model.names import AVERAGE
from megatron_tape.position import ENCODINGS, encoding_of, model_config
from megatron_tape.synthetic import GENERATORS

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
"""Files in transformers format, one of which every tokenizer has."""
_FILES = (
    *_TOKENIZERS,
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "vocab.txt",
)
"""Files in transformers format, besides weights and code, that determine the model's output."""


@dataclass(frozen=True)
class ModelSource:
    """A model given with --model: a checkpoint of this project, or a directory in transformers
    format.
    """

    path: Path
    info: ModelInfo
    run: dict[str, Any] | None
    """The `settings` and the `step` of the checkpoint; None for a directory in transformers format.
    """
    default_output: Path
    """Directory of the results without --output."""
    runs_foreign_code: bool = False
    """Whether transformers would run Python files in the directory that are not this project's."""
    user_path: str = ""
    """The path as the user gave it."""
    average: bool = False
    """Whether to use the averaged weights of a checkpoint."""
    scaling: RopeScaling | None = None
    """The scaling of the positions that the user has chosen, in addition to the model's own."""

    @property
    def is_checkpoint(self) -> bool:
        """Whether this is a checkpoint of this project, or a run that will have one."""
        return self.run is not None

    @property
    def needs_export(self) -> bool:
        """Whether transformers can load the model only after `export`."""
        return self.is_checkpoint or self.scaling is not None

    def digest(self) -> str:
        """Return a SHA-256 that identifies the model and its scaling."""
        model = self._model_digest()
        if self.scaling is None:
            return model
        return hashlib.sha256(f"{model} {self.scaling.name}".encode()).hexdigest()

    def _model_digest(self) -> str:
        """Return a SHA-256 that covers a checkpoint's manifest, or the contents of `files`."""
        if self.is_checkpoint:
            return model_digest(self.path, self.average)

        # The names are included, since files with exchanged contents are another model.
        combined = hashlib.sha256()
        for file in self.files():
            combined.update(f"{file.name} {digest(file)['sha256']}\n".encode())
        return combined.hexdigest()

    def files(self) -> list[Path]:
        """Return the files of a directory in transformers format that determine the model's
        output.
        """
        return sorted(
            file
            for file in self.path.iterdir()
            if file.is_file() and (file.name in _FILES or file.suffix in (".safetensors", ".py"))
        )

    def load_saved_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer in the checkpoint; None if it contains none."""
        if self.is_checkpoint:
            return load_saved_tokenizer(self.path)
        return None

    def tokenizer_problem(self) -> str | None:
        """Return why the checkpoint's tokenizer cannot be exported, as a clause; None if it can, or
        if there is none."""
        tokenizer = self.load_saved_tokenizer()
        if tokenizer is None:
            return None
        return export_problem(tokenizer, self.info.trained_length or 0)

    @property
    def needs_trust(self) -> bool:
        """Whether transformers needs `trust_remote_code=True` to load the model. Call `check_code`
        before.
        """
        return self.is_checkpoint or self.runs_foreign_code or "auto_map" in self.info.config

    def check_code(self, trust_remote_code: bool) -> None:
        """Raise ConfigError if transformers would run foreign Python files, unless
        `trust_remote_code`.
        """
        if self.runs_foreign_code and not trust_remote_code:
            raise ConfigError(
                "--model",
                f"{self.user_path} contains Python code, which transformers would run",
                "read the code, and pass --trust-remote-code if you trust it",
            )

    def export(self, directory: Path, dtype: str) -> None:
        """Write the model to a new directory in transformers format, with its scaling. A
        checkpoint's tokenizer is included if possible. Raises ConfigError.
        """
        from megatron_tape.extension.scaled_export import export_scaled, link_scaled
        from megatron_tape.huggingface.export.to_transformers import NO_TOKENIZER, export

        # A model in transformers format needs only other settings.
        if not self.is_checkpoint:
            assert self.scaling is not None, "otherwise it needs no export"
            link_scaled(self.scaling, self.path, directory)
            return

        tokenizer = NO_TOKENIZER
        if self.info.has_tokenizer and not self.tokenizer_problem():
            tokenizer = None  # which makes `export` use the tokenizer of the checkpoint
        write = export
        if self.scaling is not None:
            write = functools.partial(export_scaled, self.scaling)
        try:
            write(self.path, directory, dtype, tokenizer=tokenizer, average=self.average)
            command_line.log(f"exported {self.path} to a temporary directory")
        except (ValueError, OSError) as error:
            raise ConfigError("--model", f"{self.user_path} cannot be exported: {error}") from None

    @contextmanager
    def in_transformers_format(self) -> Iterator[Path]:
        """Yield a directory with the model in transformers format.

        A checkpoint, or a model with scaled positions, is exported to a temporary directory.
        """
        if not self.needs_export:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="exported-") as directory:
            self.export(Path(directory, "model"), dtype="fp32")
            yield Path(directory, "model")


def find_model(
    user_path: str,
    label: str | None = None,
    average: bool = False,
    scaling: RopeScaling | None = None,
) -> ModelSource:
    """Return the model at a path: a run, its checkpoints, one checkpoint, or a directory in
    transformers format.

    `label` is the model's name in results, by default that of the directory. `average` selects the
    averaged weights of a run. With `scaling`, its positions are scaled, and its label ends with the
    name of the scaling. Only the sizes of a checkpoint's files are checked. Raises ConfigError if
    the model cannot be used.
    """
    path = Path(user_path)
    if not path.exists():
        fix = "give a run, a checkpoint, or a directory in the format of transformers"
        # A path such as `meta-llama/Llama-3.2-1B` looks like the name of a model on the hub.
        if user_path.count("/") == 1 and not path.parent.is_dir():
            fix += (
                f"; to download a model from the hub, run hf download {user_path} --local-dir"
                f" models/{path.name}"
            )
        raise ConfigError("--model", f"{user_path} does not exist", fix)
    has_config = (path / "config.json").is_file()
    if not has_config and not (path / MANIFEST).exists() and any(path.glob("*.safetensors")):
        raise ConfigError(
            "--model",
            f"{user_path} has weights, but no config.json",
            "give a complete directory, as to-hf and transformers write it",
        )
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            "--model",
            f"{user_path} is an adapter",
            "merge it with its base model first (see docs/extension.md), and give the merged model",
        )

    try:
        if has_config and not (path / MANIFEST).exists():
            model_source = _from_transformers(path, label, scaling)
        else:
            model_source = _from_checkpoint(path, label, average, scaling)
    except ConfigError:
        raise  # about an option
    except (ValueError, OSError) as error:
        raise ConfigError("--model", f"{user_path} cannot be used: {error}") from None
    if average and not model_source.is_checkpoint:
        raise ConfigError(
            "--average",
            f"requires a run or a checkpoint, but {user_path} is in transformers format",
            "omit it",
        )
    return replace(model_source, user_path=user_path)


def _from_transformers(path: Path, label: str | None, scaling: RopeScaling | None) -> ModelSource:
    """Return the model of a directory in transformers format. Raises FileError, or ConfigError if
    it cannot have the scaling.
    """
    settings = read_settings(path / "config.json")
    if not any(path.glob("*.safetensors")):
        raise FileError(
            path,
            "contains no .safetensors files",
            "convert weights in other formats with save_pretrained of transformers, but note that"
            " they may run code",
        )

    # Models that also read images have a section for the language model.
    text_config = settings.get("text_config")
    if not isinstance(text_config, dict):
        text_config = settings
    vocab_size = text_config.get("vocab_size")
    # `type`, because True is an int.
    if type(vocab_size) is not int or vocab_size < 1:
        raise FileError(
            path / "config.json", f"has vocab_size {vocab_size!r}", "set it to an integer above 0"
        )
    # GPT-2 and similar models use n_positions, MPT max_seq_len.
    keys = ("max_position_embeddings", "n_positions", "max_seq_len")
    length = next((text_config[key] for key in keys if key in text_config), None)
    if type(length) is not int or length < 1:
        # Tasks then require the setting `lengths`.
        length = None

    suffix = ""
    if scaling is not None:
        suffix = f"-{scaling.name}"
        length = scaling.scaled_transformers_model(settings, path).seq_length

    name = path.resolve().name
    info = ModelInfo(
        label=f"{label or name}{suffix}",
        vocab_size=vocab_size,
        trained_length=length,
        config=settings,
        has_tokenizer=any((path / file).is_file() for file in _TOKENIZERS),
        tokenizer=_tokenizer_record(path),
    )
    # Both the model and the tokenizer may name classes in Python files.
    model_runs_code = "auto_map" in settings and not _is_own_code(path, settings)
    return ModelSource(
        path,
        info,
        run=None,
        default_output=Path("evaluations") / f"{name}{suffix}",
        runs_foreign_code=model_runs_code or _tokenizer_runs_code(path),
        scaling=scaling,
    )


def _tokenizer_record(path: Path) -> TokenizerRecord | None:
    """Return the record of a directory's tokenizer; None if only transformers can read it."""
    with suppress(FileError):  # in a format that this project does not read
        return tokenizer_record(load_tokenizer(path))
    return None


def _is_own_code(path: Path, settings: dict) -> bool:
    """Return whether transformers would run only unchanged copies of the Python files that this
    project exports.

    `settings` is the directory's config.json. Even with unchanged files, its `auto_map` could name
    other classes, such as one in another directory.
    """
    if not isinstance(settings["auto_map"], dict):
        return False
    # Exports of TAPE and of other encodings consist of different files.
    classes = set(map(str, settings["auto_map"].values()))
    if classes <= set(AUTO_MAP.values()):
        return is_own_code(path)
    encoding = settings.get("position_encoding")
    if not isinstance(encoding, str) or encoding not in ENCODINGS:
        return False
    return classes <= set(ENCODED_AUTO_MAP.values()) and is_own_code(path, ENCODINGS[encoding])


def _tokenizer_runs_code(directory: Path) -> bool:
    """Return whether the tokenizer names a class in a Python file."""
    file = directory / "tokenizer_config.json"
    return file.is_file() and "auto_map" in read_record(file, dict[str, Any])


def model_of_run(config: RunConfig) -> ModelSource:
    """Return the model that a run will have trained when it is finished."""
    run = Path(config.logging.directory)
    return ModelSource(
        run,
        info_of_run(config, load_run_tokenizer(config)),
        run={"settings": config_dict(config), "step": config.train.steps},
        default_output=run / "evaluation",
    )


def info_of_run(config: RunConfig, tokenizer: Tokenizer | None = None) -> ModelInfo:
    """Return the `ModelInfo` of a model in training; `tokenizer` is that of its data, if loaded."""
    name = Path(config.logging.directory or "run").name
    record = None
    if tokenizer is not None:
        record = tokenizer_record(tokenizer)
    has_tokenizer = record is not None or config.data.tokenizer is not None
    return _model_info(config.model, name, has_tokenizer, record)


def check_trained_on(task: str, model_source: ModelSource) -> None:
    """Raise ConfigError if `task` is synthetic and the model was trained on other data."""
    # A directory in transformers format does not say what its model was trained on. If it
    # has no tokenizer, training on `task` is assumed.
    data = model_source.run["settings"].get("data", {}) if model_source.run else {}
    trained_on = task
    if model_source.info.has_tokenizer or data.get("prefix") or data.get("examples"):
        trained_on = "text"
    elif data.get("generator"):
        trained_on = data["generator"]["task"]
    if task in GENERATORS and trained_on != task:
        raise ConfigError(
            task,
            f"is for models that were trained on it, but {model_source.path} was trained on"
            f" {trained_on}",
            f"give a model that was trained with data.generator: {{task: {task}}}",
        )


def _from_checkpoint(
    path: Path, label: str | None, average: bool, scaling: RopeScaling | None
) -> ModelSource:
    """Return the model of a checkpoint, or of the newest one in a run. Raises CheckpointError or
    FileError, or ConfigError if it cannot have the scaling.
    """
    path = find_checkpoint(path, deep=False)
    state = read_state(path)
    # The averaged weights are another model, with results of their own.
    suffix = ""
    if average:
        suffix = f"-{AVERAGE}"
        check_average(path, read_index(path, state["tensor_model_parallel_size"]))
    try:
        model = model_config(state["config"]["model"])
    except ConfigError as error:
        raise CheckpointError(
            path, f"was written by another version of this project ({error})"
        ) from None

    scaling_prefix = ""
    scaling_suffix = ""
    if scaling is not None:
        model = scaling.scaled(model, path)
        scaling_prefix = f"{scaling.name}-"
        scaling_suffix = f"-{scaling.name}"

    # Results of a run stay with it; a checkpoint elsewhere may be in a read-only directory.
    if path.parent.name == "checkpoints":
        directory = path.parent.parent
        # A prefix, because pretrain.compare reads the last of the directories `step-*`.
        output = directory / "evaluation" / f"{scaling_prefix}{path.name}{suffix}"
    else:
        directory = path
        output = Path("evaluations") / f"{directory.resolve().name}{suffix}{scaling_suffix}"
    label = label or f"{directory.resolve().name}{suffix}"
    has_tokenizer = (path / TOKENIZER).is_dir()
    tokenizer = state["progress"].get("tokenizer")
    return ModelSource(
        path,
        _model_info(model, f"{label}{scaling_suffix}", has_tokenizer, tokenizer),
        run={"settings": state["config"], "step": state["step"]},
        default_output=output,
        average=average,
        scaling=scaling,
    )


def _model_info(
    model: ModelConfig, label: str, has_tokenizer: bool, tokenizer: TokenizerRecord | None
) -> ModelInfo:
    """Return the `ModelInfo` of a model of this project."""
    # The model type is that in an export's config.json if the export runs the encoding's own file.
    # All other models have the name of their encoding, such as `tape`, which says more than a type
    # of transformers, such as `llama`.
    model_type = model.position_encoding
    if encoding_of(model).exports_to == "code":
        model_type = ENCODED
    return ModelInfo(
        label=label,
        vocab_size=model.unpadded_vocab_size or model.vocab_size,
        trained_length=model.seq_length,
        config={"model_type": model_type, **as_dict(model)},
        has_tokenizer=has_tokenizer,
        tokenizer=tokenizer,
    )
