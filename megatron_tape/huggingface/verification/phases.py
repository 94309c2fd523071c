"""The positions that a loaded model of transformers really uses, compared with those of its
training.

Axes: P positions, H query heads, G key/value heads, D head dimension, R rotated elements of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tape.errors import FileError
from megatron_tape.huggingface.imports.config_json import ENCODED, PHI3
from megatron_tape.huggingface.verification.position_record import (
    NO_ROTATION,
    POSITIONS,
    LayerRecord,
    PositionRecord,
    read_positions,
    tolerances,
)
from megatron_tape.text import counted

OWN_TYPES = ("tape", ENCODED)
"""The values of `model_type` of this project's own classes."""
_ATTENTION = "tape_record_keys"
"""Name under which transformers knows the attention function that records keys."""
_SEED = 2606
"""Of the random embeddings."""


@dataclass(frozen=True)
class LayerPositions:
    """The positions that one layer of a model uses."""

    phases: Tensor | None
    """The complex numbers by which queries and keys are multiplied, [real parts | imaginary parts],
    float32 (P, R), on the CPU. None if the layer has no state to rotate by.

    In layers whose phases depend on the tokens' content, they are those of random inputs and of the
    first key/value head. A number is NaN if the keys are zero, so that it cannot be measured.
    """
    window: int | None
    """Number of tokens to which a token attends, itself included. None if they are all."""
    dtype: torch.dtype
    """The dtype in which the model computed, which limits the precision of `phases`."""


def check_loaded(model: Any, directory: Path) -> None:
    """Raise FileError if the positions of a loaded model of transformers, with the weights in
    `directory`, are not those of its training. Without a record in `directory`, nothing is checked.

    The model runs once, over as many tokens as the record has positions.
    """
    record = read_positions(directory)
    if record is None:
        return
    measured = measured_phases(model, record.positions)
    num_layers = len(record.layers)
    if len(measured) != num_layers:
        raise FileError(
            directory,
            f"has {len(measured)} layers in transformers, but {num_layers} in the training",
            f"export the model again, or delete {POSITIONS} to use it nevertheless",
        )

    differences = layer_differences(record, measured)
    if differences:
        raise _error(directory, differences)


def layer_differences(record: PositionRecord, measured: list[LayerPositions]) -> dict[int, str]:
    """Return how layers differ from the record, by layer (from 0), as clauses that continue
    "layer 0". Layers that do not differ are missing.
    """
    differences = {}
    for layer, (found, expected) in enumerate(zip(measured, record.layers, strict=True)):
        difference = _difference(record, expected, found)
        if difference is not None:
            differences[layer] = difference
    return differences


def _error(directory: Path, differences: dict[int, str]) -> FileError:
    """Return the error about a model whose layers (from 0) have these differences."""
    import transformers

    first = min(differences)
    problem = (
        f"has other positions in this version of transformers ({transformers.__version__}) than in"
        f" the training: layer {first} (counted from 0) {differences[first]}"
    )
    if len(differences) > 1:
        problem += f"; in all, {len(differences)} layers differ"
    fix = (
        f"use another version of transformers, or delete {POSITIONS} to use the model nevertheless"
    )
    return FileError(directory, problem, fix)


def _difference(record: PositionRecord, expected: LayerRecord, found: LayerPositions) -> str | None:
    """Return how a layer differs from the record, as a clause that continues "layer 0"; None if it
    does not.
    """
    window = expected["window"]
    if found.window != window:
        return f"has {_window(found.window)} instead of {_window(window)}"

    compared = _compared(record, expected, found)
    if compared is None:
        return None
    phases, target = compared
    tolerances_P1 = _tolerances(record, found)[:, None]

    if expected["phases"] == NO_ROTATION:
        if _exceeds(phases - target, tolerances_P1).any():
            return "rotates queries and keys, but has no positions in the training"
        return None
    if phases.shape != target.shape:
        return f"rotates {phases.shape[1]} elements of a head instead of {target.shape[1]}"
    return _wrong_phases(phases, target, tolerances_P1, record.positions)


def phase_errors(
    record: PositionRecord, measured: list[LayerPositions]
) -> tuple[list[float], list[float]] | None:
    """Return the largest difference between measured phases and those of the record at each
    position, and what rounding explains there. None if no phases are known.
    """
    # -1 remains if no layer is compared.
    errors = torch.full((len(record.positions),), -1.0)
    allowed = torch.zeros(len(record.positions))
    for found, expected in zip(measured, record.layers, strict=True):
        compared = _compared(record, expected, found)
        if compared is None:
            continue
        phases, target = compared
        if phases.shape != target.shape:
            layer_errors = torch.full_like(errors, torch.inf)
        else:
            differences = (phases - target).abs()
            # Those of keys that are zero could not be measured.
            layer_errors = differences.nan_to_num(0).amax(-1)
        factor = _complex(target).abs().max().clamp(min=1)
        layer_allowed = _tolerances(record, found) * factor
        errors = errors.maximum(layer_errors)
        allowed = allowed.maximum(layer_allowed)
    if (errors < 0).any():
        return None
    return errors.tolist(), allowed.tolist()


def _compared(
    record: PositionRecord, expected: LayerRecord, found: LayerPositions
) -> tuple[Tensor, Tensor] | None:
    """Return the measured phases of a layer and those of the record, both (P, R); None if the
    record does not know them, or the layer rightly has no state. R differs if the layer rotates
    more or fewer elements of a head than in the training.
    """
    name = expected["phases"]
    phases = found.phases
    # Phases that depend on the tokens' content are not in the record.
    if name is None or (name == NO_ROTATION and phases is None):
        return None
    if name == NO_ROTATION:
        return phases, _unrotated_like(phases)

    target = torch.tensor(record.phases[name], dtype=torch.float32)
    if phases is None:
        return _unrotated_like(target), target
    if phases.shape[1] > target.shape[1]:
        return phases, target

    # Phi-3 does not compute what it does not rotate. In the record, this has the phase 1.
    computed = phases.shape[1] // 2
    parts = target.unflatten(1, (2, -1))
    others = parts[..., computed:].flatten(1)
    if torch.equal(others, _unrotated_like(others)):
        target = parts[..., :computed].flatten(1)
    return phases, target


def _tolerances(record: PositionRecord, found: LayerPositions) -> Tensor:
    """Return by how much measured phases of modulus 1 may differ at each position (P)."""
    return tolerances(record.positions) + 4 * torch.finfo(found.dtype).eps


def _wrong_phases(
    phases: Tensor, target: Tensor, tolerances_P1: Tensor, positions: list[int]
) -> str | None:
    """Return how phases (P, R) at `positions` differ from `target` (P, R), as a clause; None if
    they do not.
    """
    factors = _complex(phases).abs()
    target_factors = _complex(target).abs()
    tolerances_P1 = tolerances_P1 * target_factors.max().clamp(min=1)
    wrong = _exceeds(phases - target, tolerances_P1)
    if not wrong.any():
        return None
    if not _exceeds(phases - _unrotated_like(phases), tolerances_P1).any():
        return "does not rotate queries and keys"

    clauses = []
    wrong_angles = wrong
    mean = factors.nanmean()
    target_mean = target_factors.mean()
    # Rounded phases have other factors, too, but the same mean.
    if (mean - target_mean).abs() > 0.001 * target_mean:
        factor = f"{mean:.4g} instead of {target_mean:.4g}"
        clauses.append(f"multiplies queries and keys by {factor}")
        # The directions of the complex numbers tell whether angles differ, too.
        directions = _complex(phases) / factors
        target_directions = _complex(target) / target_factors
        wrong_angles = _exceeds(directions - target_directions, tolerances_P1)
    if wrong_angles.any():
        wrong_rows = wrong_angles.any(dim=1).nonzero()
        first = positions[int(wrong_rows[0])]
        clauses.append(f"rotates queries and keys by other angles from position {first} on")
    return " and ".join(clauses)


def _exceeds(differences: Tensor, tolerances_P1: Tensor) -> Tensor:
    """Return which differences, (P, R) or complex (P, R/2), are too large. Those that could not be
    measured (NaN) are not.
    """
    return differences.abs() > tolerances_P1


def _unrotated_like(phases: Tensor) -> Tensor:
    """Return the phases (P, R) of no rotation: 1 everywhere."""
    real, imaginary = phases.chunk(2, dim=-1)
    return torch.cat([torch.ones_like(real), torch.zeros_like(imaginary)], dim=-1)


def _window(window: int | None) -> str:
    """Return a window as a noun with its size."""
    if window is None:
        return "no window"
    return f"a window of {counted(window, 'token')}"


@torch.no_grad()
def measured_phases(model: Any, positions: Sequence[int]) -> list[LayerPositions]:
    """Return the positions that each layer of a causal language model of transformers uses at the
    ascending `positions` (P).

    Supports Llama, Mistral, Qwen2, Qwen3, SmolLM3, Phi-3 and this project's exports. The model runs
    once over P random embeddings, and is not changed. In architectures of transformers, the phases
    are the ratio of the rotated keys, which attention receives, to those before the rotation, and
    the window is the one that attention is told. Those of this project's own classes are the inputs
    of their attention.
    """
    measured: dict[int, LayerPositions] = {}
    recording = _recorded_keys
    if model.config.model_type in OWN_TYPES:
        recording = _recorded_states

    P = len(positions)
    generator = torch.Generator().manual_seed(_SEED)
    # Not embeddings of tokens, since the row of a padding token may be zero.
    embeddings = torch.randn((1, P, model.config.hidden_size), generator=generator)
    inputs = {
        "inputs_embeds": embeddings.to(model.dtype),
        "position_ids": torch.tensor([list(positions)]),
        # Without a mask, transformers would read gaps between positions as packed sequences.
        "attention_mask": torch.ones(1, P, dtype=torch.int64),
    }
    on_device = {name: value.to(model.device) for name, value in inputs.items()}
    with recording(model, measured):
        model.base_model(use_cache=False, **on_device)
    return [measured[layer] for layer in sorted(measured)]


@contextmanager
def _recorded_states(model: Any, measured: dict[int, LayerPositions]) -> Iterator[None]:
    """Within the context, forward passes of this project's classes write what attention receives to
    `measured`, by layer.
    """

    def record(attention: Any, arguments: tuple) -> None:
        """Record the inputs of the attention of one layer."""
        state = arguments[1]
        window = None
        # TAPE's classes give the state (1, P, G, D), the others an encoding's `PositionInputs`.
        if not isinstance(state, Tensor):
            window = attention.config.window_of(attention.layer_idx)
            state = state.z_TBGD
            if state is not None:
                state = state.transpose(0, 1)
        phases = None
        dtype = arguments[0].dtype
        if state is not None:
            phases = state[0, :, 0].float().cpu()
            dtype = state.dtype
        measured[attention.layer_idx] = LayerPositions(phases, window, dtype)

    with ExitStack() as hooks:
        for layer in model.base_model.layers:
            hooks.callback(layer.self_attn.register_forward_pre_hook(record).remove)
        yield


@contextmanager
def _recorded_keys(model: Any, measured: dict[int, LayerPositions]) -> Iterator[None]:
    """Within the context, forward passes of a model of transformers write the phases of keys to
    `measured`, by layer. Attention returns zeros.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config
    G = config.num_key_value_heads
    # Phi-3 may rotate only the first elements of a head.
    R = 2 * model.base_model.rotary_emb.inv_freq.numel()
    unrotated: dict[int, Tensor] = {}

    def keep(module: Any, arguments: tuple, output: Tensor) -> None:
        """Keep the keys before the rotation, (1, P, G, D)."""
        keys = output
        if config.model_type == PHI3:
            H = config.num_attention_heads
            # Queries, keys and values.
            heads = output.unflatten(-1, (H + 2 * G, -1))
            keys = heads[:, :, H : H + G]
        unrotated[layer_by_module[module]] = keys.reshape(1, keys.shape[1], G, -1)

    def attend(module: Any, query: Tensor, key: Tensor, *_: Any, **options: Any) -> tuple:
        """Record the rotated keys (1, G, P, D), and return zeros instead of averages."""
        layer = module.layer_idx
        rotated_PGD = key.transpose(1, 2)[0]
        keys_PGD = unrotated[layer][0]
        phases = _ratio(rotated_PGD[..., :R], keys_PGD[..., :R])
        window = options.get("sliding_window")
        measured[layer] = LayerPositions(phases.cpu(), window, key.dtype)
        return torch.zeros_like(query).transpose(1, 2), None

    layer_by_module = {}
    for layer in model.base_model.layers:
        layer_by_module[_key_module(layer.self_attn)] = layer.self_attn.layer_idx
    implementation = config._attn_implementation
    with ExitStack() as hooks:
        for module in layer_by_module:
            hooks.callback(module.register_forward_hook(keep).remove)
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = attend
        hooks.callback(ALL_ATTENTION_FUNCTIONS.pop, _ATTENTION)
        config._attn_implementation = _ATTENTION
        hooks.callback(setattr, config, "_attn_implementation", implementation)
        yield


def _key_module(attention: Any) -> Any:
    """Return the module of an attention layer that computes the keys before the rotation."""
    # The norm, if there is one, follows the projection. Phi-3 projects queries, keys and values at
    # once.
    names = [name for name in ("k_norm", "k_proj", "qkv_proj") if hasattr(attention, name)]
    return getattr(attention, names[0])


def _ratio(rotated_PGR: Tensor, keys_PGR: Tensor) -> Tensor:
    """Return the complex numbers (P, R) by which keys were multiplied, the same for all heads:
    those with the smallest sum of squared errors.
    """
    rotated = _complex(rotated_PGR)
    keys = _complex(keys_PGR)
    products = rotated * keys.conj()
    squares = keys.abs().square()
    ratio = products.sum(dim=1) / squares.sum(dim=1)
    return torch.cat([ratio.real, ratio.imag], dim=-1)


def _complex(x: Tensor) -> Tensor:
    """Return [real | imaginary] (..., R) as complex numbers (..., R/2) in float32 precision."""
    real, imaginary = x.float().chunk(2, dim=-1)
    return torch.complex(real, imaginary)
