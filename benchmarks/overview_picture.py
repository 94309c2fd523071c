"""Plot the README's figure from committed records: the gains of TAPE and of signed increments.

    python -m benchmarks.overview_picture

writes `docs/overview.png`. The records are in `benchmarks/results/comparisons/`;
`docs/reproductions.md` lists the commands that wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
BLANKS = {"dense": "8", "IID": "16\n(trained)", "sparse": "32"}
"""Tick labels, numbers of blanks, by the name of the group in the record."""
INCREMENTS = "position_increments=signed"
"""The setting as it is named in the record."""
CHANCE = 1 / 8
"""Accuracy of random guesses among eight symbols."""


def main(argv: list[str] | None = None) -> None:
    """Plot both panels and save them as a PNG."""
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
    """Plot the loss of language models at the trained length and beyond it."""
    means = {}
    for variant, color in (("rope", ROPE), ("tape", TAPE)):
        values = scores("language_512", variant, "loss", [(length, None) for length in LENGTHS])
        means[variant] = draw_line(axes, values, color)
    yarn = [
        scores("language_512_yarn", variant, "loss", [(length, None) for length in LENGTHS])
        for variant in ("rope", "tape")
    ]
    draw_line(axes, np.concatenate(yarn), NEUTRAL, linestyle=":")
    rope = means["rope"]
    tape = means["tape"]
    axes.text(1.5, 4.14, "RoPE", color=ROPE, ha="right", va="bottom", weight="bold")
    axes.text(1.55, 3.91, "TAPE", color=TAPE, va="top", weight="bold")
    axes.text(2, 3.64, "both with YaRN", color=NEUTRAL, ha="right", va="bottom")
    for place in (1, 2):
        axes.annotate(
            "",
            (place + 0.07, tape[place]),
            (place + 0.07, rope[place]),
            arrowprops={"arrowstyle": "->"},
        )
        axes.text(
            place + 0.1, (tape[place] + rope[place]) / 2 + 0.04, f"−{rope[place] - tape[place]:.2f}"
        )
    axes.set_xticks(range(len(LENGTHS)), list(LENGTHS.values()))
    axes.set(xlim=(-0.15, 2.35), ylim=(3.4, 4.42), ylabel="loss (nats per token)")
    axes.set_xlabel("tokens of context (dots: three seeds)")
    axes.set_title(
        "Beyond the trained length, TAPE's loss\nrises less than RoPE's; with YaRN neither rises"
    )


def draw_copying(axes: Axes) -> None:
    """Plot the copying accuracy with the trained number of blanks, with fewer and with more."""
    for variant, color, shift in (("rope", ROPE, -0.012), ("tape", TAPE, 0.012)):
        for suffix, linestyle in (("", "-"), (f"+{INCREMENTS}", "--")):
            values = scores(
                "selective_copy", variant + suffix, "accuracy", [(None, group) for group in BLANKS]
            )
            draw_line(axes, values, color, linestyle=linestyle, shift=shift)
        axes.text(
            2.06,
            0.215 - 4.2 * shift,
            {"rope": "RoPE", "tape": "TAPE"}[variant],
            color=color,
            weight="bold",
            va="center",
        )
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


def scores(
    record: str, variant: str, metric: str, columns: Sequence[tuple[int | None, str | None]]
) -> np.ndarray:
    """Return a variant's scores (seeds, columns) in a record; a column selects a length, a group,
    or both.
    """
    runs = [
        run for run in read_comparison(RECORDS / f"{record}.json").runs if run.variant == variant
    ]
    if len(runs) != 3:
        raise ValueError(
            f"{record}.json has {len(runs)} runs of {variant}, but the picture's label says three"
            " seeds"
        )

    def value(run: FinishedRun, length: int | None, group: str | None) -> float:
        (score,) = (
            score
            for score in run.scores
            if score.metric == metric
            and length in (None, score.length)
            and group in (None, score.group)
        )
        return score.value

    return np.array([[value(run, *column) for column in columns] for run in runs])


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
