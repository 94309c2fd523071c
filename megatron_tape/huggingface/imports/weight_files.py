"""Open weights that other programs wrote: safetensors files, and pickles only if the user allows
it.

torch is imported only when a tensor is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import FileError
from megatron_tape.io.records import read_record
from megatron_tape.model.names import HUGGING_FACE_OUTPUT
from megatron_tape.model.shapes import hugging_face_shapes

if TYPE_CHECKING:
    from torch import Tensor

# The endings of files that torch.load reads.
PICKLES = (".bin", ".pt", ".pth")
# In the order in which transformers looks for them.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# A name without a folder.
_FILE_NAME = re.compile(r"[\w-][\w.-]{0,200}")
_INDEX_BYTES = 32 << 20
"""Maximum size of an index file, enough for about 200,000 tensors."""
# How to fix weights that do not belong to the settings.
MISMATCH = "give the config.json that belongs to the weights, or download them again"


class _Index(TypedDict):
    """The contents of an index file: the name of the file of each tensor."""

    weight_map: dict[str, str]


class LazyTensors(Mapping):
    """Tensors by name. Every access calls `load(name)`.

    `shapes` has those shapes that are known before loading.
    """

    def __init__(
        self,
        names: Iterable[str],
        load: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self._names = dict.fromkeys(names)
        self._load = load
        self.shapes = shapes or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open_safetensors(paths: list[Path]) -> LazyTensors:
    """Return the tensors of several files. A file is open only while one of them is read.

    Raises FileError for a damaged file.
    """
    path_of_tensor = {}
    shapes = {}
    for path in paths:
        try:
            # Only names and shapes are read, so numpy suffices, without an import of torch.
            with safe_open(path, "np") as file:
                for name in file.keys():
                    path_of_tensor[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise FileError(
                path,
                f"is not a complete safetensors file ({error!s:.200})",
                "download or write it again",
            ) from None

    def load_tensor(name: str) -> Tensor:
        """Read a tensor, and close its file again."""
        with safe_open(path_of_tensor[name], "pt") as file:
            return file.get_tensor(name)

    return LazyTensors(path_of_tensor, load_tensor, shapes)


def open_files(paths: list[Path], allow_pickle: bool) -> LazyTensors:
    """Return the tensors of all files by name.

    If two files have the same tensor, the last one is used, as in transformers. Raises FileError if
    a file is missing or damaged, or a pickle without `allow_pickle`.
    """
    for path in paths:
        if not path.is_file():
            raise FileError(path, "is not a file", "give a safetensors file of weights")
    if not any(path.suffix in PICKLES for path in paths):
        return _open_safetensors(paths)
    if not allow_pickle:
        raise FileError(
            paths[0],
            "is a pickle, which may run code when read",
            "if you trust it, import it with tools/convert_checkpoint.py and --allow-pickle",
        )
    tensors = {}
    for path in paths:
        tensors |= _read_pickle(path)
    return LazyTensors(tensors, tensors.__getitem__)


def open_directory(directory: Path, allow_pickle: bool) -> LazyTensors:
    """Return the weights of a model directory in the format of transformers.

    Raises FileError if a file is missing or damaged, or a pickle without `allow_pickle`.
    """
    names = [*_SAFETENSORS, *_PICKLED]
    weights_or_index = next(
        (directory / name for name in names if (directory / name).is_file()), None
    )
    if weights_or_index is None:
        raise FileError(
            directory,
            f"contains none of {', '.join(names)}",
            "give a directory with a complete model",
        )
    if weights_or_index.suffix != ".json":
        return open_files([weights_or_index], allow_pickle)

    file_of_tensor = read_record(weights_or_index, _Index, _INDEX_BYTES)["weight_map"]
    file_names = sorted(set(file_of_tensor.values()))
    for name in file_names:
        # A path in an index could lead out of the directory.
        if not _FILE_NAME.fullmatch(name):
            raise FileError(
                weights_or_index,
                f"is not an index of weights: {name!r:.100} is not the name of a file",
            )
        if not (directory / name).is_file():
            raise FileError(
                directory, f"is incomplete: the file {name} is in its index, but missing"
            )

    weights = open_files([directory / name for name in file_names], allow_pickle)
    if missing := sorted(set(file_of_tensor) - set(weights)):
        raise FileError(
            directory, f"is incomplete: {missing[0]:.100} is in its index, but in none of its files"
        )
    return weights


def check_weights(weights: LazyTensors, model: ModelConfig, origin: str) -> None:
    """Raise FileError unless `weights` match the parameters of `model` without vocabulary padding.

    Compares names, and the shapes in `weights.shapes`. With tied embeddings, the output layer's
    name is allowed. `origin` is the subject of messages.
    """
    expected = hugging_face_shapes(dataclasses.replace(model, vocab_size=model.unpadded_vocab_size))
    for name in sorted(weights):
        # Older versions of transformers also saved rotary frequencies, which follow from the
        # settings.
        is_known = name in expected or name.endswith("rotary_emb.inv_freq")
        if not is_known and not (model.tie_embeddings and name == HUGGING_FACE_OUTPUT):
            raise FileError(
                origin,
                f"contains {name:.100}, which the model of its settings does not have",
                MISMATCH,
            )

    for name, shape in expected.items():
        if name not in weights:
            raise FileError(origin, f"lacks the parameter {name}", MISMATCH)
        actual = weights.shapes.get(name, shape)
        if actual != shape:
            raise FileError(
                origin,
                f"gives {name} the shape {actual!s:.100}, but its settings require {shape}",
                MISMATCH,
            )


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle by name. Raises FileError if it contains other objects."""
    import torch

    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # it may raise anything, and torch's message recommends unsafe loading
        raise FileError(
            path,
            "is damaged, or contains objects other than tensors, which are never loaded",
            "save the model again as safetensors",
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(value, torch.Tensor) for value in weights.values()
    ):
        raise FileError(
            path, "is not a dictionary of tensors by name", "save only the model's state_dict"
        )
    return weights
