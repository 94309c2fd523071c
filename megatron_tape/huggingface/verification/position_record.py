"""`positions.json`: how the layers of an exported model compute positions, as in the training.

It has two independent parts. `config` repeats the settings of config.json that determine positions.
`phases` and `layers` are numbers that the training's own code computed from the training's
settings, so that they also show a wrong config.json, or a program that reads it differently.

Axes: P positions, D head dimension.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import TypedDict

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.values import format_value
from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import read_settings
from megatron_tape.huggingface.verification.sequences import default_positions
from megatron_tape.io.records import read_record
from megatron_tape.position import encoding_of
from megatron_tape.position.encoding import NO_CACHE, SingleProcess

POSITIONS = "positions.json"
"""The file in an export."""
CONFIG_KEYS = (
    "head_dim",
    "position_encoding",
    "position_settings",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "position_mlp_size",
    "gate_input",
    "position_state_precision",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "no_rope_layers",
    "no_rope_layer_interval",
    "layers_without_positions",
    "temperature_scale",
    "temperature_floor_scale",
)
"""The keys of config.json that determine positions, of all architectures."""
_REPEATED = {"rope_theta", "rope_scaling"}
"""Keys that repeat parts of rope_parameters for older versions of transformers."""
_ADDED = {"layer_types", "max_window_layers", "use_sliding_window"}
"""Keys that transformers adds; they show in the windows of a loaded model."""
NO_ROTATION = "none"
"""Value of `LayerRecord.phases` for a layer that does not rotate queries and keys."""
_VERSION = 1
_BYTES = 16 << 20
"""Maximum size of a record in bytes. Usual ones have 20 kilobytes."""
_DIGITS = 7
_DELETE = f"or delete {POSITIONS} if the change is intended"


class LayerRecord(TypedDict):
    """The positions of one layer."""

    phases: str | None
    """Key in `PositionRecord.phases`, or NO_ROTATION. None if the phases depend on the tokens'
    content."""
    window: int | None
    """Number of tokens to which a token attends, itself included. None if they are all."""


class _File(TypedDict):
    """The type of the file's contents."""

    format_version: Literal[1]
    positions: list[int]
    config: dict[str, Any]
    phases: dict[str, list[list[float]]]
    layers: list[LayerRecord]


@dataclass(frozen=True)
class PositionRecord:
    """The contents of `positions.json`."""

    positions: list[int]
    """The ascending positions of the phases, P of them."""
    config: dict[str, Any]
    """The values of `CONFIG_KEYS` in config.json; missing keys are missing here, too."""
    phases: dict[str, list[list[float]]]
    """By kind of layer, (P, D): the complex numbers by which queries and keys are multiplied at
    each position, [real parts | imaginary parts]. The kind is `window` for layers with a window if
    they have frequencies of their own, otherwise `full`."""
    layers: list[LayerRecord]
    """The layers, from the first."""


def record_of(
    model: ModelConfig, settings: Mapping[str, Any], positions: Sequence[int] = ()
) -> PositionRecord:
    """Return the record of a model with the training's settings `model`, whose config.json contains
    `settings`, at ascending `positions` (default: `default_positions`).

    The encoding computes the state in float32, as in the training. What depends on the tokens'
    content is unknown here: hidden states and parameters are NaN, and so is every number that
    depends on them.
    """
    encoding = encoding_of(model, SingleProcess())  # type: ignore[arg-type]
    positions = list(positions) or default_positions(model.seq_length)
    # None, or the positions that replace 0, 1, ... in a sequence that ends at the last one.
    table = encoding.token_positions(positions[-1] + 1, None)
    positions_P1 = torch.tensor(positions)[:, None]
    if table is not None:
        positions_P1 = torch.as_tensor(table)[positions_P1]
    unknown_P1C = torch.full((len(positions), 1, model.hidden_size), torch.nan)
    window_phases = encoding.window_phases(positions_P1, torch.float32)
    state = encoding.initial_state(positions_P1, torch.float32)

    phases: dict[str, list[list[float]]] = {}
    layers: list[LayerRecord] = []
    for layer in range(model.num_layers):
        parameters = {
            name: torch.full(parameter.shape, torch.nan)
            for name, parameter in encoding.parameters(layer).items()
        }
        state = encoding.enter(layer, parameters, state, unknown_P1C, NO_CACHE)
        inputs = encoding.position_inputs(layer, parameters, state, unknown_P1C, NO_CACHE)
        kind = "full"
        window = model.window_of(layer)
        if window_phases is not None and window is not None and model.has_positions(layer):
            kind = "window"
            inputs = encoding.inputs_in_window(inputs, window_phases)

        name: str | None = NO_ROTATION
        if inputs.z_TBGD is not None:
            phases_PD = inputs.z_TBGD[:, 0, 0]
            name = None
            if phases_PD.isfinite().all():
                name = _add(phases, kind, layer, phases_PD.tolist())
        layers.append({"phases": name, "window": window})
        if encoding.updates(layer) and state is not None:
            state = torch.full_like(state, torch.nan)

    config = {key: settings[key] for key in CONFIG_KEYS if key in settings}
    return PositionRecord(positions, config, phases, layers)


def _add(
    phases: dict[str, list[list[float]]], kind: str, layer: int, numbers: list[list[float]]
) -> str:
    """Add the phases (P, D) of a layer, and return their key."""
    # Adding 0 removes the sign of -0.
    rounded = [[round(number, _DIGITS) + 0.0 for number in row] for row in numbers]
    if phases.setdefault(kind, rounded) == rounded:
        return kind
    # A user's encoding may have other frequencies in each layer.
    name = f"layer_{layer}"
    phases[name] = rounded
    return name


def write_positions(directory: Path, record: PositionRecord) -> None:
    """Write `record` to `positions.json` in `directory`. Raises OSError if that is not possible."""
    text = _indented({"format_version": _VERSION, **asdict(record)})
    (directory / POSITIONS).write_text(f"{text}\n", encoding="utf-8")


def _indented(value: Any, indent: str = "") -> str:
    """Return `value` as JSON with one line for each item of a container, except for containers
    of numbers and texts, which take one line.
    """
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    if not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value, allow_nan=False)

    inner = f"{indent} "
    if isinstance(value, dict):
        opening, closing = "{", "}"
        lines = [f"{json.dumps(key)}: {_indented(item, inner)}" for key, item in value.items()]
    else:
        opening, closing = "[", "]"
        lines = [_indented(item, inner) for item in value]
    separator = f",\n{inner}"
    return f"{opening}\n{inner}{separator.join(lines)}\n{indent}{closing}"


def read_positions(directory: Path) -> PositionRecord | None:
    """Return the record in `directory`, or None if it has none.

    Raises FileError if the file is damaged or was written by a later version, and OSError if it
    cannot be read.
    """
    path = directory / POSITIONS
    if not path.exists():
        return None
    content = read_record(path, _File, _BYTES)
    del content["format_version"]
    # Keys that a later version may have added are ignored.
    record = PositionRecord(**{name: content[name] for name in PositionRecord.__annotations__})
    problem = _problem_of(record)
    if problem is not None:
        raise FileError(path, f"cannot be used: {problem}", "export the model again, or delete it")
    return record


def _problem_of(record: PositionRecord) -> str | None:
    """Return why the parts of a record do not belong together; None if they do."""
    positions = record.positions
    if not positions or positions != sorted(set(positions)) or positions[0] < 0:
        return "positions are not ascending numbers from 0 on"
    if positions[-1] >= 1 << 63:
        return f"positions end at {positions[-1]:.3g}"
    for name, rows in record.phases.items():
        widths = {len(row) for row in rows}
        if len(rows) != len(positions) or len(widths) != 1 or min(widths) % 2:
            return (
                f"phases.{name[:40]} does not have as many numbers, and an even one, for each of"
                f" the {len(positions)} positions"
            )
    for layer, of_layer in enumerate(record.layers):
        name = of_layer["phases"]
        if name not in (None, NO_ROTATION, *record.phases):
            return f"layers[{layer}].phases is {name[:40]!r}, which is missing in phases"
    return None


def check_config(directory: Path) -> None:
    """Raise FileError if the config.json in `directory` has other settings of positions than the
    record says. Without a record, nothing is checked.
    """
    record = read_positions(directory)
    if record is None:
        return
    path = directory / "config.json"
    settings = read_settings(path)
    # null stands for a missing key.
    found = {key: settings[key] for key in CONFIG_KEYS if settings.get(key) is not None}
    exported = {key: value for key, value in record.config.items() if value is not None}
    # `save_pretrained` of transformers leaves out and adds keys that have no effect of their own.
    if "rope_parameters" in found:
        for key in _REPEATED - found.keys():
            exported.pop(key, None)
    for key in _ADDED - exported.keys():
        found.pop(key, None)
    problem = _first_change(exported, found, "")
    if problem is not None:
        raise FileError(path, problem, f"export the model again, {_DELETE}")


def tolerances(positions: Sequence[int]) -> torch.Tensor:
    """Return by how much phases of modulus 1 may differ between programs at each position (P)."""
    # Angles are products of positions and frequencies, which other programs may round differently.
    return 1e-4 + 4e-7 * torch.tensor(positions)


def check_record(directory: Path, model: ModelConfig) -> None:
    """Raise FileError if the record in `directory` has other phases or windows than the training of
    a model with the settings `model` computes. Without a record, nothing is checked.
    """
    record = read_positions(directory)
    if record is None:
        return
    expected = record_of(model, {}, record.positions)
    same_windows = [layer["window"] for layer in record.layers] == [
        layer["window"] for layer in expected.layers
    ]
    same_phases = record.phases.keys() == expected.phases.keys()
    allowed_P1 = tolerances(record.positions)[:, None]
    for name in record.phases.keys() & expected.phases.keys():
        found = torch.tensor(record.phases[name])
        of_training = torch.tensor(expected.phases[name])
        if found.shape != of_training.shape or ((found - of_training).abs() > allowed_P1).any():
            same_phases = False
    if not (same_windows and same_phases):
        differing = "phases" if same_windows else "windows"
        raise FileError(
            directory / POSITIONS,
            f"has other {differing} than the model that it is compared with",
            "give the checkpoint that was exported, with --against",
        )


def _first_change(exported: Any, found: Any, key: str) -> str | None:
    """Return the first difference of a value at `key` of config.json from the exported one, as a
    clause; None if there is none.
    """
    if exported == found:
        return None
    if isinstance(exported, dict) and isinstance(found, dict):
        for name in [*exported, *found]:
            path = f"{key}.{name}".removeprefix(".")
            if name not in found:
                return f"has no {path}, but was exported with {format_value(exported[name])}"
            if name not in exported:
                return f"has {path} {format_value(found[name])}, but was exported without it"
            change = _first_change(exported[name], found[name], path)
            if change is not None:
                return change
    if isinstance(exported, list) and isinstance(found, list) and len(exported) == len(found):
        for index, (before, now) in enumerate(zip(exported, found, strict=True)):
            if before != now:
                return _first_change(before, now, f"{key}[{index}]")
    return f"has {key} {format_value(found)}, but was exported with {format_value(exported)}"
