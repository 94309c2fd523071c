"""Export the trained parameters of a run as an adapter in peft's format, together with its base
model.

LoRA layers become peft's; other trained parameters become `modules_to_save`. An adapter contains no
settings of the positional encoding. Therefore the base model has the run's settings, and TAPE's
code if the run uses TAPE.
"""

import os
from pathlib import Path

import torch

from megatron_tape import command_line
from megatron_tape.checkpoint.saved_settings import model_differences
from megatron_tape.config.sections import as_dict
from megatron_tape.errors import CheckpointError, FileError, UserError
from megatron_tape.huggingface.export.model_card import ExportOptions, write_adapter_card
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.export.to_transformers import (
    DTYPES,
    NO_TOKENIZER,
    new_export,
    open_exportable,
    part_shapes,
    write_json,
    write_model,
)
from megatron_tape.huggingface.imports.config_json import (
    Changes,
    errors_of_settings,
    model_settings,
    read_settings,
)
from megatron_tape.huggingface.imports.weight_files import open_directory
from megatron_tape.huggingface.tensor_files import on_meta
from megatron_tape.io.files import atomic_directory, sync_directory
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.weights import from_megatron

BASE = "base"
"""Default directory of the base model, within the adapter's directory."""
SUPPORTED_KINDS = ("lora", "embeddings", "output", "norms", "position")
"""Kinds of trained parameters that an adapter can contain."""
_PREFIX = "base_model.model."
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# peft's value for an adapter without LoRA layers.
_NO_TARGETS = "dummy-target-modules"
_WITHOUT_EFFECT = (
    "seq_length",
    "vocab_size",
    "unpadded_vocab_size",
    "attention_backend",
    "init_std",
    "position.mlp_zero",
)
"""Settings in which an existing base model may differ from the run."""


def export_adapter(
    checkpoint: str | Path,
    output: str | Path,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    base: str | Path | None = None,
    average: bool = False,
    overwrite: bool = False,
) -> None:
    """Export the trained parameters of a run to the directory `output`, for
    `PeftModel.from_pretrained`.

    `base` is the directory of the base model in the format of transformers, by default
    `output`/base; it is written if it does not exist. As in peft, the adapter refers to it by the
    path given here. The other arguments are those of `to_transformers.export`. Raises UserError or
    OSError if an adapter cannot contain a trained parameter, or if an existing `base` is another
    model.
    """
    if base is not None and Path(os.path.abspath(base)).is_relative_to(os.path.abspath(output)):
        problem = f"is {base}, which is inside the adapter's directory {output}"
        raise UserError("--base", problem, "give a directory elsewhere, or omit it")
    with new_export(output, overwrite) as directory:
        saved = open_exportable(checkpoint, average)
        if other := [name for name in saved.trained if kind_of(name) not in SUPPORTED_KINDS]:
            supported = "LoRA layers, embeddings, norms and TAPE's matrices"
            problem = (
                f"has the trained parameter {other[0]}, but an adapter can contain only {supported}"
            )
            raise CheckpointError(
                str(saved.path), problem, "omit --adapter to export the whole model"
            )
        base_path = Path(output) / BASE if base is None else Path(base)
        if base is not None and base_path.exists():
            if tokenizer not in (None, NO_TOKENIZER):
                raise UserError(
                    "--tokenizer", f"is for a new base model, but --base {base} exists", "omit it"
                )
            rows = _check_base(saved, base_path)
        else:
            new = directory / BASE if base is None else base_path
            rows = _write_base(saved, new, dtype, tokenizer)
        _write_tensors(saved, directory / "adapter_model.safetensors", rows, DTYPES[dtype])
        write_json(directory / "adapter_config.json", _adapter_config(saved, base_path))
        shown = BASE if base is None else base_path.resolve().name
        write_adapter_card(directory, Path(output).resolve().name, saved, dtype, shown)
        for file in directory.iterdir():
            sync_directory(file)
    command_line.log(
        f"exported the trained parameters of {saved.path} to {output}, an adapter of {base_path}"
    )


def _write_base(saved: SavedWeights, path: Path, dtype: str, tokenizer: str | None) -> int:
    """Export the model without LoRA layers to `path`, and return its number of embedding rows."""
    with atomic_directory(path) as directory:
        write_model(saved, directory, ExportOptions(path.name, dtype, tokenizer, with_lora=False))
    return read_settings(path / "config.json")["vocab_size"]


def _check_base(saved: SavedWeights, base: Path) -> int:
    """Check that `base` has the run's settings and frozen weights, and return its number of
    embedding rows.

    Weights may differ by rounding to bf16. Raises UserError if it is another model.
    """
    path = base / "config.json"
    model = saved.model
    settings = read_settings(path)
    mixing = getattr(model.position, "token_mixing", "full")
    with errors_of_settings(path):
        found = model_settings(settings, path, Changes(token_mixing=mixing))
    fix = "omit --base to export the base model as well"
    if differences := model_differences(
        as_dict(model), as_dict(found), _WITHOUT_EFFECT, ("run", "base")
    ):
        raise FileError(
            str(base), f"is another model than that of {saved.path} ({'; '.join(differences)})", fix
        )
    rows = found.vocab_size
    trained = set(saved.trained)
    if rows > model.vocab_size:
        problem = f"has {rows} embedding rows, but the run's model has only {model.vocab_size}"
        raise FileError(str(base), problem, fix)
    weights = open_directory(base, allow_pickle=False)
    with command_line.step(f"comparing the frozen weights with those of {base}"):
        for name in parameter_shapes(model):
            for key, part in (
                from_megatron(name, saved.read(name), model).items() if name not in trained else ()
            ):
                part = part[:rows] if key in (_EMBEDDING, _HEAD) else part
                other = weights[key].float() if key in weights else None
                if (
                    other is None
                    or other.shape != part.shape
                    or not torch.allclose(part, other, 2**-7, 1e-6)
                ):
                    problem = (
                        f"has other values of {key} than {saved.path}, although the run did not"
                        " train it"
                    )
                    raise FileError(str(base), problem, fix)
    return rows


def _write_tensors(saved: SavedWeights, path: Path, rows: int, dtype: torch.dtype) -> None:
    """Write all trained parameters with peft's names; a tied embedding is written under both of its
    names.
    """
    shapes = parameter_shapes(saved.model, saved.extension)
    shared = saved.model.tie_embeddings

    def peft_keys(key: str) -> list[str]:
        return [_PREFIX + key, *([_PREFIX + _HEAD] if shared and key == _EMBEDDING else [])]

    written = {}
    for name in saved.trained:
        for key, shape in part_shapes(saved.model, name, shapes[name], rows).items():
            written |= dict.fromkeys(peft_keys(key), shape)
    tensors = (
        part[: written[peft_key][0]]
        for name in saved.trained
        for key, part in saved.parts(name, with_lora=False).items()
        for peft_key in peft_keys(key)
    )
    write_safetensors(path, on_meta(written, dtype), tensors, {"format": "pt"})


def _adapter_config(saved: SavedWeights, base: Path) -> dict:
    model = saved.model
    extension = saved.extension
    modules = []
    for name in saved.trained:
        if kind_of(name) != "lora":
            for key in from_megatron(
                name, torch.empty(parameter_shapes(model)[name], device="meta"), model
            ):
                # Save all of a layer's TAPE matrices as one module, since the MLP also has a module
                # up_proj.
                modules.append("position" if kind_of(name) == "position" else key.split(".")[-2])
    shared = model.tie_embeddings and "embed_tokens" in modules
    modules += ["lm_head"] if shared else []
    if extension.adds_lora:
        targets = [f"{target}_proj" for target in extension.lora_targets]
    else:
        targets = _NO_TARGETS
    alpha = extension.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": extension.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "modules_to_save": list(dict.fromkeys(modules)) or None,
        "ensure_weight_tying": shared,
    }
