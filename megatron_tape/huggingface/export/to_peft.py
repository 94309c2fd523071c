"""Export the trained parameters of a run as an adapter in peft's format, together with its base
model.

LoRA layers become peft's; other trained parameters become `modules_to_save`. An adapter contains no
settings of the positional encoding. Therefore the base model has the run's settings, and TAPE's
code if the run uses TAPE.
"""

from pathlib import Path

import torch

from megatron_tape.errors import CheckpointError
from megatron_tape.huggingface.export.model_card import ExportOptions, write_adapter_card
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.export.to_transformers import (
    DTYPES,
    exported_shapes,
    new_export,
    open_exportable,
    write_json,
    write_model,
)
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.tensor_files import on_meta
from megatron_tape.io.files import sync_directory
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.weights import from_megatron

BASE = "base"
"""Directory of the base model within the adapter's directory."""
SUPPORTED_KINDS = ("lora", "embeddings", "output", "norms", "position")
"""Kinds of trained parameters that an adapter can contain."""
# The beginning of all names of weights in an adapter.
_PREFIX = "base_model.model."
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# peft's value for an adapter without LoRA layers.
_NO_TARGETS = "dummy-target-modules"


def export_adapter(
    checkpoint: str | Path,
    output: str | Path,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    average: bool = False,
    overwrite: bool = False,
) -> Path:
    """Export the trained parameters of a run to the directory `output`, for
    `PeftModel.from_pretrained`; return the checkpoint's path.

    The base model is written to the directory `base` in `output`; adapter_config.json contains this
    path, which is relative if `output` is. Raises UserError or OSError, for example if an adapter
    cannot contain a trained parameter.

    Args:
        checkpoint: a run, a checkpoints directory or one step.
        dtype: of the exported weights, a key of DTYPES.
        tokenizer: replaces the run's tokenizer; `none` exports without a tokenizer.
        average: export the averaged weights.
        overwrite: replace `output` when the new export is complete, if it is an export of this
            project.
    """
    # The card shows this name; `directory` has a temporary name.
    name = Path(output).resolve().name
    with new_export(output, overwrite) as directory:
        saved = open_exportable(checkpoint, average)
        for parameter in saved.trained:
            if kind_of(parameter) not in SUPPORTED_KINDS:
                raise CheckpointError(
                    saved.path,
                    f"has the trained parameter {parameter}, but an adapter can contain only LoRA"
                    " layers, embeddings, norms and TAPE's matrices",
                    "omit --adapter to export the whole model",
                )

        base_directory = directory / BASE
        base_directory.mkdir()
        write_model(saved, base_directory, ExportOptions(BASE, dtype, tokenizer, with_lora=False))
        # Number of embedding rows, without the padding for tensor parallelism.
        rows = read_settings(base_directory / "config.json")["vocab_size"]
        _write_tensors(saved, directory / "adapter_model.safetensors", rows, DTYPES[dtype])
        config = _adapter_config(saved, Path(output) / BASE)
        write_json(directory / "adapter_config.json", config)
        write_adapter_card(directory, name, saved, dtype)
        for file in directory.iterdir():
            sync_directory(file)
    return saved.path


def _write_tensors(saved: SavedWeights, path: Path, rows: int, dtype: torch.dtype) -> None:
    """Write all trained parameters with peft's names to the file `path`.

    Embeddings and output layer have `rows` rows. A tied embedding is written under both of its
    names.
    """
    shapes = parameter_shapes(saved.model, saved.extension)
    embedding_is_tied = saved.model.tie_embeddings

    def peft_keys(key: str) -> list[str]:
        """Return peft's names of the weight with Hugging Face's name `key`."""
        if embedding_is_tied and key == _EMBEDDING:
            return [_PREFIX + key, _PREFIX + _HEAD]
        return [_PREFIX + key]

    peft_shapes = {}
    for name in saved.trained:
        for key, shape in exported_shapes(saved.model, name, shapes[name], rows).items():
            peft_shapes |= dict.fromkeys(peft_keys(key), shape)
    # In the order of `peft_shapes`. A generator, so that only one parameter at a time is in memory.
    # Embeddings and output layer lose their padding; other weights have no further rows.
    tensors = (
        weight[: peft_shapes[peft_key][0]]
        for name in saved.trained
        for key, weight in saved.exported(name, with_lora=False).items()
        for peft_key in peft_keys(key)
    )
    write_safetensors(path, on_meta(peft_shapes, dtype), tensors, {"format": "pt"})


def _adapter_config(saved: SavedWeights, base_directory: Path) -> dict:
    """Return the contents of adapter_config.json, which refers to the base model by this path."""
    model = saved.model
    extension = saved.extension
    shapes = parameter_shapes(model)
    # Names of modules that peft replaces as a whole: the dictionary's keys, which keep their order.
    saved_modules = {}
    for name in saved.trained:
        kind = kind_of(name)
        if kind == "position":
            # The module of all TAPE matrices of a layer. The name up_proj would also be that of the
            # MLP's matrix.
            saved_modules["position"] = None
        elif kind != "lora":
            # Only the names of the weights are used, so they have no data.
            weights = from_megatron(name, torch.empty(shapes[name], device="meta"), model)
            # The name of a weight ends in the name of its module and `weight`, such as
            # model.norm.weight.
            saved_modules |= {key.split(".")[-2]: None for key in weights}
    embedding_is_tied = model.tie_embeddings and "embed_tokens" in saved_modules
    if embedding_is_tied:
        saved_modules["lm_head"] = None

    targets: str | list[str] = _NO_TARGETS
    if extension.adds_lora:
        targets = [f"{target}_proj" for target in extension.lora_targets]
    # JSON as peft writes it: 16 instead of 16.0.
    alpha = extension.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_directory),
        "inference_mode": True,
        "r": extension.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "modules_to_save": list(saved_modules) or None,
        "ensure_weight_tying": embedding_is_tied,
    }
