"""Reads checkpoints of the TAPE authors' code (https://github.com/VITA-Group/TAPE) as checkpoints of this project."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_tape.config import ModelConfig
from megatron_tape.huggingface.imported import padded_vocabulary, write_imported
from megatron_tape.reference import from_released
from megatron_tape.validation import validate_model

_ENCODINGS = {"adape": "tape", "rope": "rope", "nope": "nope"}
_RECORDED = "weight."


def import_released(
    weights: str | Path,
    config: str | Path,
    output: str | Path,
    vocab_multiple: int = 1,
    token_mixing: str = "full",
    allow_pickle: bool = False,
) -> None:
    """Write the released checkpoint `weights`, whose settings are the JSON file `config`, as the checkpoint `output`.

    Raises ValueError or OSError, in one sentence, where they do not fit each other, or this project has no such model.
    """
    settings = _read_settings(Path(config))
    source = open_released(Path(weights), allow_pickle)
    rows = settings["vocab_size"]
    model = _model(settings, Path(config), vocab_multiple, token_mixing)
    unread = {f"model.layers.{model.num_layers - 1}.position."} if model.position_encoding == "tape" else set()
    known = _known_names(model)
    for name in source:
        # Nothing reads the position state after the last layer, so its update has no place here.
        if name not in known and not name.startswith(tuple(unread)):
            raise ValueError(f"{weights} holds {name}, which a model of the settings in {config} does not have")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in source and source[name].shape[0] != rows:
            raise ValueError(f"{weights} has {source[name].shape[0]} rows in {name}, and {config} says {rows}")
    write_imported(output, model, source, rows, f"a checkpoint of the TAPE authors' code, {Path(weights).name}")


def open_released(path: Path, allow_pickle: bool) -> Mapping[str, Tensor]:
    """Return the weights of a file by this project's names; those of safetensors files are read when asked for."""
    if not path.is_file():
        raise FileNotFoundError(f"weights {path} do not exist; give a safetensors file")
    if path.suffix in (".bin", ".pt", ".pth"):
        return from_released(_read_pickle(path, allow_pickle))
    try:
        return _ReleasedFile(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None


class _ReleasedFile(Mapping):
    """A safetensors file, renamed; one that records inputs and gradients too has its weights under `weight.`."""

    def __init__(self, path: Path):
        self._path = path
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
        prefix = _RECORDED if any(key.startswith(f"{_RECORDED}model.") for key in keys) else ""
        self._sources: dict[str, tuple[str, str]] = {}
        for key in keys:
            if key.startswith(prefix):
                released = key.removeprefix(prefix)
                for name in from_released({released: torch.empty(1, 1, device="meta")}):
                    self._sources[name] = (released, key)

    def __getitem__(self, name: str) -> Tensor:
        released, key = self._sources[name]
        with safe_open(self._path, "pt") as file:
            return from_released({released: file.get_tensor(key)})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _read_pickle(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if not allow_pickle:
        raise ValueError(
            f"{path} is a pickle, which may run code when read; convert it to safetensors, or pass --allow-pickle"
        )
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises anything
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read as a pickle of tensors alone: {reason}") from None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} holds more than a model's tensors by name; save its state_dict alone")
    return weights


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"config {path} does not exist; give the model's config.json") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object; give the model's config.json")
    return settings


def _model(settings: dict[str, Any], path: Path, vocab_multiple: int, token_mixing: str) -> ModelConfig:
    def refuse(key: str, fine: str) -> ValueError:
        return ValueError(f"{key} is {settings.get(key)!r} in {path}, which cannot be imported; {fine} can")

    if settings.get("rpe_type") not in _ENCODINGS:
        raise refuse("rpe_type", ", ".join(_ENCODINGS))
    if settings.get("hidden_act", "silu") != "silu":
        raise refuse("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        if settings.get(key):
            raise refuse(key, "false")
    scaling = settings.get("rope_scaling") or {"type": "linear", "factor": 1.0}
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "linear":
        raise refuse("rope_scaling", "null or linear")
    encoding = _ENCODINGS[settings["rpe_type"]]
    try:
        heads = settings["num_attention_heads"]
        model = ModelConfig(
            position_encoding=encoding,
            num_layers=settings["num_hidden_layers"],
            hidden_size=settings["hidden_size"],
            ffn_hidden_size=settings["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=settings.get("num_key_value_heads") or heads,
            seq_length=settings["max_position_embeddings"],
            vocab_size=padded_vocabulary(settings["vocab_size"], vocab_multiple),
            position_mlp_size=settings["position_size"] if encoding == "tape" else None,
            token_mixing=token_mixing,
            rope_theta=float(settings.get("rope_theta", 10000.0)),
            rope_scaling_factor=float(scaling["factor"]),
            norm_epsilon=settings["rms_norm_eps"],
            tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
            init_std=settings.get("initializer_range", 0.02),
        )
        validate_model(model)
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}; give the config.json that belongs to the weights") from None
    except TypeError as error:
        raise ValueError(f"{path} holds a setting of the wrong type: {error}") from None
    return model


def _known_names(model: ModelConfig) -> set[str]:
    from megatron_tape.weights import from_megatron, parameter_shapes

    shapes = parameter_shapes(model)
    names = set()
    for name, shape in shapes.items():
        names |= set(from_megatron(name, torch.empty(shape, device="meta"), model))
    return names | ({"lm_head.weight"} if model.tie_embeddings else set())
