"""Plot the results of the demo: training losses, the effect of the context extension, and copying
accuracy.

    python -m pretrain.demo_picture runs/demo

writes runs/demo/demo.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tape import command_line
from megatron_tape.evaluation.comparison_file import NAME, read_comparison
from megatron_tape.evaluation.figures import variant_styles
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.tasks import group_names
from megatron_tape.io.files import atomic_output
from megatron_tape.run.curves import read_run
from megatron_tape.run.metrics import VALIDATION_LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = variant_styles(["tape", "rope"])
MODELS["tape"]["label"] = "TAPE"
# RoPE is drawn last, so TAPE's solid line stays visible where both are equal.
MODELS["rope"] |= {"label": "RoPE", "linestyle": "--"}
CONTEXT = 256
EXTENDED = 1024
"""Context lengths in tokens before and after the extension, as in the recipes."""
COPYING = {
    "rope": "RoPE",
    "tape": "TAPE",
    "rope+increments=signed": "RoPE, signed increments",
    "tape+increments=signed": "TAPE, signed increments",
}
"""Labels of the variants in the right panel."""
CHANCE = 1 / 8
"""Accuracy of random guesses among the eight symbols."""
POSITION_RANGES = 8
"""Number of ranges of positions in the middle panel; each point is the mean over one range."""


def main(argv: list[str] | None = None) -> None:
    """Plot the three panels and save them as demo.png."""
    from matplotlib.figure import Figure

    parser = command_line.Parser(description=__doc__)
    parser.add_argument("directory", type=Path, help="directory of the demo's runs")
    directory = parser.parse_args(argv).directory
    figure = Figure(figsize=(14, 4.2))
    left, middle, right = figure.subplots(1, 3)
    plot_training(left, directory)
    plot_extension(middle, directory)
    plot_copying(right, directory)
    for axes in (left, middle):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    with atomic_output(directory / "demo.png", overwrite=True) as file:
        figure.savefig(file, format="png", dpi=110)


def plot_training(axes: Axes, directory: Path) -> None:
    """Plot the validation loss of TAPE and RoPE over the training steps."""
    for name, style in MODELS.items():
        losses = read_run(directory / name).curve(VALIDATION_LOSS)
        axes.plot(losses.steps, losses.values, **style)
    axes.set(
        xlabel="step",
        ylabel="validation loss (nats per token)",
        title="Training on Python's standard library\n(one seed each: no ranking)",
    )


def plot_extension(axes: Axes, directory: Path) -> None:
    """Plot how much the extension lowers the loss at each position."""
    for name, style in MODELS.items():
        positions, before = _loss_by_position(directory / name)
        _, after = _loss_by_position(directory / f"{name}-{EXTENDED}")
        ranges = min(POSITION_RANGES, len(positions))
        x = [part.mean() for part in np.array_split(positions, ranges)]
        gain = [part.mean() for part in np.array_split(before - after, ranges)]
        axes.plot(x, gain, **style)
    axes.axvline(CONTEXT, color="gray", linestyle=":")
    axes.axhline(0, color="gray", linewidth=1)
    axes.set(
        xlabel="position",
        ylabel="loss before minus after (nats per token)",
        title=f"Extension from {CONTEXT} to {EXTENDED:,} tokens",
    )


def _loss_by_position(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return positions (P,) and the losses (P,) of held-out text at them, for the newest evaluated
    step of a run.
    """
    newest = max((run / "evaluation").glob("step-*"))
    (losses,) = read_results(newest).tasks["perplexity"].details["loss_by_position"].values()
    return np.array(losses["tokens_before"]), np.array(losses["loss"])


def plot_copying(axes: Axes, directory: Path) -> None:
    """Plot the copying accuracy: one group of bars per number of blanks, one bar per variant."""
    comparison = read_comparison(directory / "copying" / NAME)
    # How many blanks the 16 symbols are mixed with, by the name of the group in the file.
    blanks = group_names("selective_copy", comparison.evaluation["selective_copy"])
    accuracies = {
        (run.variant, score.group): score.value
        for run in comparison.runs
        for score in run.scores
        if score.metric == "accuracy"
    }

    width = 0.8 / len(COPYING)
    styles = variant_styles(COPYING)
    for number, (variant, label) in enumerate(COPYING.items()):
        centers = np.arange(len(blanks)) + (number - (len(COPYING) - 1) / 2) * width
        heights = [accuracies[variant, group] for group in blanks]
        axes.bar(
            centers,
            heights,
            width,
            color=styles[variant]["color"],
            label=label,
        )

    axes.axhline(CHANCE, color="gray", linestyle=":")
    axes.set_xticks(range(len(blanks)), blanks.values())
    axes.set(
        # Room for the legend above the bars.
        ylim=(0, 1.45),
        ylabel="symbols copied correctly (dotted: guessing)",
        title="Copying 16 symbols from among blanks\n(trained on 16 blanks only)",
    )
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(fontsize="small", loc="upper center", ncols=2)


if __name__ == "__main__":
    command_line.run(main)
