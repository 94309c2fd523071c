"""Compare what a model computes in training with what an inference engine computes, and name the
likely cause of a difference.

The training side is `PlainModel` in float64, with the settings and weights of the training. Its
weights are read a layer at a time and before the engine is loaded, so that the whole model is in
memory only once.

Axes: P compared tokens, V vocabulary, C hidden size.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tape import command_line
from megatron_tape.config.schema import ModelConfig
from megatron_tape.errors import FileError, UserError
from megatron_tape.huggingface.verification.causes import Cause, causes, find_cause, other_settings
from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.position_record import check_config, check_record
from megatron_tape.huggingface.verification.report import Check, Report
from megatron_tape.huggingface.verification.rounding import (
    Precision,
    allowed_error,
    logits_or_logprobs,
    relative_errors,
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
    vocab_size_of,
)
from megatron_tape.ops.backends import AVERAGE, ROTATION
from megatron_tape.position import encoding_of

EVERY_TOKEN = 8192
"""Default of the largest position of a sequence whose tokens are all read."""
_FAULTY_TOKENS = 512
"""Longest sequence without gaps that faulty models read whole."""
_SAMPLED_TOKENS = 64
"""Number of tokens at which the error of plain torch is measured, besides the compared ones."""


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
        return encoding.needs <= {ROTATION, AVERAGE} and not encoding.sums_over_tokens

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
        exact_normalized = logits_or_logprobs(exact.logits, True)
        rounded_normalized = logits_or_logprobs(rounded.logits, True)
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
        expected = logits_or_logprobs(reference.exact.logits, is_normalized)
        plain_error = reference.error
        if is_normalized:
            plain_error = reference.error_normalized
        allowed = allowed_error(plain_error, precision)
        errors = relative_errors(outputs.logits, expected)
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
            plain_error = max(relative_errors(rounded.hidden_states[layer], expected))
            allowed = allowed_error(plain_error, failure.precision)
            errors = relative_errors(found[layer], expected)
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
        if len(sequence.ids) > _FAULTY_TOKENS and not sequence.has_gaps:
            sequence = sequence.until(check.differences[0])
        found = failure.outputs.logits[: len(sequence.compared)]
        tried: set[str] = set()

        def error_of(logits: Tensor) -> float:
            """Return the largest error of an engine, if `logits` were expected."""
            return max(relative_errors(found, logits_or_logprobs(logits, failure.is_normalized)))

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
    return max(relative_errors(rounded, exact)) * scale.item()
