"""Write models in transformers format with the scaling of --rope-scaling."""

from dataclasses import replace
from pathlib import Path

from megatron_tape.checkpoint.directories import read_state
from megatron_tape.checkpoint.locate import find_checkpoint
from megatron_tape.extension.rope_scaling import RopeScaling
from megatron_tape.huggingface.export.model_card import ExportOptions
from megatron_tape.huggingface.export.remote_code import AUTO_MAP, ENCODED_AUTO_MAP
from megatron_tape.huggingface.export.to_transformers import (
    DTYPES,
    huggingface_config,
    new_export,
    open_exportable,
    write_json,
    write_model,
)
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.verification.position_record import (
    POSITIONS,
    check_config,
    record_of,
    write_positions,
)
from megatron_tape.huggingface.verification.transformers_checks import verify_export
from megatron_tape.position import model_config

_CONFIG = "config.json"
_SCALED_KEYS = (
    "max_position_embeddings",
    "position_settings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Keys of config.json that depend on the scaling."""


def export_scaled(
    scaling: RopeScaling,
    checkpoint: str | Path,
    output: str | Path,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    average: bool = False,
    overwrite: bool = False,
    verify: bool = False,
) -> Path:
    """Export a checkpoint with scaled positions; return the checkpoint's path.

    The other arguments and errors are those of `to_transformers.export`. Also raises ConfigError,
    before any weights are read, if the model cannot have the scaling.
    """
    # `open_exportable` reads the whole checkpoint to compare checksums.
    path = find_checkpoint(checkpoint, deep=False)
    scaling.scaled(model_config(read_state(path)["config"]["model"]), path)

    # The card shows this name; `directory` has a temporary name.
    name = Path(output).resolve().name
    with new_export(output, overwrite) as directory:
        saved = open_exportable(checkpoint, average)
        scaled = replace(saved, model=scaling.scaled(saved.model, saved.path))
        # The card shows no results, since those of the run are without the scaling.
        write_model(scaled, directory, ExportOptions(name, dtype, tokenizer))
        if verify:
            verify_export(scaled, directory, DTYPES[dtype])
    return saved.path


def link_scaled(scaling: RopeScaling, source: Path, output: Path) -> None:
    """Create the directory `output` with the model of `source`, a directory in transformers format,
    and scaled positions.

    Only config.json and positions.json are written; all other files are symbolic links to those of
    `source`. Raises ConfigError if the model cannot have the scaling, and FileError if `source` has
    a positions.json that differs from its config.json.
    """
    check_config(source)
    settings = read_settings(source / _CONFIG)
    scaled = scaling.scaled_transformers_model(settings, source)
    # Number of rows and dtype do not matter, since no key that depends on them is used.
    exported = huggingface_config(scaled, rows=scaled.vocab_size, dtype="fp32")
    changed = {key: exported[key] for key in _SCALED_KEYS if key in exported}
    # The original length is in rope_parameters. At the top level, transformers prefers it.
    settings.pop("original_max_position_embeddings", None)

    output.mkdir()
    for file in source.resolve().iterdir():
        if file.name not in (_CONFIG, POSITIONS):
            (output / file.name).symlink_to(file)
    settings |= changed
    write_json(output / _CONFIG, settings)
    # Foreign code may rotate elsewhere than where the positions of a loaded model are measured.
    if settings.get("auto_map") in (None, AUTO_MAP, ENCODED_AUTO_MAP):
        write_positions(output, record_of(scaled, settings))
