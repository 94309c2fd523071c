"""The checks of transformers: its logits, the phases of its layers, and each layer alone.

Axes: P compared tokens, C hidden size.
"""

import math
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.errors import CheckpointError, one_line
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.verification.phases import (
    LayerPositions,
    layer_differences,
    measured_phases,
    phase_errors,
)
from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.position_record import PositionRecord, record_of
from megatron_tape.huggingface.verification.report import Check
from megatron_tape.huggingface.verification.rounding import (
    PRECISIONS,
    Precision,
    allowed_error,
    relative_errors,
)
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.huggingface.verification.trained import Trained, trained_by
from megatron_tape.huggingface.verification.transformers_engine import (
    LayerStates,
    TransformersEngine,
)
from megatron_tape.huggingface.verification.verify import EVERY_TOKEN, Verification

_EXPORT_TOKENS = 512
"""Largest position of a sequence whose tokens are all read when an export is verified."""


def transformers_version() -> str:
    """Return the version of the installed transformers."""
    return metadata.version("transformers")


def check_transformers(
    verification: Verification,
    directory: Path,
    precision: Precision,
    beyond_windows: bool = True,
    whole_up_to: int = EVERY_TOKEN,
    layers_up_to: int = 0,
    trust_remote_code: bool = False,
) -> None:
    """Add the checks of transformers in one precision.

    Args:
        directory: the model in transformers format.
        beyond_windows: read more tokens than a window has.
        whole_up_to: largest position to compare if the model depends on the number of tokens, so
            that all of them must be read.
        layers_up_to: if above 0, also compare each layer in fp32, in a pass over all tokens up to
            this position or the last one to compare. In bf16, a layer alone has large errors.
        trust_remote_code: run Python files in the directory.
    """
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    name = names[precision.computation]
    verification.read_directory(directory)
    sequence = verification.short_sequence(beyond_windows)
    if not verification.depends_on_positions_alone:
        sequence = verification.whole_sequence(whole_up_to)

    # Before the engine is loaded, so that not both are in memory. `add` reads the result.
    verification.reference(sequence, precision)
    engine = TransformersEngine.load(
        directory, precision.computation, trust_remote_code=trust_remote_code
    )
    _check_phases(verification, engine, name)
    ways = {
        "one pass": engine.one_pass,
        "with a cache, in chunks": engine.in_chunks,
        "left padding in a batch": engine.left_padded,
    }
    for way, run in ways.items():
        try:
            outputs = run(sequence)
        except NotImplementedError as error:
            verification.notes.append(f"Not compared {way}: {one_line(error)}.")
            continue
        verification.add(f"{way}, {name}", sequence, outputs, precision)

    in_fp32 = precision.computation == torch.float32
    if layers_up_to > 0 and in_fp32 and verification.depends_on_positions_alone:
        sequence = verification.whole_sequence(layers_up_to)
        _check_layers(verification, engine, sequence, f"every token, {name}", precision)


def verify_export(saved: SavedWeights, directory: Path, dtype: torch.dtype) -> None:
    """Check that transformers computes what the checkpoint `saved` computes, with its export in
    `directory`, whose weights have been rounded to `dtype`: the short form of a verification.

    Raises CheckpointError if a difference is larger than rounding explains.
    """
    verification = Verification(trained_by(saved), title=f"{saved.path}, exported")
    check_transformers(
        verification,
        directory,
        Precision(torch.float32, dtype),
        beyond_windows=False,
        whole_up_to=_EXPORT_TOKENS,
        trust_remote_code=True,
    )
    report = verification.report()
    if not report.is_equal:
        differences = " ".join([*report.problems, report.difference])
        raise CheckpointError(
            saved.path,
            f"is exported to a model that computes something else in transformers"
            f" {transformers_version()}: {differences} Likely cause: {report.cause}",
            "try another version of transformers, or write the export with --no-verify and run"
            " tape-verify on it",
        )
    largest = max(error for check in report.checks for error in check.errors)
    compared = {position for check in report.checks for position in check.positions}
    positions = ", ".join(f"{position:,}" for position in sorted(compared))
    command_line.log(
        f"verified: transformers computes the logits of the training at positions {positions}"
        f" (largest error {largest:.0e})"
    )


def _check_phases(verification: Verification, engine: TransformersEngine, name: str) -> None:
    """Add a check of the phases by which the layers of an engine rotate, if any are known without
    the tokens, and of the windows, if one differs.
    """
    record = record_of(verification.trained.model, {}, verification.positions)
    measured = measured_phases(engine.model, verification.positions)
    differences = layer_differences(record, measured)
    if differences:
        first = min(differences)
        clause = differences[first]
        verification.layer_difference = f"layer {first} {clause}."
        verification.notes.append(f"Layer {first} {clause} ({name}).")

    _check_windows(verification, record, measured, name)
    # TAPE's own class keeps the state in float32 while it computes in bf16.
    dtypes = {found.dtype for found in measured}
    settings = verification.trained.model.position
    is_fp32 = getattr(settings, "state_precision", "bf16") == "fp32"
    if engine.model.config.model_type == "tape" and is_fp32 and torch.bfloat16 in dtypes:
        verification.problems.append("The position state is in bf16, in the training in fp32.")

    compared = phase_errors(record, measured)
    if compared is not None:
        errors, allowed = compared
        check = Check(f"phases, {name}", verification.positions, errors, allowed)
        verification.checks.append(check)


def _check_windows(
    verification: Verification,
    record: PositionRecord,
    measured: list[LayerPositions],
    name: str,
) -> None:
    """Add a check of the windows if one differs. The logits may not show it, since not all
    sequences are longer.
    """
    differing = []
    for expected, found in zip(record.layers, measured, strict=True):
        if expected["window"] != found.window:
            differing += [expected["window"], found.window]
    sizes = [window for window in differing if window is not None]
    if not sizes:
        return

    # From the smallest size on, tokens attend to others than in the training.
    errors = []
    for position in verification.positions:
        if position >= min(sizes):
            errors.append(math.inf)
        else:
            errors.append(0.0)
    allowed = [0.0] * len(errors)
    check = Check(f"windows, {name}", verification.positions, errors, allowed)
    verification.checks.append(check)


def _check_layers(
    verification: Verification,
    engine: TransformersEngine,
    sequence: Sequence,
    name: str,
    precision: Precision,
) -> None:
    """Add a check of one pass over all tokens of a sequence, in which every layer is compared given
    its input in the engine.

    Plain torch then computes only the compared tokens, which takes a small part of the time of a
    pass.
    """
    exact = _PlainLayers(verification.trained, sequence, torch.float64, precision.weights)
    rounded = _PlainLayers(verification.trained, sequence, precision.computation, precision.weights)
    by_layer: list[list[float]] = []
    plain_errors: list[float] = []

    def compare(layer: int, entering: LayerStates, leaving: LayerStates) -> None:
        """Compare what leaves a layer at the compared tokens."""
        found = [leaving.hidden_states]
        if leaving.position_state is not None:
            found.append(leaving.position_state.flatten(1))
        exact_states = exact.states_after(layer, entering)
        rounded_states = rounded.states_after(layer, entering)

        errors = [0.0] * len(sequence.compared)
        # Not strict: an engine may pass on a state that the layer does not update.
        for state, expected, in_plain in zip(found, exact_states, rounded_states, strict=False):
            errors = list(map(max, errors, relative_errors(state, expected)))
            plain_errors.extend(relative_errors(in_plain, expected))
        by_layer.append(errors)

    engine.layer_by_layer(sequence, compare)
    allowed = allowed_error(max(plain_errors), precision)
    different = [layer for layer, errors in enumerate(by_layer) if max(errors) > allowed]
    check = Check(
        name,
        sequence.compared_positions,
        errors=[max(errors) for errors in zip(*by_layer, strict=True)],
        allowed=[allowed] * len(sequence.compared),
        layer=min(different, default=None),
    )
    verification.checks.append(check)


class _PlainLayers:
    """The layers of plain torch, each given its input in an engine."""

    def __init__(
        self, trained: Trained, sequence: Sequence, dtype: torch.dtype, rounded_to: torch.dtype
    ):
        """Prepare the layers for a sequence. `dtype` and `rounded_to` are those of `PlainModel`."""
        self.plain = PlainModel(trained.model, trained.weights, dtype, rounded_to)
        self.compared = list(sequence.compared)
        # Exports may pass the state that enters the first layer in another form.
        _, self.initial_state, self.shared = self.plain.embedded(sequence)

    def states_after(self, layer: int, entering: LayerStates) -> list[Tensor]:
        """Return what a layer computes for the compared tokens: hidden states (P, C) and, if the
        layer updates it, the position state (P, ...).
        """
        dtype = self.plain.dtype
        state = self.initial_state
        if layer > 0 and entering.position_state is not None:
            state = entering.position_state.to(dtype)[:, None]
        hidden_states = entering.hidden_states.to(dtype)[:, None]

        hidden_states, state = self.plain.run_layer(
            layer, hidden_states, state, self.shared, self.compared
        )
        states = [hidden_states.flatten(1)]
        if self.plain.encoding.updates(layer):
            states.append(state.flatten(1))
        return states
