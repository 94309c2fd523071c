"""Open weights that other programs wrote: safetensors files, and pickles only if the user allows
it.

torch is imported only when a tensor is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import FileError
from megatron_tape.io.records import read_record
from megatron_tape.model.names import HUGGING_FACE_OUTPUT
from megatron_tape.model.shapes import whole_shapes

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = (".bin", ".pt", ".pth")
# In the order in which transformers looks for them.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FILE = re.compile(r"[\w.-]{1,200}")
_INDEX_BYTES = 32 << 20
"""Maximum size of an index file, enough for about 200,000 tensors."""
MISMATCH = "give the config.json that belongs to the weights, or download them again"


class _Index(TypedDict):
    weight_map: dict[str, str]


class LazyTensors(Mapping):
    """Tensors by name, which `read` loads on access.

    `shapes` has those shapes, and `files` the paths of those files, that are known before reading.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        files: Mapping[str, Path] | None = None,
    ):
        self._names = dict.fromkeys(names)
        self._read = read
        self.shapes = shapes or {}
        self.files = files or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Safetensors(LazyTensors):
    """Tensors of several safetensors files. A file is open only while one of its tensors is
    read.
    """

    def __init__(self, paths: list[Path]):
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                with safe_open(path, "np") as file:  # reads names and shapes only
                    for name in file.keys():
                        _add_file(files, name, path)
                        shapes[name] = tuple(file.get_slice(name).get_shape())
            except SafetensorError as error:
                problem = f"is not a complete safetensors file ({error!s:.200})"
                raise FileError(str(path), problem, "download or write it again") from None
        super().__init__(files, self._tensor, shapes, files)

    def _tensor(self, name: str) -> Tensor:
        try:
            with safe_open(self.files[name], "pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            problem = f"contains {name:.100}, which cannot be read: {error!s:.200}"
            raise FileError(str(self.files[name]), problem) from None


def open_files(paths: list[Path], allow_pickle: bool) -> LazyTensors:
    """Return the tensors of all files by name. Raises FileError, for example if two files have the
    same tensor.
    """
    for path in paths:
        if not path.is_file():
            raise FileError(str(path), "is not a file", "give a safetensors file of weights")
    if not any(path.suffix in PICKLES for path in paths):
        return _Safetensors(paths)
    if not allow_pickle:
        fix = "if you trust it, import it with tools/convert_checkpoint.py and --allow-pickle"
        raise FileError(str(paths[0]), "is a pickle, which may run code when read", fix)
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for name, tensor in _read_pickle(path).items():
            _add_file(files, name, path)
            tensors[name] = tensor
    return LazyTensors(tensors, tensors.__getitem__, files=files)


def _add_file(files: dict[str, Path], name: str, path: Path) -> None:
    """Set `files[name]` to `path`. Raises FileError if another file has a tensor of this name.

    transformers would use that of the last file, whatever the index says.
    """
    if name in files:
        problem = (
            f"contains {name:.100}, and {path} contains it, too, so it is unknown which one belongs"
            " to the model"
        )
        raise FileError(
            str(files[name]), problem, "download or save the model again, into an empty directory"
        )
    files[name] = path


def open_directory(directory: Path, allow_pickle: bool) -> LazyTensors:
    """Return the weights of a model directory in the format of transformers. Raises FileError."""
    names = [*_SAFETENSORS, *_PICKLED]
    first = next((directory / name for name in names if (directory / name).is_file()), None)
    if first is None:
        fix = "give a directory with a complete model"
        raise FileError(str(directory), f"contains none of {', '.join(names)}", fix)
    if first.suffix != ".json":
        return open_files([first], allow_pickle)
    places = read_record(first, _Index, _INDEX_BYTES)["weight_map"]
    files = sorted(set(places.values()))
    if wrong := [name for name in files if not _FILE.fullmatch(name) or name.strip(".") == ""]:
        problem = (
            f"is not an index of weights: {wrong[0]!r:.100} is not the name of a file next to it"
        )
        raise FileError(str(first), problem)
    for name in files:
        if not (directory / name).is_file():
            raise FileError(
                str(directory), f"is incomplete: the file {name} is in its index, but missing"
            )
    weights = open_files([directory / name for name in files], allow_pickle)
    if missing := sorted(set(places) - set(weights)):
        problem = f"is incomplete: {missing[0]:.100} is in its index, but in none of its files"
        raise FileError(str(directory), problem)
    for name, place in places.items():
        if (found := weights.files[name].name) != place:
            problem = f"says that {name:.100} is in {place}, but it is in {found}"
            raise FileError(
                str(first), problem, "download or save the model again, into an empty directory"
            )
    return weights


def check_weights(
    weights: Mapping[str, Any], model: ModelConfig, origin: str, unread: tuple[str, ...] = ()
) -> None:
    """Raise FileError unless `weights` match the parameters of `model` with its vocabulary
    unpadded.

    Compares names, and the shapes in `weights.shapes`. Additional names are allowed if they start
    with one of `unread`, or, with tied embeddings, if they name the output layer. `origin` is the
    subject of messages.
    """
    expected = whole_shapes(dataclasses.replace(model, vocab_size=model.unpadded_vocab_size))
    for name in sorted(weights):
        # Older versions of transformers also saved rotary frequencies, which follow from the
        # settings.
        known = name in expected or name.startswith(unread) or name.endswith("rotary_emb.inv_freq")
        if not known and not (model.tie_embeddings and name == HUGGING_FACE_OUTPUT):
            problem = (
                f"contains {name:.100}, but its settings describe a model without this parameter"
            )
            raise FileError(origin, problem, MISMATCH)
    shapes = getattr(weights, "shapes", {})
    for name, shape in expected.items():
        if name not in weights:
            raise FileError(origin, f"lacks the parameter {name}", MISMATCH)
        if shapes.get(name, shape) != shape:
            problem = (
                f"gives {name} the shape {shapes[name]!s:.100}, but its settings require {shape}"
            )
            raise FileError(origin, problem, MISMATCH)


def _read_pickle(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ):  # unpickling may raise anything, and torch's message recommends unsafe loading
        problem = "is damaged, or contains objects other than tensors, which are never loaded"
        raise FileError(str(path), problem, "save the model again as safetensors") from None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        for name, value in weights.items()
    ):
        raise FileError(
            str(path), "is not a dictionary of tensors by name", "save only the model's state_dict"
        )
    return weights
