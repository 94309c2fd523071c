"""Write imported weights as a checkpoint of this project, from which a run can start at step 0."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint.index import FILE_BYTES, INDEX, tensor_file
from megatron_tape.checkpoint.saved_tokenizer import TOKENIZER, write_tokenizer_files
from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import as_dict
from megatron_tape.data.tokenizer import (
    TOKENIZER_FILES,
    Tokenizer,
    find_files,
    load_tokenizer,
    tokenizer_record,
)
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.imports.weight_files import LazyTensors, check_weights
from megatron_tape.huggingface.tensor_files import in_parts, on_meta, with_progress
from megatron_tape.huggingface.tokenizer_files import GENERATION, SPECIAL_IDS
from megatron_tape.io.files import atomic_directory, digest
from megatron_tape.io.records import write_record
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.io.strict_yaml import dump
from megatron_tape.model.initialization import initialized_whole, weight_initializations
from megatron_tape.model.names import HUGGING_FACE_OUTPUT, POSITION, hugging_face_name, layer_name
from megatron_tape.model.shapes import parameter_shapes, whole_shapes
from megatron_tape.model.weights import from_megatron, to_megatron
from megatron_tape.position import encoding_of

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_POSITION = re.compile(r"model\.layers\.(\d+)\.position\.(\w+)\.weight")
_VOCABULARY = ("model.embed_tokens.weight", HUGGING_FACE_OUTPUT)


def _padded(weights: Mapping[str, Tensor], model: ModelConfig, origin: str) -> LazyTensors:
    """Return `weights` with the padded vocabulary of `model`; each added row is the mean of all
    rows.

    Reading a weight raises FileError if its shape or dtype is wrong, or if it contains NaN or
    infinity.
    """
    shapes = whole_shapes(model)
    rows = model.vocab_size

    def read(name: str) -> Tensor:
        tensor = weights[name]
        shape = shapes[name]
        if name in _VOCABULARY:
            shape = (model.unpadded_vocab_size, *shape[1:])
        if tuple(tensor.shape) != shape:
            problem = (
                f"gives {name} the shape {tuple(tensor.shape)!s:.100}, but its settings require"
                f" {shape}"
            )
            raise FileError(origin, problem)
        if tensor.dtype not in _TYPES:
            raise FileError(
                origin, f"contains {name} as {tensor.dtype}", "fp32, bf16 and fp16 can be imported"
            )
        if not torch.isfinite(tensor).all():
            problem = f"contains NaN or infinity in {name}, so it cannot be trained"
            raise FileError(origin, problem, "choose an earlier checkpoint of the model")
        if name not in _VOCABULARY or len(tensor) == rows:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(rows - len(tensor), -1)])

    return LazyTensors(weights, read)


def with_new_tape(weights: Mapping[str, Tensor], model: ModelConfig, seed: int) -> LazyTensors:
    """Return the weights of a model without TAPE by Hugging Face's names, with newly initialized
    TAPE parameters.
    """
    initials = weight_initializations(model)
    encoding = encoding_of(model)

    def read(name: str) -> Tensor:
        if (match := _POSITION.fullmatch(name)) is None:
            return weights[name]
        own = layer_name(int(match[1]), f"{POSITION}{match[2]}")
        return from_megatron(own, initialized_whole(own, initials[own], seed), model)[name]

    own = [
        (layer, name) for layer in range(model.num_layers) for name in encoding.parameters(layer)
    ]
    new = (hugging_face_name(layer, f"{POSITION}{name}") for layer, name in own)
    return LazyTensors([*weights, *new], read, getattr(weights, "shapes", {}))


def write_imported(
    output: str | Path,
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    origin: str,
    tokenizer: Tokenizer | None = None,
    unread: tuple[str, ...] = (),
    **progress: object,
) -> None:
    """Write unsharded weights by Hugging Face's names (see `model.weights`) as the new checkpoint
    `output`.

    The checkpoint has no optimizer state. `checkpoint.resume: OUTPUT` starts a run from it, with
    the model's settings from `OUTPUT/model.yaml`. Raises FileError and leaves nothing behind if a
    weight is missing, has another shape or does not belong to the model.

    Args:
        weights: with `model.unpadded_vocab_size` embedding rows; rows up to `model.vocab_size` are
            added here, and exports remove them again. Weights are read one at a time.
        origin: description of the source.
        tokenizer: its files are written to `OUTPUT/tokenizer`.
        unread: prefixes of names to ignore in `weights`.
        progress: additional entries of `progress` in the checkpoint's state.json (`identity`,
            `card`).
    """
    output = Path(output)
    shapes = parameter_shapes(model)
    _check(weights, model, origin, unread)
    padded = _padded(weights, model, origin)
    with atomic_directory(output) as directory:
        announced = on_meta(shapes, torch.float32)
        tensors = with_progress(
            (to_megatron(padded, name, model) for name in shapes), announced.values()
        )
        entries = {}
        index = {}
        for number, part in enumerate(in_parts(announced, FILE_BYTES)):
            file = tensor_file(0, number)
            contents = {f"weight/{name}": part[name] for name in part}
            entries[file], index[file] = write_safetensors(
                directory / file, contents, tensors, {"format": "pt"}
            )
        tensors.close()
        write_record(directory / INDEX, {"files": index})
        progress = {"origin": origin} | progress
        progress |= {} if tokenizer is None else {"tokenizer": tokenizer_record(tokenizer)}
        state = {
            "step": 0,
            "optimizer_steps": 0,
            "consumed_samples": 0,
            "progress": {
                "bad_steps": 0,
                **{key: value for key, value in progress.items() if value},
            },
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "sharded": {},
            "config": {"model": as_dict(model)},
        }
        write_record(directory / checkpoint_files.STATE, state)
        _write_settings(directory / "model.yaml", model)
        if tokenizer is None:
            copied = []
        else:
            copied = write_tokenizer_files(tokenizer.files, directory)
        for name in (INDEX, checkpoint_files.STATE, "model.yaml", *copied):
            entries[name] = digest(directory / name)
        manifest = {"format_version": checkpoint_files.FORMAT_VERSION, "step": 0, "files": entries}
        write_record(directory / checkpoint_files.MANIFEST, manifest)


def advise(output: str | Path, model: ModelConfig) -> None:
    """Print the commands that train and extend `model`, the checkpoint written to `output` by
    `write_imported`.
    """
    output = Path(output)
    copied = (output / TOKENIZER).is_dir()
    if copied:
        tokenizer = shlex.quote(str(output / TOKENIZER))
    else:
        tokenizer = "TOKENIZER"
    checkpoint, settings = (shlex.quote(str(path)) for path in (output, output / "model.yaml"))
    data = f"--data.prefix DATA --data.tokenizer {tokenizer}"
    command_line.log(f"wrote {output}")
    command_line.log(
        f"train it: python -m pretrain.train --config RECIPE --config {settings}"
        f" --checkpoint.resume {checkpoint} --logging.directory runs/NAME {data}"
    )
    if model.position_encoding in ("rope", "tape"):
        command_line.log(
            "train it with TAPE on contexts twice as long: python -m pretrain.extend_context"
            f" --config extend/tape --extension.from {checkpoint} --logging.directory runs/NAME"
            f" {data}"
        )
    if not copied:
        command_line.log(
            f"{output} has no tokenizer: replace TOKENIZER by the model's; exports need --tokenizer"
            " TOKENIZER"
        )


def _check(
    weights: Mapping[str, Tensor], model: ModelConfig, origin: str, unread: tuple[str, ...]
) -> None:
    """Raise FileError if names or known shapes do not match `model`, or if tied embedding and
    output weights differ.
    """
    check_weights(weights, model, origin, unread)
    embedding, head = _VOCABULARY
    if (
        model.tie_embeddings
        and head in weights
        and not torch.equal(weights[embedding], weights[head])
    ):
        raise FileError(
            origin, f"has tie_word_embeddings in its settings, but {head} differs from {embedding}"
        )


def find_tokenizer(source: Path, rows: int) -> Tokenizer | None:
    """Return the tokenizer in the model directory `source`, for a model with `rows` embedding rows;
    None if missing.

    If the tokenizer cannot be used, print a warning and return None. Older models have their
    special ids only in config.json; these are added to the tokenizer's generation settings. Raises
    FileError if a tokenizer file is a link to a file outside `source`.
    """
    if not any((source / name).is_file() for name in TOKENIZER_FILES[:2]):
        return None
    find_files(source)
    try:
        tokenizer = load_tokenizer(source)
        if tokenizer.vocab_size > rows:
            problem = (
                f"has a tokenizer of {tokenizer.vocab_size} ids for only {rows} embedding rows"
            )
            raise FileError(str(source), problem)
        if (source / "config.json").is_file():
            settings = read_settings(source / "config.json")
        else:
            settings = {}
    except (ValueError, OSError) as error:
        command_line.log(f"warning: the model is imported without its tokenizer: {error}")
        return None
    ids = {key: settings[key] for key in SPECIAL_IDS if settings.get(key) is not None}
    if ids and GENERATION not in tokenizer.files:
        tokenizer.files[GENERATION] = (json.dumps(ids, indent=2) + "\n").encode()
    return tokenizer


def _write_settings(path: Path, model: ModelConfig) -> None:
    path.write_text(dump({"model": as_dict(model)}), encoding="utf-8")
