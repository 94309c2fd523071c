"""Compare what a model computes in training with what an inference engine computes, and name the
likely cause of a difference.

The training side is `PlainModel` in float64, with the settings and weights of the training. Its
weights are read a layer at a time and before the engine is loaded, so that the whole model is in
memory only once.

Axes: P compared tokens, V vocabulary, C hidden size.
"""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import CheckpointError, FileError, UserError, one_line
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.verification.causes import Cause, causes, find_cause, other_settings
from megatron_tape.huggingface.verification.phases import (
    LayerPositions,
    layer_differences,
    measured_phases,
    phase_errors,
)
from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.position_record import (
    PositionRecord,
    check_config,
    check_record,
    record_of,
)
from megatron_tape.huggingface.verification.sequences import (
    GROUP,
    Outputs,
    Sequence,
    default_positions,
    every_token,
    groups_of_tokens,
)
from megatron_tape.huggingface.verification.trained import (
    Trained,
    check_sizes,
    described_by,
    different_weight,
    trained_by,
    vocab_size_of,
)
from megatron_tape.huggingface.verification.transformers_engine import (
    LayerStates,
    TransformersEngine,
)
from megatron_tape.ops.backends import AVERAGE, ROTATION
from megatron_tape.position import encoding_of

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVERY_TOKEN = 8192
"""Default of the largest position of a sequence whose tokens are all read."""
_SHORT = 512
"""The same in the short form of a verification. Faulty models read longer sequences without gaps
only up to the first difference."""
_FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Smallest allowed error by the precision of the computation, as a share of the largest logit."""
_SAMPLED_TOKENS = 64
"""Number of tokens at which the error of plain torch is measured, besides the compared ones."""
_ERROR_FACTOR = 2.0
"""An engine may have this many times the error of plain torch."""


@dataclass(frozen=True)
class Check:
    """A row of the table: the errors of one way to compute the compared tokens."""

    name: str
    positions: list[int]
    errors: list[float]
    """By position; infinite for NaN."""
    allowed: list[float]
    """The largest errors that rounding explains, by position."""
    layer: int | None = None
    """The first layer (from 0) that differs, if layers were compared and one differs."""

    @property
    def is_equal(self) -> bool:
        """Whether no error exceeds what is allowed."""
        return not self.differences

    @property
    def differences(self) -> list[int]:
        """The positions whose errors exceed what is allowed."""
        rows = zip(self.positions, self.errors, self.allowed, strict=True)
        return [position for position, error, allowed in rows if error > allowed]


@dataclass(frozen=True)
class Report:
    """The result of a verification."""

    title: str
    """What was compared with what."""
    checks: list[Check]
    notes: list[str]
    """Sentences about what was not compared, and why."""
    problems: list[str]
    """Sentences about differences that are no errors at positions."""
    difference: str = ""
    """A sentence about the first layer and position that differ, if any does."""
    cause: str = ""
    """A sentence about the likely cause of the difference."""

    @property
    def is_equal(self) -> bool:
        """Whether all checks have passed, and there are no other problems."""
        return not self.problems and all(check.is_equal for check in self.checks)

    def text(self) -> str:
        """Return the report as lines of text, with a table."""
        lines = [self.title, *self._table(), *self.notes]
        if self.is_equal:
            lines.append("Equal: all differences are within what rounding explains.")
        lines += [f"DIFFERENT: {problem}" for problem in self.problems]
        if self.difference:
            lines += [f"DIFFERENT: {self.difference}", f"Likely cause: {self.cause}"]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return the lines of the table. Its columns are positions."""
        positions = sorted({p for check in self.checks for p in check.positions})
        header = [f"{position:,}" for position in positions]
        rows = [["position", *header, "allowed", ""]]
        for check in self.checks:
            errors = dict(zip(check.positions, check.errors, strict=True))
            shown = [f"{errors[p]:.0e}" if p in errors else "-" for p in positions]
            allowed = f"{max(check.allowed):.0e}"
            verdict = "equal" if check.is_equal else "DIFFERENT"
            rows.append([check.name, *shown, allowed, verdict])

        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for first, *others in rows:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return lines


class Precision(NamedTuple):
    """The precision of an engine."""

    computation: torch.dtype
    weights: torch.dtype
    """The dtype to which the trained weights were rounded."""


class Reference(NamedTuple):
    """What plain torch computes for a sequence, with which engines are compared."""

    exact: Outputs
    """In float64."""
    rounded: Outputs
    """In the precision of an engine."""
    error: float
    """The largest error of the logits in this precision, also at other tokens than those that are
    compared, as a share of the largest logit of those."""
    error_normalized: float
    """The same of the logarithms of probabilities."""


class _Failure(NamedTuple):
    """The first check that failed, with what is needed to explain it."""

    check: Check
    sequence: Sequence
    outputs: Outputs
    precision: Precision
    is_normalized: bool
    passed_otherwise: bool
    """Whether the same tokens, read in another way, have passed."""


class Verification:
    """The comparison of a trained model with engines."""

    def __init__(self, trained: Trained, positions: Collection[int] = (), title: str = ""):
        """Prepare the comparison at 0 and `positions`; default: `default_positions`."""
        self.trained = trained
        self.title = title
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.problems: list[str] = []
        model = trained.model
        self.positions = sorted({0, *positions})
        if not positions:
            self.positions = default_positions(model.seq_length)
        self.vocab_size = model.unpadded_vocab_size or model.vocab_size
        """Tokens have ids below this number."""
        self.directory: Path | None = None
        """What the engine reads (see `read_directory`)."""
        self.described: ModelConfig | None = None
        """The settings in its config.json, as this project understands them, if it does."""
        self.layer_difference = ""
        """A sentence about the first layer whose phases or window differ in the engine."""
        self._failure: _Failure | None = None
        self._equal: set[tuple[Sequence, Precision]] = set()
        """Sequences of which at least one check has passed."""
        self._references: dict[tuple[Sequence, Precision], Reference] = {}
        """The results of `reference`."""
        # Positions that are drawn from a range depend on the length of longer sequences.
        if encoding_of(model).token_positions(1, None) is not None:
            self._keep_positions_below(model.seq_length, "longer texts change all their positions")

    @cached_property
    def depends_on_positions_alone(self) -> bool:
        """Whether the model depends on the positions of tokens, and not on their number, so that
        sequences may have gaps.
        """
        encoding = encoding_of(self.trained.model)
        increments = getattr(self.trained.model.position, "increments", "fixed")
        return encoding.needs <= {ROTATION, AVERAGE} and increments == "fixed"

    def short_sequence(self, beyond_windows: bool) -> Sequence:
        """Return the short sequence with a group of tokens at each position. With `beyond_windows`,
        it begins with more tokens than a window has.
        """
        first = GROUP
        window = self.trained.model.sliding_window
        if beyond_windows and window is not None:
            # Tokens after the last position are not compared.
            first = min(window, EVERY_TOKEN, self.positions[-1]) + GROUP
        return groups_of_tokens(self.positions, self.vocab_size, first)

    def whole_sequence(self, largest: int) -> Sequence:
        """Return the sequence of all tokens up to the last position to compare, or up to the
        position `largest` if that is smaller. The last token is compared, too.
        """
        positions = [position for position in self.positions if position < largest]
        # Otherwise, only position 0 may be left, where all encodings compute the same.
        if self.positions[-1] >= largest:
            positions.append(largest)
        return every_token(positions, self.vocab_size)

    def read_directory(self, directory: Path) -> None:
        """Read the config.json and positions.json of the model that an engine reads. Call this
        before any sequence is made.

        Raises FileError if it is another model than the trained one.
        """
        if self.directory == directory:
            return
        self.directory = directory
        # An export has no rows for ids that its tokenizer does not have.
        self.vocab_size = min(self.vocab_size, vocab_size_of(directory))
        # The settings explain a difference. An engine may know some that this project does not.
        with suppress(UserError):
            self.described = described_by(directory).model
        if self.described is not None:
            check_sizes(self.trained, self.described, directory)

        try:
            check_config(directory)
            check_record(directory, self.trained.model)
        except FileError as error:
            self.problems.append(f"{error}.")

    def _keep_positions_below(self, length: int, reason: str) -> None:
        """Do not compare positions from `length` on; note the reason."""
        kept = [position for position in self.positions if position < length]
        if kept != self.positions:
            self.notes.append(f"Positions from {length:,} on are not compared: {reason}.")
        self.positions = kept

    def reference(self, sequence: Sequence, precision: Precision) -> Reference:
        """Return what plain torch computes for a sequence. It is computed once.

        Raises UserError if logits are NaN or infinite.
        """
        key = sequence, precision
        if key not in self._references:
            self._references[key] = self._make_reference(sequence, precision)
        return self._references[key]

    def _make_reference(self, sequence: Sequence, precision: Precision) -> Reference:
        """Compute the result of `reference`."""
        sampled = _with_sample(sequence)
        exact = self._run(sampled, torch.float64, precision.weights)
        rounded = self._run(sampled, precision.computation, precision.weights)
        for outputs in (exact, rounded):
            if not outputs.logits.isfinite().all():
                raise UserError(
                    self.trained.name,
                    "has logits that are NaN or infinite in plain torch",
                    "choose a checkpoint before the training diverged",
                )

        rows = [sampled.compared.index(index) for index in sequence.compared]
        error = _rounding(exact.logits, rounded.logits, rows)
        exact_normalized = _normalized(exact.logits, True)
        rounded_normalized = _normalized(rounded.logits, True)
        error_normalized = _rounding(exact_normalized, rounded_normalized, rows)
        return Reference(_of_rows(exact, rows), _of_rows(rounded, rows), error, error_normalized)

    def _run(self, sequence: Sequence, dtype: torch.dtype, rounded_to: torch.dtype) -> Outputs:
        """Return what plain torch computes in `dtype`, and show the progress."""
        model = self.trained.model
        plain = PlainModel(model, self.trained.weights, dtype, rounded_to)
        progress = command_line.Progress(model.num_layers)
        name = f"plain torch, {str(dtype).removeprefix('torch.')}"

        def show(layer: int) -> None:
            """Show that the layers before `layer` are computed."""
            progress.update(layer, lambda seconds: f"{name}: layer {layer} of {model.num_layers}")

        try:
            return plain.run(sequence, show)
        finally:
            progress.end()

    def add(
        self,
        name: str,
        sequence: Sequence,
        outputs: Outputs,
        precision: Precision,
        is_normalized: bool = False,
    ) -> None:
        """Add a check of what an engine has computed for a sequence.

        With `is_normalized`, `outputs.logits` are logarithms of probabilities.
        """
        reference = self.reference(sequence, precision)
        expected = _normalized(reference.exact.logits, is_normalized)
        plain_error = reference.error
        if is_normalized:
            plain_error = reference.error_normalized
        allowed = _allowed(plain_error, precision)
        errors = _errors(outputs.logits, expected)
        check = Check(name, sequence.compared_positions, errors, [allowed] * len(errors))
        self.checks.append(check)
        key = sequence, precision
        if check.is_equal:
            self._equal.add(key)
        elif self._failure is None:
            self._failure = _Failure(
                check,
                sequence,
                outputs,
                precision,
                is_normalized,
                passed_otherwise=key in self._equal,
            )

    def report(self) -> Report:
        """Return the report. If a check has failed, find the cause."""
        if any(check.positions != self.positions for check in self.checks):
            self.notes.append("- stands for positions that were not read.")
        report = Report(self.title, self.checks, self.notes, self.problems)
        failure = self._failure
        if failure is not None:
            difference = self._first_difference(failure)
            return replace(report, difference=difference, cause=self._cause(failure))

        # Checks without logits have no failure that faulty models could explain.
        different = [check for check in self.checks if not check.is_equal]
        if not different:
            return report
        check = different[0]
        difference = f"{check.name}: first at position {check.differences[0]:,}"
        if check.layer is not None:
            difference += f"; layer {check.layer} is the first that differs"
        cause = self.layer_difference
        if not cause:
            cause = "unknown, since the logits of the other checks are equal."
        return replace(report, difference=f"{difference}.", cause=cause)

    def _first_difference(self, failure: _Failure) -> str:
        """Return the sentence about the first layer and position that differ."""
        check = failure.check
        place = f"{check.name}: first at position {check.differences[0]:,}"
        found = failure.outputs.hidden_states
        if found is None:
            return f"{place}. This engine shows only logits, so the layer is unknown."

        reference = self.reference(failure.sequence, failure.precision)
        exact = reference.exact
        rounded = reference.rounded
        assert exact.hidden_states is not None and rounded.hidden_states is not None
        for layer, expected in enumerate(exact.hidden_states):
            plain_error = max(_errors(rounded.hidden_states[layer], expected))
            allowed = _allowed(plain_error, failure.precision)
            errors = _errors(found[layer], expected)
            for position, error in zip(check.positions, errors, strict=True):
                if error > allowed:
                    return f"{place}; layer {layer} is the first that differs, at {position:,}."
        return f"{place}, after the last layer."

    def _cause(self, failure: _Failure) -> str:
        """Return the sentence about the likely cause of a failed check."""
        check = failure.check
        way = "the way in which the tokens are read, since another way gives equal logits"
        model = self.trained.model
        candidates = [*causes(model), *other_settings(model, self.described)]
        # The token at position 0 attends to nothing else.
        if check.differences[0] == 0:
            if failure.passed_otherwise:
                return f"{way}; look at the mask of padding."
            if self.directory is not None and self.described is not None:
                name = different_weight(self.trained, self.directory)
                if name is not None:
                    return f"the weights differ from those of the training, first in {name}."
            candidates = list(other_settings(model, self.described))

        sentence = self._explanation(failure, candidates)
        if sentence is not None:
            return f"{sentence}."
        if failure.passed_otherwise:
            return f"{way}; look at the cache, or at the mask of padding."
        if check.differences[0] == 0:
            return (
                "not the positions, since the token at position 0 differs, too; compare the weights"
                " and the other settings."
            )
        return "none of the known faults computes these logits."

    def _explanation(self, failure: _Failure, candidates: list[Cause]) -> str | None:
        """Return the sentence of the fault that explains a failed check best, or None."""
        check = failure.check
        sequence = failure.sequence
        # Each fault would take long. With gaps, this would save little, and windows of different
        # sizes may agree at the first position.
        if len(sequence.ids) > _SHORT and not sequence.has_gaps:
            sequence = sequence.until(check.differences[0])
        found = failure.outputs.logits[: len(sequence.compared)]
        tried: set[str] = set()

        def error_of(logits: Tensor) -> float:
            """Return the largest error of an engine, if `logits` were expected."""
            return max(_errors(found, _normalized(logits, failure.is_normalized)))

        def show(cause: str) -> None:
            """Show a fault before it is tried. Some have several variants."""
            if cause not in tried:
                tried.add(cause)
                command_line.log(f"trying: {cause}")

        return find_cause(
            candidates,
            self.trained.model,
            self.trained.weights,
            sequence,
            error_of,
            max(check.allowed),
            failure.precision.weights,
            show,
        )


def _with_sample(sequence: Sequence) -> Sequence:
    """Return the sequence with more compared tokens, evenly spaced.

    In models with a few large activations, the errors of tokens differ by an order of magnitude, so
    that the compared tokens alone would not show how large they may be.
    """
    sample = torch.linspace(0, len(sequence.ids) - 1, _SAMPLED_TOKENS).long().tolist()
    compared = tuple(sorted({*sequence.compared, *sample}))
    return Sequence(sequence.ids, sequence.positions, compared)


def _of_rows(outputs: Outputs, rows: list[int]) -> Outputs:
    """Return the outputs of some of the compared tokens."""
    assert outputs.hidden_states is not None
    return Outputs(outputs.logits[rows], outputs.hidden_states[:, rows])


def _rounding(exact: Tensor, rounded: Tensor, rows: list[int]) -> float:
    """Return the largest error of `rounded` (N, V), as a share of the largest expected number in
    some `rows`.
    """
    scale = exact.abs().max() / exact[rows].abs().max().clamp(min=1e-30)
    return max(_errors(rounded, exact)) * scale.item()


def _normalized(logits: Tensor, is_normalized: bool) -> Tensor:
    """Return logits (P, V), or the logarithms of their probabilities, in float64."""
    logits = logits.double()
    if is_normalized:
        logits = logits.log_softmax(-1)
    return logits


def _allowed(plain_error: float, precision: Precision) -> float:
    """Return the largest error that rounding explains, given that of plain torch."""
    return max(_ERROR_FACTOR * plain_error, _FLOORS[precision.computation])


def _errors(found: Tensor, expected: Tensor) -> list[float]:
    """Return the error of each row of `found` (P, N), as a share of the largest expected number.

    Rows may have padding at the end. The error of a row with NaN or infinite numbers is infinite.
    """
    width = min(found.shape[-1], expected.shape[-1])
    expected = expected[..., :width].double()
    found = found[..., :width].double()
    differences = (found - expected).abs().amax(-1)
    errors = differences / expected.abs().max().clamp(min=1e-30)
    return [error if math.isfinite(error) else math.inf for error in errors.tolist()]


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
        whole_up_to=_SHORT,
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
    errors = [math.inf if p >= min(sizes) else 0.0 for p in verification.positions]
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
            errors = list(map(max, errors, _errors(state, expected)))
            plain_errors.extend(_errors(in_plain, expected))
        by_layer.append(errors)

    engine.layer_by_layer(sequence, compare)
    allowed = _allowed(max(plain_errors), precision)
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
