"""What the demo shows in the end: how its models learn, what the extension changes, and which models copy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tape.io.files import atomic_output
from megatron_tape.run.curves import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT, EXTENDED = 256, 1024
"""Of the recipes."""
COPYING = {
    "RoPE": "rope",
    "TAPE": "tape",
    "RoPE, signed increments": "rope+position_increments=signed",
    "TAPE, signed increments": "tape+position_increments=signed",
}
"""What copies: names, and what `pretrain.compare` calls them."""
BLANKS = {"dense": "8 blanks", "IID": "16 blanks (as trained)", "sparse": "32 blanks"}
CHANCE = 1 / 8
"""Of guessing one of the copied symbols."""
Runs = dict[str, Run]
"""Runs by model."""
ByPosition = dict[str, dict[str, tuple[list[float], list[float]]]]
"""Positions and losses there, by when it was (before or after the extension) and model."""
Copied = dict[str, dict[str, float]]
"""Share of symbols that are copied rightly, by what copies and the blanks among them."""
STYLES = {"TAPE": {"color": "tab:red"}, "RoPE": {"color": "tab:blue", "linestyle": "--"}}
PLACES = 8
"""Stretches of positions over which the middle panel averages."""


def write_picture(runs: Runs, by_position: ByPosition, copied: Copied, path: Path) -> None:
    """Plot how both models learn, what the extension changes, and who copies among other numbers of blanks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2))
    left, middle, right = figure.subplots(1, 3)
    for name, run in runs.items():
        validation = run.curve("validation_loss")
        left.plot(validation.steps, validation.values, **STYLES[name], marker="o", label=name)
    title = "Training on Python's standard library\n(one seed each: no ranking)"
    left.set(xlabel="step", ylabel="validation loss (nats per token)", title=title)
    for name in runs:
        middle.plot(*gained(by_position, name), **STYLES[name], marker="o", label=name)
    middle.axvline(CONTEXT, color="gray", linestyle=":")
    middle.axhline(0, color="gray", linewidth=1)
    title = f"Extension from {CONTEXT} to {EXTENDED:,} tokens"
    middle.set(xlabel="position", ylabel="loss before minus after (nats per token)", title=title)
    plot_copying(right, copied)
    for axes in (left, middle):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    with atomic_output(path, overwrite=True) as file:
        figure.savefig(file, format="png", dpi=110)


def gained(by_position: ByPosition, name: str) -> tuple[list[float], list[float]]:
    """Return positions, and by how much the extension has lowered the loss there, averaged over stretches."""
    (positions, before), (_, after) = (map(np.array, by_position[when][name]) for when in ("before", "after"))
    parts = np.array_split(np.arange(len(positions)), min(PLACES, len(positions)))
    return [positions[part].mean() for part in parts], [(before - after)[part].mean() for part in parts]


def plot_copying(axes: Axes, copied: Copied) -> None:
    """Plot bars: a group for each number of blanks, a bar for each encoding."""
    colors = ("tab:blue", "tab:red", "lightskyblue", "lightcoral")
    groups = list(next(iter(copied.values())))
    width = 0.8 / len(copied)
    for number, (name, shares) in enumerate(copied.items()):
        places = [place + (number - (len(copied) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, [shares[group] for group in groups], width, color=colors[number], label=name)
    axes.axhline(CHANCE, color="gray", linestyle=":")
    axes.set_xticks(range(len(groups)), [BLANKS[group] for group in groups])
    axes.set(
        ylim=(0, 1.45),
        ylabel="symbols copied rightly (dotted: guessing)",
        title="Copying 16 symbols from among blanks\n(trained on 16 blanks only)",
    )
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(fontsize="small", loc="upper center", ncols=2)


def write_summary(runs: Runs, by_position: ByPosition, copied: Copied, steps: int, path: Path) -> None:
    """Write what came out as Markdown tables; the models that copy were trained for `steps` steps."""
    lines = [
        "# Demo",
        "",
        "## Training",
        "",
        "| position encoding | steps | training loss | validation loss | perplexity |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        # A loss that was not finite is not among them.
        loss, validation = ((run.curve(key).last or (0, math.nan))[1] for key in ("loss", "validation_loss"))
        perplexity = math.exp(min(validation, 700))
        lines.append(f"| {name} | {run.last['step']} | {loss:.4f} | {validation:.4f} | {perplexity:.2f} |")
    lines += [
        "",
        "One small model, one seed and a few minutes of training: the losses show that both encodings learn, not which",
        "is better.",
        "",
        f"## Extension from {CONTEXT} to {EXTENDED:,} tokens",
        "",
        "Positions are divided by four. Trained are LoRA layers, embeddings and norms, and TAPE's matrices.",
        "The loss on text held out, before (the model as it was, positions not divided) and after. A part of the gain",
        "may come from training further, whatever the positions:",
        "",
        f"| position encoding | to token {CONTEXT}: before | after | {CONTEXT + 1} to {EXTENDED:,}: before | after |",
        "|---|---|---|---|---|",
    ]
    for name in runs:
        means = []
        for early in (True, False):
            for when in ("before", "after"):
                positions, losses = map(np.array, by_position[when][name])
                means.append(losses[(positions <= CONTEXT) == early].mean())
        lines.append(f"| {name} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    lines += [
        "",
        "## Copying",
        "",
        f"Small models (2 layers, 64 wide, {steps} steps) copy 16 symbols that stand among 16 blanks, and then among",
        "fewer and more, which they never saw.",
        f"The share of symbols that are right; guessing gives {CHANCE:.3f}:",
        "",
        "| position encoding | " + " | ".join(BLANKS[group] for group in next(iter(copied.values()))) + " |",
        "|---|---|---|---|",
    ]
    for name, shares in copied.items():
        lines.append(f"| {name} | " + " | ".join(f"{share:.3f}" for share in shares.values()) + " |")
    lines += [
        "",
        "With signed increments (model.position_increments: signed) the content decides how far each token moves the",
        "position, forward or back, so that blanks need not count. TAPE alone, which changes positions in every layer,",
        "gains nothing here; docs/reproductions.md has more tasks and seeds.",
        "",
        "![demo](demo.png)",
        "",
        "All results: [report.html](report.html)",
        "",
    ]
    with atomic_output(path, "w", overwrite=True) as file:
        file.write("\n".join(lines))
