"""Write imported weights as a checkpoint of this project, from which a run can start at step 0."""

import json
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
from megatron_tape.huggingface.tensor_files import (
    VOCABULARY_WEIGHTS,
    in_parts,
    on_meta,
    with_progress,
)
from megatron_tape.huggingface.tokenizer_files import GENERATION, SPECIAL_IDS
from megatron_tape.io.files import atomic_directory, digest
from megatron_tape.io.records import write_record
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.io.strict_yaml import dump
from megatron_tape.model.initialization import initialized_whole, weight_initializations
from megatron_tape.model.names import POSITION, hugging_face_name, layer_name
from megatron_tape.model.shapes import hugging_face_shapes, parameter_shapes
from megatron_tape.model.weights import from_megatron, to_megatron
from megatron_tape.position import encoding_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _checked_and_padded(weights: LazyTensors, model: ModelConfig, origin: str) -> LazyTensors:
    """Return `weights` with the padded vocabulary of `model`. Each added row is the mean of all
    rows of the same weight.

    Access to a weight raises FileError, about `origin`, if its shape or dtype is wrong, or if it
    contains NaN or infinity.
    """
    shapes = hugging_face_shapes(model)
    padding = model.vocab_size - model.unpadded_vocab_size

    def load_weight(name: str) -> Tensor:
        """Read and check the weight `name`, and pad its vocabulary if it has one."""
        tensor = weights[name]
        shape = shapes[name]
        if name in VOCABULARY_WEIGHTS:
            shape = (model.unpadded_vocab_size, *shape[1:])
        if tuple(tensor.shape) != shape:
            actual = tuple(tensor.shape)
            raise FileError(
                origin, f"gives {name} the shape {actual!s:.100}, but its settings require {shape}"
            )
        if tensor.dtype not in _DTYPES:
            raise FileError(
                origin, f"contains {name} as {tensor.dtype}", "fp32, bf16 and fp16 can be imported"
            )
        if not torch.isfinite(tensor).all():
            raise FileError(
                origin,
                f"contains NaN or infinity in {name}, so it cannot be trained",
                "choose an earlier checkpoint of the model",
            )

        if name not in VOCABULARY_WEIGHTS or padding == 0:
            return tensor
        # In fp32, since a sum over the vocabulary would lose precision in bf16.
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(padding, -1)])

    return LazyTensors(weights, load_weight)


def with_new_tape(weights: LazyTensors, model: ModelConfig, seed: int) -> LazyTensors:
    """Return `weights`, of a model without TAPE, together with the TAPE parameters of `model`.

    These are initialized with `seed`, as in training.
    """
    initializations = weight_initializations(model)
    encoding = encoding_of(model)
    # By Hugging Face's name of a new TAPE parameter: its name in this project.
    tape_names = {
        hugging_face_name(layer, f"{POSITION}{name}"): layer_name(layer, f"{POSITION}{name}")
        for layer in range(model.num_layers)
        for name in encoding.parameters(layer)
    }

    def load_weight(name: str) -> Tensor:
        """Return the weight with Hugging Face's name `name`: a new TAPE parameter, or one that is
        read.
        """
        if name not in tape_names:
            return weights[name]
        own_name = tape_names[name]
        # `from_megatron` converts the parameter to the name and the shape that exports have.
        return from_megatron(
            own_name, initialized_whole(own_name, initializations[own_name], seed), model
        )[name]

    return LazyTensors([*weights, *tape_names], load_weight, weights.shapes)


def write_imported(
    output: str | Path,
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    origin: str,
    tokenizer: Tokenizer | None = None,
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
        progress: additional entries of `progress` in the checkpoint's state.json (`identity`,
            `card`).
    """
    output = Path(output)
    if not isinstance(weights, LazyTensors):
        weights = LazyTensors(weights, weights.__getitem__)
    check_weights(weights, model, origin)
    # A model of this project with tied embeddings has no weight of the output layer. If `weights`
    # has one, it must equal the embedding, and is not written.
    embedding, head = VOCABULARY_WEIGHTS
    if model.tie_embeddings and head in weights:
        if not torch.equal(weights[embedding], weights[head]):
            raise FileError(origin, f"has tie_word_embeddings, but {head} differs from {embedding}")

    padded = _checked_and_padded(weights, model, origin)
    shapes = parameter_shapes(model)
    with atomic_directory(output) as directory:
        # The weights are in files of at most FILE_BYTES bytes, those of tensor-parallel rank 0, the
        # only rank. A weight is read when it is written; `announced` has only its shape.
        announced = on_meta(shapes, torch.float32)
        converted = (to_megatron(padded, name, model) for name in shapes)
        tensors = with_progress(converted, announced.values())
        entries = {}
        index = {}
        for number, part in enumerate(in_parts(announced, FILE_BYTES)):
            file = tensor_file(0, number)
            contents = {f"weight/{name}": part[name] for name in part}
            # The file's size and digest are for the manifest, its tensors' places for the index.
            entries[file], index[file] = write_safetensors(
                directory / file, contents, tensors, {"format": "pt"}
            )
        tensors.close()  # ends the report of `with_progress`
        write_record(directory / INDEX, {"files": index})

        # The state of a run at step 0, and the model's settings.
        model_section = {"model": as_dict(model)}
        saved_progress = {"bad_steps": 0, "origin": origin} | {
            key: value for key, value in progress.items() if value
        }
        other_files = [INDEX, checkpoint_files.STATE, "model.yaml"]
        if tokenizer is not None:
            saved_progress["tokenizer"] = tokenizer_record(tokenizer)
            other_files += write_tokenizer_files(tokenizer.files, directory)
        state = {
            "step": 0,
            "optimizer_steps": 0,
            "consumed_samples": 0,
            "progress": saved_progress,
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "sharded": {},
            "config": model_section,
        }
        write_record(directory / checkpoint_files.STATE, state)
        (directory / "model.yaml").write_text(dump(model_section), encoding="utf-8")

        # The manifest comes last, since it has the digests of all other files.
        for name in other_files:
            entries[name] = digest(directory / name)
        manifest = {"format_version": checkpoint_files.FORMAT_VERSION, "step": 0, "files": entries}
        write_record(directory / checkpoint_files.MANIFEST, manifest)


def advise(output: str | Path, model: ModelConfig) -> None:
    """Print the commands that train `model`, and that extend its context.

    `output` is its checkpoint, which `write_imported` has written.
    """
    output = Path(output)
    checkpoint = shlex.quote(str(output))
    settings = shlex.quote(str(output / "model.yaml"))
    # A placeholder in the commands, if the checkpoint has no tokenizer.
    tokenizer = "TOKENIZER"
    if (output / TOKENIZER).is_dir():
        tokenizer = shlex.quote(str(output / TOKENIZER))
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
    if tokenizer == "TOKENIZER":
        command_line.log(
            f"{output} has no tokenizer: replace TOKENIZER by the model's; exports need --tokenizer"
            " TOKENIZER"
        )


def find_tokenizer(source: Path, rows: int) -> Tokenizer | None:
    """Return the tokenizer in a model's directory, or None. The model has `rows` embedding rows.

    If the tokenizer cannot be used, print a warning and return None. Older models have their
    special ids only in config.json; these are added to the tokenizer's generation settings. Raises
    FileError if a tokenizer file is a link to a file outside `source`.
    """
    # The first two are the names of files with a vocabulary; the other files only add settings.
    if not any((source / name).is_file() for name in TOKENIZER_FILES[:2]):
        return None
    # Outside the `try`, so that the FileError for a link to a file outside `source` is raised and
    # does not become a warning.
    find_files(source)
    try:
        tokenizer = load_tokenizer(source)
        settings = read_settings(source / "config.json")
        if tokenizer.vocab_size > rows:
            raise FileError(
                source, f"has a tokenizer of {tokenizer.vocab_size} ids for only {rows} rows"
            )
    except (ValueError, OSError) as error:
        command_line.log(f"warning: the model is imported without its tokenizer: {error}")
        return None

    ids = {key: settings[key] for key in SPECIAL_IDS if settings.get(key) is not None}
    if ids and GENERATION not in tokenizer.files:
        tokenizer.files[GENERATION] = (json.dumps(ids, indent=2) + "\n").encode()
    return tokenizer
