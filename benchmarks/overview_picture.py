"""Plot the README's figure from committed records: the gains of TAPE and of signed increments.

    python -m benchmarks.overview_picture

writes `docs/overview.png`. The records are in `benchmarks/results/comparisons/`;
`docs/reproductions.md` lists the commands that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tape import command_line
from megatron_tape.evaluation.comparison_file import FinishedRun, read_comparison
from megatron_tape.evaluation.figures import ENCODING_COLORS
from megatron_tape.io.files import atomic_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORDS = Path(__file__).parent / "results" / "comparisons"
ROPE = ENCODING_COLORS["rope"]
TAPE = ENCODING_COLORS["tape"]
NEUTRAL = "0.45"
LENGTHS = {512: "512\n(trained)", 1024: "1,024\n(2×)", 2048: "2,048\n(4×)"}
"""Tick labels by length in tokens."""
BLANKS = {"dense": "8", "IID": "16\n(trained)", "sparse": "32"}
"""Tick labels by the name of the group in the record. A label is the group's number of blanks."""
INCREMENTS = "position_increments=signed"
"""The setting as it is named in the record."""
CHANCE = 1 / 8
"""Accuracy of random guesses among eight symbols."""


def main(argv: list[str] | None = None) -> None:
    """Plot both panels and save them as a PNG."""
    # Here, since matplotlib takes long to import and is optional.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    parser = command_line.Parser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/overview.png"), help="the PNG to write"
    )
    output = parser.parse_args(argv).output
    with matplotlib.rc_context(
        {
            "font.size": 17,
            "axes.titlesize": 19,
            "axes.titleweight": "bold",
            "axes.titlepad": 14,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure = Figure(figsize=(16, 6.4), layout=ConstrainedLayoutEngine(w_pad=0.2, wspace=0.06))
        left, right = figure.subplots(1, 2)
        draw_losses(left)
        draw_copying(right)
        with atomic_output(output, overwrite=True) as file:
            figure.savefig(file, format="png", dpi=100, facecolor="white")
    print(f"{output}: written")


def draw_losses(axes: Axes) -> None:
    """Plot the loss of language models at the trained length and beyond it.

    Places of texts and limits of axes are for the data of the committed records.
    """
    rope = draw_line(axes, scores("language_512", "rope", "loss", LENGTHS), ROPE)
    tape = draw_line(axes, scores("language_512", "tape", "loss", LENGTHS), TAPE)
    yarn = [scores("language_512_yarn", name, "loss", LENGTHS) for name in ("rope", "tape")]
    # RoPE and TAPE are equal with YaRN, so one line shows the mean of both.
    draw_line(axes, np.concatenate(yarn), NEUTRAL, linestyle=":")

    axes.text(1.5, 4.14, "RoPE", color=ROPE, ha="right", va="bottom", weight="bold")
    axes.text(1.55, 3.91, "TAPE", color=TAPE, va="top", weight="bold")
    axes.text(2, 3.64, "both with YaRN", color=NEUTRAL, ha="right", va="bottom")
    # Arrows from RoPE to TAPE at two and four times the trained length, with the difference.
    for place in (1, 2):
        axes.annotate(
            "",
            (place + 0.07, tape[place]),
            (place + 0.07, rope[place]),
            arrowprops={"arrowstyle": "->"},
        )
        # `annotate` draws only the arrow, so that its label can stand next to its middle.
        middle = (tape[place] + rope[place]) / 2
        axes.text(place + 0.1, middle + 0.04, f"−{rope[place] - tape[place]:.2f}")

    axes.set_xticks(range(len(LENGTHS)), list(LENGTHS.values()))
    axes.set(xlim=(-0.15, 2.35), ylim=(3.4, 4.42), ylabel="loss (nats per token)")
    axes.set_xlabel("tokens of context (dots: three seeds)")
    axes.set_title(
        "Beyond the trained length, TAPE's loss\nrises less than RoPE's; with YaRN neither rises"
    )


def draw_copying(axes: Axes) -> None:
    """Plot the copying accuracy with the trained number of blanks, with fewer and with more.

    Places of texts and limits of axes are for the data of the committed records.
    """
    # RoPE and TAPE have almost equal values, so their lines are shifted apart.
    for variant, name, color, shift in (
        ("rope", "RoPE", ROPE, -0.012),
        ("tape", "TAPE", TAPE, 0.012),
    ):
        plain = scores("selective_copy", variant, "accuracy", BLANKS)
        signed = scores("selective_copy", f"{variant}+{INCREMENTS}", "accuracy", BLANKS)
        draw_line(axes, plain, color, shift=shift)
        draw_line(axes, signed, color, linestyle="--", shift=shift)
        axes.text(2.06, 0.215 - 4.2 * shift, name, color=color, weight="bold", va="center")
    explanation = "signed increments:\na token's content sets\nits step in position"
    axes.text(2.36, 0.955, explanation, ha="right", va="top", fontsize="small", linespacing=1.25)
    axes.text(0.36, 0.60, "without\nincrements", ha="right", va="center")
    axes.axhline(CHANCE, color=NEUTRAL, linestyle=":", linewidth=1.5)
    axes.text(1, CHANCE - 0.015, "guessing", color=NEUTRAL, ha="center", va="top")
    axes.set_xticks(range(len(BLANKS)), list(BLANKS.values()))
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set(xlim=(-0.15, 2.35), ylim=(0, 1.14), ylabel="symbols copied correctly")
    axes.set_xlabel("blanks among 16 symbols (dots: three seeds)")
    axes.set_title("With signed increments, both also copy\namong half and twice the blanks")


def scores(record: str, variant: str, metric: str, columns: Iterable[int | str]) -> np.ndarray:
    """Return the scores (seeds, columns) of `metric` that the runs of `variant` have in a record.

    `record` is the record's file name without .json. A column is a length or a group.
    """
    runs = read_comparison(RECORDS / f"{record}.json").runs
    return np.array(
        [
            [single_score(run, metric, column) for column in columns]
            for run in runs
            if run.variant == variant
        ]
    )


def single_score(run: FinishedRun, metric: str, column: int | str) -> float:
    """Return a run's only score of a metric at a length or in a group. Raises ValueError unless
    there is exactly one.
    """
    (score_value,) = (
        score.value
        for score in run.scores
        if score.metric == metric and column in (score.length, score.group)
    )
    return score_value


def draw_line(
    axes: Axes, values: np.ndarray, color: str, linestyle: str = "-", shift: float = 0
) -> np.ndarray:
    """Plot the mean of `values` (seeds, columns) as a line and each seed as a dot; return the means
    (columns,).

    `shift` moves the line to the right, so that lines with equal values stay visible.
    """
    means = values.mean(axis=0)
    positions = np.arange(len(means)) + shift
    axes.plot(positions, means, color=color, linestyle=linestyle, linewidth=3.5)
    for seed in values:
        axes.plot(positions, seed, "o", color=color, markersize=7, alpha=0.6, markeredgewidth=0)
    return means


if __name__ == "__main__":
    command_line.run(main)
