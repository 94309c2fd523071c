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

PICKLES = (".bin", ".pt", ".pth")
# In the order in which transformers looks for them.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FILE = re.compile(r"[\w-][\w.-]{0,200}")
_INDEX_BYTES = 32 << 20
"""Maximum size of an index file, enough for about 200,000 tensors."""
MISMATCH = "give the config.json that belongs to the weights, or download them again"


class _Index(TypedDict):
    weight_map: dict[str, str]


class LazyTensors(Mapping):
    """Tensors by name, which `read` loads on access.

    `shapes` has those shapes that are known before reading.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self._names = dict.fromkeys(names)
        self._read = read
        self.shapes = shapes or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open_safetensors(paths: list[Path]) -> LazyTensors:
    """Return the tensors of several files. A file is open only while one of them is read."""
    files = {}
    shapes = {}
    for path in paths:
        try:
            with safe_open(path, "np") as file:  # reads names and shapes only
                for name in file.keys():
                    files[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise FileError(
                path,
                f"is not a complete safetensors file ({error!s:.200})",
                "download or write it again",
            ) from None

    def read(name: str) -> Tensor:
        with safe_open(files[name], "pt") as file:
            return file.get_tensor(name)

    return LazyTensors(files, read, shapes)


def open_files(paths: list[Path], allow_pickle: bool) -> LazyTensors:
    """Return the tensors of all files by name. Raises FileError.

    If two files have the same tensor, the last one is used, as in transformers.
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
    """Return the weights of a model directory in the format of transformers. Raises FileError."""
    names = [*_SAFETENSORS, *_PICKLED]
    first = next((directory / name for name in names if (directory / name).is_file()), None)
    if first is None:
        raise FileError(
            directory,
            f"contains none of {', '.join(names)}",
            "give a directory with a complete model",
        )
    if first.suffix != ".json":
        return open_files([first], allow_pickle)

    places = read_record(first, _Index, _INDEX_BYTES)["weight_map"]
    files = sorted(set(places.values()))
    for name in files:
        if not _FILE.fullmatch(name):
            raise FileError(
                first, f"is not an index of weights: {name!r:.100} is not the name of a file"
            )
        if not (directory / name).is_file():
            raise FileError(
                directory, f"is incomplete: the file {name} is in its index, but missing"
            )

    weights = open_files([directory / name for name in files], allow_pickle)
    if missing := sorted(set(places) - set(weights)):
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
        known = name in expected or name.endswith("rotary_emb.inv_freq")
        if not known and not (model.tie_embeddings and name == HUGGING_FACE_OUTPUT):
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
