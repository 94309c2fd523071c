"""How far runs are, how fast, and their curves side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.report.tables import Table, enumerated, number, table, text
from megatron_tape.evaluation.task import Drawing, Picture
from megatron_tape.run.curves import DURING, MOST_CURVES, Run

_SHOWN_POINTS = 300
"""Points of a curve; a longer one is drawn as means over consecutive points."""
_NAMES = {"loss": "training loss", "validation_loss": "validation loss", "lr": "learning rate"}
_LENGTH = re.compile("[0-9]{1,12}")


def runs_table(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table of how far each run is, how low its losses are, and how fast it was."""
    rows = []
    for label, run in runs.items():
        validation, planned = run.curve("validation_loss").last, run.settings.get("train", {}).get("steps", "unknown")
        losses = [number(run.curve("loss").recent, 4), number(validation and validation[1], 4)]
        speeds = [number(run.curve(metric).median) for metric in ("tokens_per_second", "tflops_per_second")]
        steps = [number(run.last.get("step"), 0, f"of {planned}"), number(run.last.get("tokens"), 0)]
        rows.append([text(label), *steps, *losses, *speeds])
    columns = ("run", "steps", "tokens", "training loss, last 5 %", "validation loss, last", "tokens/s", "TFLOP/s")
    return table("Losses in nats per token, and medians of the speeds of all processes together", columns, rows)


def curves(runs: Mapping[str, Run]) -> tuple[list[Drawing], list[str]]:
    """Return the drawing of each metric that a run has logged twice, with a panel a length, and what is not shown."""
    shown = dict(islice(runs.items(), figures.MOST_MODELS))
    keys = sorted({key for run in shown.values() for key, curve in run.curves.items() if len(curve.steps) > 1})
    stems: dict[str, list[str]] = {key: [key] for key in _NAMES if key in keys}
    for key in keys:
        stem, _, length = key.rpartition("/")
        if key.startswith(DURING):
            stems.setdefault(stem if _LENGTH.fullmatch(length) else key, []).append(key)
    limits = figures.limits((figures.MOST_MODELS, len(runs), "runs"), (figures.MOST_PICTURES, len(stems), "metrics"))
    cut = [label for label, run in shown.items() if len(run.curves) == MOST_CURVES]
    limits += [f"Of {enumerated(cut)}, only the first {MOST_CURVES} metrics are read."] if cut else []
    return list(islice(_drawings(shown, stems), figures.MOST_PICTURES)), limits


def _drawings(runs: Mapping[str, Run], stems: Mapping[str, list[str]]) -> Iterator[Drawing]:
    for stem, keys in stems.items():
        name = _NAMES.get(stem, ", ".join(stem.removeprefix(DURING).split("/")))
        yield name, partial(_draw, runs, name, keys)


def _draw(runs: Mapping[str, Run], name: str, keys: list[str]) -> list[Picture]:
    figure, shown = figures.panels(len(keys), width=4.6)
    looks, last = figures.styles(runs), []
    for axes, key in zip(shown, keys):
        length = key.rpartition("/")[2]
        at = f" at {int(length):,} tokens" if _LENGTH.fullmatch(length) else ""
        for label, run in runs.items():
            if (curve := run.curve(key)).last is not None:
                axes.plot(thinned(curve.steps), thinned(curve.values), **looks[label] | {"marker": ""})
                last.append(f"{label} {curve.last[1]:.4g}{at}")
        axes.set(xlabel="step", ylabel=figures.plain(name, figures.LONGEST_AXIS_LABEL))
        axes.set_title(at.strip(), fontsize=10)
    figures.legend(figure)
    return [Picture("curve", f"{name.capitalize()} by step; at the end, {enumerated(last)}.", figure)]


def thinned(values: Sequence[float]) -> np.ndarray:
    """Return at most `_SHOWN_POINTS` values, each the mean over consecutive ones."""
    return np.array([part.mean() for part in np.array_split(np.asarray(values), min(len(values), _SHOWN_POINTS))])
