"""Export a checkpoint of this project to a directory that transformers loads without this project.

TAPE models include their modeling code. Models with `rope` become Llama, Mistral, Qwen2, Qwen3 or
SmolLM3 models. Other models include shared modeling code and the file of their positional encoding.
Parameters are converted one at a time: their shards are read and joined, and the weight is split as
in Hugging Face's models and written.
"""

import dataclasses
import json
import math
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from megatron_tape import command_line
from megatron_tape.checkpoint.saved_tokenizer import TOKENIZER, load_saved_tokenizer
from megatron_tape.config.schema import ModelConfig
from megatron_tape.data.tokenizer import (
    TOKENIZER_MODEL,
    difference,
    load_tokenizer,
    tokenizer_record,
)
from megatron_tape.errors import CheckpointError, FileError, UserError
from megatron_tape.huggingface.export.model_card import (
    CARD_SENTENCES,
    ExportOptions,
    find_results,
    write_card,
)
from megatron_tape.huggingface.export.remote_code import (
    AUTO_MAP,
    ENCODED_AUTO_MAP,
    code_files,
    write_code,
)
from megatron_tape.huggingface.export.saved_weights import (
    SavedWeights,
    find_checkpoint,
    open_weights,
)
from megatron_tape.huggingface.imports.source_card import CARD
from megatron_tape.huggingface.tensor_files import (
    VOCABULARY_WEIGHTS,
    in_parts,
    on_meta,
    with_progress,
)
from megatron_tape.huggingface.tokenizer_files import (
    FROM_THE_FILE,
    GENERATION,
    ExportedTokenizer,
    write_tokenizer,
)
from megatron_tape.huggingface.verification.position_record import record_of, write_positions
from megatron_tape.huggingface.verification.transformers_checks import verify_export
from megatron_tape.io.files import atomic_directory, sync_directory
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.weights import from_megatron
from megatron_tape.position import encoding_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_TOKENIZER = "none"
_GIVE_TOKENIZER = (
    f"give the model's tokenizer with --tokenizer, or --tokenizer {NO_TOKENIZER} to export none"
)
_EXPORTED_FILES = re.compile(
    r"(base/)?("
    r"README\.md|(config|generation_config|adapter_config|tokenizer|tokenizer_config|positions)\.json"
    r"|tokenizer\.model"
    r"|(model(-\d+-of-\d+)?|adapter_model)\.safetensors|model\.safetensors\.index\.json"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|\w+_tape\.py|__pycache__/\w+_tape\.[\w.-]+\.pyc"
    r")"
)
"""Paths of an export's files within its directory."""
# For an export without a tokenizer. Missing ids would get the defaults of the architecture, such as
# 1 and 2 in Llama.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def export(
    checkpoint: str | Path,
    output: str | Path,
    dtype: str = "fp32",
    max_shard_size: int = 5_000_000_000,
    tokenizer: str | None = None,
    average: bool = False,
    overwrite: bool = False,
    verify: bool = False,
) -> Path:
    """Export the model of a run, a checkpoints directory or one step to `output`; return the
    exported checkpoint's path.

    Merges LoRA layers into the matrices. Raises UserError or OSError, and does not change `output`,
    if the checkpoint is damaged, cannot be exported or has no averaged weights, if the tokenizer is
    missing, or if `output` exists.

    Args:
        dtype: of the exported weights, a key of DTYPES.
        max_shard_size: maximum bytes of a file of weights.
        tokenizer: replaces the run's tokenizer; `none` exports without a tokenizer.
        average: export the averaged weights.
        overwrite: replace `output` when the new export is complete, if it is an export of this
            project.
        verify: before `output` appears, check that transformers computes what the checkpoint
            computes (see `verification`). This needs memory for the whole model.
    """
    # The card shows this name; `directory` has a temporary name.
    name = Path(output).resolve().name
    with new_export(output, overwrite) as directory:
        saved = open_exportable(checkpoint, average)
        results = find_results(saved.path, average)
        options = ExportOptions(name, dtype, tokenizer, max_shard_size, results=results)
        write_model(saved, directory, options)
        if verify:
            verify_export(saved, directory, DTYPES[dtype])
    return saved.path


def new_export(output: str | Path, overwrite: bool) -> AbstractContextManager[Path]:
    """Return a context with an empty directory, which is renamed to `output` if the block succeeds.

    Raises FileError if `output` exists. With `overwrite`, an export of this project is replaced,
    but no other directory.
    """
    return atomic_directory(
        output,
        check_replaceable=check_export if overwrite else None,
        fix="pass --overwrite to replace it, or choose another output",
    )


def check_export(directory: Path) -> None:
    """Raise FileError if `directory` is not an export of this project, or contains files that
    exports do not have.
    """
    # A user may have named another directory by mistake, or have added files.
    fix = "choose another output, or move it away"
    card = directory / CARD
    text = card.read_text("utf-8", "replace") if card.is_file() else ""
    if not any(sentence in text for sentence in CARD_SENTENCES):
        raise FileError(directory, "is not an export of this project, so it is not replaced", fix)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_directory = path.is_dir() and not path.is_symlink()
        if not is_directory and not _EXPORTED_FILES.fullmatch(name):
            raise FileError(
                path, "is not a file of an export, so its directory is not replaced", fix
            )


def open_exportable(checkpoint: str | Path, average: bool) -> SavedWeights:
    """Check and open the newest complete checkpoint in `checkpoint`, a run, a checkpoints directory
    or one step. With `average`, its averaged weights are read.

    Raises UserError or OSError if it cannot be exported.
    """
    with command_line.step("checking the checkpoint"):
        path = find_checkpoint(checkpoint, command_line.log)
        saved = open_weights(path, average)
    model = saved.model
    encoding = encoding_of(model)
    if encoding.exports_to is None:
        raise CheckpointError(
            path, f"has model.position_encoding {encoding.name}, which does not support export"
        )
    if encoding.exports_to == "code":
        code_files(type(encoding))  # raises UserError if the encoding's file cannot be exported
    if encoding.exports_to == "plain" and model.qkv_bias and model.qk_norm:
        raise CheckpointError(
            path,
            "has model.qkv_bias and model.qk_norm, which no architecture of transformers combines"
            " with rope",
            "only models with model.position_encoding tape can have both",
        )
    return saved


def write_model(saved: SavedWeights, directory: Path, options: ExportOptions) -> None:
    """Write all files of a model's export to an empty directory, and flush them to disk."""
    model = saved.model
    encoding = encoding_of(model)
    # The tokenizer is written first, because it determines the number of embedding rows and the
    # special ids. It is None if the export has none.
    tokenizer = _write_tokenizer(saved, options.tokenizer, directory)

    rows = vocabulary_rows(model, tokenizer)
    config = huggingface_config(model, rows, options.dtype)
    ids: dict[str, Any] = _NO_IDS
    generation = {}
    tokenizer_class = None
    if tokenizer is not None:
        ids = tokenizer.special_ids
        generation = tokenizer.generation
        tokenizer_class = "AutoTokenizer"
        if config["model_type"] == "qwen2":
            tokenizer_class = FROM_THE_FILE
            command_line.log(
                "with model.qkv_bias, this export is a Qwen2 model; AutoTokenizer would replace its"
                f" tokenizer by Qwen's; load the tokenizer with {FROM_THE_FILE}.from_pretrained"
            )

    write_json(directory / "config.json", config | ids)
    write_positions(directory, record_of(model, config))
    write_json(directory / GENERATION, generation)
    if encoding.exports_to == "tape":
        write_code(directory)
    elif encoding.exports_to == "code":
        write_code(directory, type(encoding))
    write_card(directory, config["model_type"], saved, options, rows, tokenizer_class)
    _write_weights(saved, directory, rows, options)
    for file in directory.iterdir():
        sync_directory(file)


def huggingface_config(model: ModelConfig, rows: int, dtype: str) -> dict:
    """Return the contents of `config.json` for a model with `rows` embedding rows, without special
    token ids.
    """
    encoding = encoding_of(model)
    if encoding.exports_to == "code":
        # With the same type in all layers, the size of the window is enough.
        types = layer_types(model) if model.full_attention_every is not None else None
        return _shared_config("Encoded", "encoded_tape", model, rows, dtype) | {
            "auto_map": ENCODED_AUTO_MAP,
            "qk_norm": model.qk_norm,
            "attention_output_gate": model.attention_output_gate,
            "layers_without_positions": model.layers_without_positions,
            "sliding_window": model.sliding_window,
            "layer_types": types,
            "temperature_scale": model.temperature_scale,
            "temperature_floor_scale": model.temperature_floor_scale,
            "position_encoding": encoding.name,
            "position_settings": _position_settings(model),
        }

    rope = _rope_parameters(model.position)
    if encoding.exports_to == "tape":
        return _shared_config("Tape", "tape", model, rows, dtype) | {
            "rope_parameters": rope,
            "auto_map": AUTO_MAP,
            "qk_norm": model.qk_norm,
            "position_mlp_size": encoding.mlp_width,  # type: ignore[attr-defined]
            "gate_input": model.position.gate_input,
            "position_state_precision": model.position.state_precision,
        }

    class_prefix, model_type = _rope_architecture(model)
    # transformers 4 reads rotary settings only outside rope_parameters; transformers 5 reads both.
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = _shared_config(class_prefix, model_type, model, rows, dtype) | {
        "max_position_embeddings": _rotary_context(model),
        "rope_parameters": rope,
        "rope_theta": model.position.rope_theta,
        "rope_scaling": scaling if "factor" in rope else None,
    }

    # Settings of these architectures whose defaults are wrong here.
    if model_type == "mistral":
        return config | {"sliding_window": model.sliding_window}
    if model_type in ("llama", "smollm3"):
        config["mlp_bias"] = False
    if model_type != "llama":
        config |= _window_settings(model, model_type)
    if model_type == "smollm3":
        # If all layers have RoPE, the interval is longer than the model.
        config["no_rope_layer_interval"] = model.layers_without_positions or model.num_layers + 1
        # In spite of its name, this list has 1 for each layer with RoPE.
        layers = range(model.num_layers)
        config["no_rope_layers"] = [int(model.has_positions(layer)) for layer in layers]
    return config


def layer_types(model: ModelConfig) -> list[str]:
    """Return transformers' name of each layer's kind of attention."""
    types = []
    for layer in range(model.num_layers):
        if model.window_of(layer) is None:
            types.append("full_attention")
        else:
            types.append("sliding_attention")
    return types


def _rope_architecture(model: ModelConfig) -> tuple[str, str]:
    """Return the prefix of the class, and the model_type, of the architecture of transformers that
    has the layers of a model with `rope`.
    """
    if model.layers_without_positions is not None:
        return "SmolLM3", "smollm3"
    if model.qkv_bias:
        return "Qwen2", "qwen2"
    if model.qk_norm:
        return "Qwen3", "qwen3"
    # Of the architectures with Llama's layers, only SmolLM3 can have a window in some of them.
    if model.full_attention_every is not None:
        return "SmolLM3", "smollm3"
    # Llama has no window, and requires that the number of heads divides the hidden size. Mistral is
    # the same model without these rules. It has the window in all layers.
    if model.sliding_window is not None or model.hidden_size % model.num_attention_heads:
        return "Mistral", "mistral"
    return "Llama", "llama"


def _window_settings(model: ModelConfig, model_type: str) -> dict:
    """Return the settings of the sliding window for the architectures Qwen2, Qwen3 and SmolLM3."""
    if model.sliding_window is None:
        return {"use_sliding_window": False}

    settings = {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        # By default, SmolLM3 has the window in the layers without positions.
        "layer_types": layer_types(model),
    }
    if model_type != "smollm3":
        # The number of layers at the beginning without a window, for programs that do not read
        # `layer_types`. vLLM does not obey that list: it refuses Qwen's models whose layers differ,
        # unless this is the number of all layers.
        settings["max_window_layers"] = 0
    return settings


def _rope_parameters(position: Any) -> dict:
    """Return rotary settings in the format of transformers 5. `position` is `model.position` of
    `rope` or `tape`.
    """
    rope: dict = {"rope_type": "default", "rope_theta": position.rope_theta}
    if position.rope_scaling_type == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": position.rope_scaling_factor,
            "low_freq_factor": position.rope_low_freq_factor,
            "high_freq_factor": position.rope_high_freq_factor,
            "original_max_position_embeddings": position.rope_original_seq_length,
        }
    elif position.rope_scaling_type == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": position.rope_scaling_factor,
            "beta_fast": position.rope_beta_fast,
            "beta_slow": position.rope_beta_slow,
            "truncate": position.rope_truncate,
            "original_max_position_embeddings": position.rope_original_seq_length,
        }
        if position.rope_attention_factor is not None:
            rope["attention_factor"] = position.rope_attention_factor
    elif position.rope_share < 1.0:
        rope |= {
            "rope_type": "proportional",
            "partial_rotary_factor": position.rope_share,
            "factor": position.rope_scaling_factor,
        }
    elif position.rope_scaling_factor != 1.0:
        rope |= {"rope_type": "linear", "factor": position.rope_scaling_factor}
    return rope


def _rotary_context(model: ModelConfig) -> int:
    """Return `max_position_embeddings` in tokens, for an architecture of transformers with RoPE."""
    position: Any = model.position
    if position.rope_scaling_type != "yarn":
        return model.seq_length
    # vLLM since 0.30 accepts requests of `max_position_embeddings` tokens. Its table of sines and
    # cosines ends at the length to which yarn scales. A longer request would read past its end.
    scaled_length = math.ceil(position.rope_original_seq_length * position.rope_scaling_factor)
    return min(model.seq_length, scaled_length)


def _shared_config(
    class_prefix: str,
    model_type: str,
    model: ModelConfig,
    rows: int,
    dtype: str,
) -> dict:
    """Return the settings that all architectures have in `config.json`.

    `class_prefix` is Llama for LlamaForCausalLM, for example. The model has `rows` embedding rows.
    """
    return {
        "architectures": [f"{class_prefix}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": rows,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": model.qkv_bias,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _position_settings(model: ModelConfig) -> dict:
    """Return the settings of the encoding, which the export's code reads."""
    settings = dict(sorted(dataclasses.asdict(model.position).items()))
    if "token_mixing" in settings:
        settings["token_mixing"] = "full"  # exported weights store the scales of heads as a matrix
    return settings


def vocabulary_rows(model: ModelConfig, tokenizer: ExportedTokenizer | None) -> int:
    """Return the number of embedding rows of an export, without the padding for tensor parallelism.

    An imported model keeps its original number. Other models have one row for each id of the
    tokenizer. Without a tokenizer, all rows are exported. Raises UserError if the tokenizer has
    more ids than the model has rows.
    """
    rows = model.unpadded_vocab_size or model.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise UserError(
            "the tokenizer",
            f"has {tokenizer.vocab_size} ids, but the model has only {rows} embedding rows",
            _GIVE_TOKENIZER,
        )
    if tokenizer is None or model.unpadded_vocab_size:
        return rows
    return tokenizer.vocab_size


def _write_weights(
    saved: SavedWeights,
    directory: Path,
    rows: int,
    options: ExportOptions,
) -> None:
    """Write `model.safetensors`, or several shards of at most `max_shard_size` bytes with their
    index. Embeddings and output layer have `rows` rows.

    Peak memory is at most three times the unsharded fp32 size of the largest parameter.
    """
    # Shapes by Hugging Face's names, in the order in which the weights are written.
    parameters = parameter_shapes(saved.model)
    shapes = {}
    for name, shape in parameters.items():
        shapes |= exported_shapes(saved.model, name, shape, rows)
    announced = on_meta(shapes, DTYPES[options.dtype])
    shards = in_parts(announced, options.max_shard_size)
    count = len(shards)
    file_names = ["model.safetensors"]
    if count > 1:
        file_names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    # Generators, so that only one parameter at a time is in memory.
    weights = (
        item for name in parameters for item in saved.exported(name, options.with_lora).items()
    )
    without_padding = (weight[: shapes[key][0]] for key, weight in weights)
    tensors = with_progress(without_padding, announced.values())
    file_of_weight = {}
    for file_name, shard in zip(file_names, shards, strict=True):
        write_safetensors(directory / file_name, shard, tensors, {"format": "pt"})
        file_of_weight |= dict.fromkeys(shard, file_name)

    tensors.close()  # ends the report of `with_progress`
    if count > 1:
        metadata = {
            "total_parameters": sum(math.prod(shape) for shape in shapes.values()),
            "total_size": sum(tensor.nbytes for tensor in announced.values()),
        }
        index = {"metadata": metadata, "weight_map": file_of_weight}
        write_json(directory / "model.safetensors.index.json", index)


def exported_shapes(
    model: ModelConfig, name: str, shape: tuple[int, ...], rows: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the exported weights of a Megatron parameter, by Hugging Face's names.

    The unsharded parameter `name` has the shape `shape`. Embeddings and output layer are exported
    with `rows` rows.
    """
    shapes = {}
    for key, weight in from_megatron(name, torch.empty(shape, device="meta"), model).items():
        if key in VOCABULARY_WEIGHTS:
            weight = weight[:rows]
        shapes[key] = tuple(weight.shape)
    return shapes


def _write_tokenizer(
    saved: SavedWeights, replacement: str | None, directory: Path
) -> ExportedTokenizer | None:
    """Write the run's tokenizer, or the one at the path `replacement` if it gives the same ids, to
    `directory`.

    With the replacement `none`, nothing is written and None is returned. Raises FileError if the
    replacement gives other ids, and CheckpointError if there is no tokenizer.
    """
    if replacement == NO_TOKENIZER:
        return None
    saved_tokenizer = load_saved_tokenizer(saved.path)
    context = saved.model.seq_length
    if replacement is None:
        if saved_tokenizer is None:
            raise CheckpointError(saved.path, "has no tokenizer", _GIVE_TOKENIZER)
        return write_tokenizer(saved_tokenizer, directory, context, str(saved.path / TOKENIZER))

    tokenizer = load_tokenizer(replacement)
    # The record of the tokenizer that trained the model, or None: digests that identify it.
    recorded = saved.state["progress"].get("tokenizer")
    if saved_tokenizer is not None:
        recorded = tokenizer_record(saved_tokenizer)
        if TOKENIZER_MODEL in saved_tokenizer.files:
            # The replacement may be a tokenizer.json that was made from the saved SentencePiece
            # model. With the model's file added, its record tells whether both give the same ids.
            tokenizer.files.setdefault(TOKENIZER_MODEL, saved_tokenizer.files[TOKENIZER_MODEL])
    if recorded:
        record = tokenizer_record(tokenizer)
        if different := difference(record, recorded, "the one that trained the model"):
            raise FileError(
                replacement,
                different,
                f"omit --tokenizer, or give --tokenizer {NO_TOKENIZER} and copy the files into the"
                " export yourself",
            )
    return write_tokenizer(tokenizer, directory, context, replacement)


def write_json(path: Path, value: dict) -> None:
    """Write `value` to the file `path` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
