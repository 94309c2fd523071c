"""Open weights that others wrote: one or several safetensors files, and pickles only if the user allows it.

Each is a mapping from names to tensors that reads a tensor when it is accessed. torch is imported only then.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from safetensors import SafetensorError, safe_open

from megatron_tape.config.schema import ModelConfig
from megatron_tape.io.records import read_record
from megatron_tape.model.names import OUTPUT, whole_shapes

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = (".bin", ".pt", ".pth")
# In the order in which transformers looks for them.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# TAPE's matrices as exports named them before they were modules.
_BARE = re.compile(r"(.*\.position\.(?:token_mixing|x_proj|up_proj|down_proj))")


class _Index(TypedDict):
    weight_map: dict[str, str]


class _Safetensors(Mapping):
    """Tensors of several safetensors files by current names, each of which is open only while a tensor is read."""

    def __init__(self, paths: list[Path]):
        self._places: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                with safe_open(path, "np") as file:  # reads names and shapes only
                    for stored in file.keys():
                        self._places[current_name(stored)] = path, stored
                        self.shapes[current_name(stored)] = tuple(file.get_slice(stored).get_shape())
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({error}); download or write it again"
                ) from None

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self._places[name]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(stored)
        except SafetensorError as error:
            raise ValueError(f"{name} in {path} cannot be read: {error}") from None

    def stored_name(self, name: str) -> str:
        """Return the name under which the file holds a weight."""
        return self._places[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def current_name(stored: str) -> str:
    """Return the current name of a weight that an earlier export may hold under another name."""
    return _BARE.sub(r"\1.weight", stored) if _BARE.fullmatch(stored) else stored


def open_files(paths: list[Path], allow_pickle: bool) -> Mapping[str, Tensor]:
    """Return the tensors of all files by current names; raises FileNotFoundError or ValueError in one sentence."""
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"weights {path} is not a file; give a safetensors file")
        if not os.access(path, os.R_OK):
            raise PermissionError(f"you may not read {path}; ask its owner for permission")
    if not any(path.suffix in PICKLES for path in paths):
        return _Safetensors(paths)
    if not allow_pickle:
        raise ValueError(
            f"{paths[0]} is a pickle, which may run code when read; convert it to safetensors, or pass --allow-pickle"
        )
    weights: dict[str, Tensor] = {}
    for path in paths:
        weights |= {current_name(name): tensor for name, tensor in _read_pickle(path).items()}
    return weights


def open_directory(directory: Path, allow_pickle: bool) -> Mapping[str, Tensor]:
    """Return the weights of a model of transformers by current names.

    Raises FileNotFoundError or ValueError in one sentence.
    """
    names = [*_SAFETENSORS, *_PICKLED]
    first = next((directory / name for name in names if (directory / name).is_file()), None)
    if first is None:
        raise FileNotFoundError(f"{directory} holds none of {', '.join(names)}; give a directory with a complete model")
    if first.suffix != ".json":
        return open_files([first], allow_pickle)
    places = read_record(first, _Index)["weight_map"]
    files = sorted(set(places.values()))
    if any(Path(name).name != name for name in files):
        raise ValueError(f"{first} is not an index of weights: it names files in other directories")
    for name in files:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} is incomplete: {name}, which its index names, is missing")
    weights = open_files([directory / name for name in files], allow_pickle)
    if missing := sorted(set(map(current_name, places)) - set(weights)):
        raise ValueError(f"{directory} is incomplete: {missing[0]}, which its index names, is in none of its files")
    return weights


def check_names(names: Collection[str], model: ModelConfig, origin: str, unread: tuple[str, ...] = ()) -> None:
    """Raise ValueError if the weights have other names than those of `model` and ones that start with one of `unread`.

    If the embeddings are tied, the output layer may be there as well.
    """
    expected = whole_shapes(model)
    fix = "give the config.json that belongs to the weights, or fetch them again"
    if missing := [name for name in expected if name not in names]:
        raise ValueError(f"{origin} lacks the parameter {missing[0]}; {fix}")
    for name in sorted(names):
        # Older programs also saved rotary frequencies, which follow from the settings.
        known = name in expected or name.startswith(unread) or name.endswith("rotary_emb.inv_freq")
        if not known and not (model.tie_embeddings and name == OUTPUT):
            raise ValueError(f"{origin} holds {name}, which a model with its settings does not have; {fix}")


def check_directory(directory: Path, model: ModelConfig) -> None:
    """Raise ValueError if the names and shapes of the weights in `directory`, unpadded, are not those of `model`.

    Reads no weights. Raises as `open_directory` does, and refuses pickles.
    """
    weights = open_directory(directory, allow_pickle=False)
    check_names(set(weights), model, str(directory))
    for name, shape in whole_shapes(dataclasses.replace(model, vocab_size=model.unpadded_vocab_size)).items():
        if weights.shapes[name] != shape:
            raise ValueError(
                f"its weights hold {name} with the shape {weights.shapes[name]}, but its config.json requires {shape}; "
                "give the config.json that belongs to the weights, or fetch them again"
            )


def _read_pickle(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # unpickling may raise anything, and torch advises reading it unsafely
        raise ValueError(
            f"{path} cannot be read as a pickle of only tensors: it is damaged or holds other objects, which are "
            "never loaded; save the model again as safetensors"
        ) from None
    named = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not named or not all(_is_plain(value) for value in weights.values()):
        raise ValueError(f"{path} holds more than a model's plain tensors by name; save its state_dict alone")
    return weights


def _is_plain(value: object) -> bool:
    import torch
    from torch import Tensor

    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
