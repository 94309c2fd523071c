"""The page: what it is made from, its sections in order, and the HTML file that they become.

What runs and results say is data, which is cleaned and escaped where it is shown.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_tape.command_line import Progress
from megatron_tape.errors import FileError
from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import Comparison
from megatron_tape.evaluation.figures import clean, encoding_of, model_encodings, png
from megatron_tape.evaluation.report import comparison_tables
from megatron_tape.evaluation.report.tables import (
    Table,
    comparison_warnings,
    enumerated,
    number,
    score_table,
    table,
    text,
)
from megatron_tape.evaluation.results import NAME, Results, read_results
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import TASKS, title_of
from megatron_tape.run.curves import DURING, METRICS, SETTINGS, Run, read_run
from megatron_tape.run.metrics import (
    LEARNING_RATE,
    LOSS,
    TFLOPS_PER_SECOND,
    TOKENS,
    TOKENS_PER_SECOND,
    VALIDATION_LOSS,
)

_SHOWN_POINTS = 300
"""Points of a curve; a longer one is drawn as means over consecutive points."""
_NAMES = {LOSS: "training loss", VALIDATION_LOSS: "validation loss", LEARNING_RATE: "learning rate"}
_LENGTH = re.compile("[0-9]{1,12}")
Drawing = tuple[str, Callable[[], list[Picture]]]
"""What pictures show, and what draws them."""


@dataclass
class Section:
    """A section of the page."""

    title: str
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """Addresses that hold a whole picture, and what describes it; one that cannot be drawn has no address."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(paths: Iterable[str | Path]) -> tuple[dict[str, Run], dict[str, Results]]:
    """Read runs with their evaluations, results files, and directories of such files; return both by their labels.

    Results are without examples. Raises FileError if something is neither a run nor results, or is damaged, and
    OSError.
    """
    runs: dict[str, Run] = {}
    results: dict[str, Results] = {}
    progress = Progress(None)
    for path in dict.fromkeys(map(Path, paths)):
        is_run, files = _files_of(path)
        if is_run:
            runs[_label(path.resolve().name, path, runs)] = read_run(path)
        for file in files:
            found = read_results(file)
            tasks = {name: replace(task, examples={}) for name, task in found.tasks.items()}
            results[_label(found.label, file.parent, results)] = replace(found, tasks=tasks)
        progress.update(0, lambda _: f"reading {path}")  # noqa: B023
    progress.end()
    return runs, results


def _label(name: str, place: Path, taken: dict[str, Any]) -> str:
    return f"{name} ({place})" if name in taken else name


def _files_of(path: Path) -> tuple[bool, list[Path]]:
    """Return whether a path is a run, and the results files in it."""
    if not path.exists():
        raise FileError(str(path), "does not exist", f"give a run, a {NAME}, or a directory that holds one")
    if not path.is_dir():
        return False, [path]
    is_run = any((path / name).exists() for name in (METRICS, SETTINGS))
    files = sorted(path.glob(f"evaluation/*/{NAME}")) if is_run else []
    files += [path / NAME] if (path / NAME).exists() else []
    if not is_run and not files:
        fix = "give a training run, or the directory into which pretrain.evaluate wrote"
        raise FileError(str(path), f"holds neither {METRICS} nor {NAME}", fix)
    return is_run, files


def page(
    runs: Mapping[str, Run],
    results: Mapping[str, Results],
    comparisons: Sequence[Comparison] = (),
    missing: Sequence[str] = (),
) -> str:
    """Return the HTML file about runs and results by their labels, and about comparisons of variants.

    `missing` names runs of the comparisons that are not finished.
    """
    sections = [section for comparison in comparisons for section in _comparison(comparison, missing)]
    tasks = {name for one in results.values() for name in one.tasks}
    encodings = {label: run.settings.get("model", {}).get("position_encoding") for label, run in runs.items()}
    encodings = {label: encoding_of(one.model.config) for label, one in results.items()} | encodings
    with model_encodings({label: encodings[label] for label in [*runs, *results]}):
        sections += [_task(results, name) for name in sorted(tasks, key=[*TASKS, *sorted(tasks)].index)]
        sections += [Section("Training", runs_table(runs), draw(curves(runs)))] if runs else []
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=_shown, **options)
    return environment.get_template("page.html").render(sections=sections)


def _shown(value: Any) -> Any:
    """Return what the page has of a value: of a text, what can be shown, which is escaped after that."""
    return clean(value) if type(value) is str else value


def draw(drawings: Iterable[Drawing]) -> list[tuple[str, str]]:
    """Return the pictures of drawings; one that cannot be drawn, as values and texts of files decide, is a sentence."""
    found: list[tuple[str, str]] = []
    progress = Progress(None)
    for shows, make in drawings:
        progress.update(0, lambda _: f"drawing {clean(shows)}")  # noqa: B023
        try:
            for picture in make():
                address = Markup(f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}")
                found.append((address, picture.alternative_text))
        except Exception as error:
            sentence = clean(f"The picture of {shows} could not be drawn ({type(error).__name__}: {error}).", 300)
            print(f"warning: {sentence}", file=sys.stderr)
            found.append(("", sentence))
    progress.end()
    return found


def _comparison(comparison: Comparison, missing: Sequence[str]) -> list[Section]:
    tasks, variants = comparison_tables.by_task(comparison), comparison.variants
    notes = comparison_tables.notes(comparison, missing)
    sections = [Section("Comparison", warnings=comparison_tables.warnings(comparison), notes=notes)]
    for task, found in tasks.items():
        pictures = draw([(task, partial(comparison_tables.picture, found, variants))])
        sections.append(Section(title_of(task), comparison_tables.metrics_table(found, comparison.baseline), pictures))
    return sections


def _task(results: Mapping[str, Results], name: str) -> Section:
    results = {label: one for label, one in results.items() if name in one.tasks}
    tasks = {label: one.tasks[name] for label, one in results.items()}
    warnings = comparison_warnings(list(results.values()), name)
    pictures = draw([(name, partial(TASKS[name].draw, tasks))] if name in TASKS else [])
    about: dict[str, list[str]] = {}
    for label, task in tasks.items():
        for note in task.notes:
            about.setdefault(note, []).append(label)
    notes = [note if len(of) == len(tasks) else f"{enumerated(of)}: {note}" for note, of in about.items()]
    return Section(title_of(name), score_table(tasks), pictures, warnings, notes)


def runs_table(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table of how far each run is, how low its losses are, and how fast it was."""
    rows = []
    for label, run in runs.items():
        validation, planned = run.curve(VALIDATION_LOSS).last, run.settings.get("train", {}).get("steps", "unknown")
        losses = [number(run.curve(LOSS).recent, 4), number(validation and validation[1], 4)]
        speeds = [number(run.curve(metric).median) for metric in (TOKENS_PER_SECOND, TFLOPS_PER_SECOND)]
        steps = [number(run.last.get("step"), 0, f"of {planned}"), number(run.last.get(TOKENS), 0)]
        rows.append([text(label), *steps, *losses, *speeds])
    columns = ("run", "steps", "tokens", "training loss, last 5 %", "validation loss, last", "tokens/s", "TFLOP/s")
    return table("Losses in nats per token, and medians of the speeds of all processes together", columns, rows)


def curves(runs: Mapping[str, Run]) -> Iterator[Drawing]:
    """Yield the drawing of each metric that a run has logged twice, with a panel for each length."""
    keys = sorted({key for run in runs.values() for key, curve in run.curves.items() if len(curve.steps) > 1})
    stems: dict[str, list[str]] = {key: [key] for key in _NAMES if key in keys}
    for key in keys:
        stem, _, length = key.rpartition("/")
        if key.startswith(DURING):
            stems.setdefault(stem if _LENGTH.fullmatch(length) else key, []).append(key)
    for stem, of in stems.items():
        name = _NAMES.get(stem, ", ".join(stem.removeprefix(DURING).split("/")))
        yield name, partial(_draw_curves, runs, name, of)


def _draw_curves(runs: Mapping[str, Run], name: str, keys: list[str]) -> list[Picture]:
    figure, shown = figures.panels(len(keys), width=4.6)
    looks, last = figures.styles(runs), []
    for axes, key in zip(shown, keys):
        length = key.rpartition("/")[2]
        at = f" at {int(length):,} tokens" if _LENGTH.fullmatch(length) else ""
        for label, run in runs.items():
            if (curve := run.curve(key)).last is not None:
                axes.plot(_thinned(curve.steps), _thinned(curve.values), **looks[label] | {"marker": ""})
                last.append(f"{label} {curve.last[1]:.4g}{at}")
        axes.set(xlabel="step", ylabel=figures.plain(name, figures.LONGEST_AXIS_LABEL))
        axes.set_title(at.strip(), fontsize=10)
    figures.legend(figure)
    return [Picture("curve", f"{name.capitalize()} by step; at the end, {enumerated(last)}.", figure)]


def _thinned(values: Sequence[float]) -> np.ndarray:
    """Return at most `_SHOWN_POINTS` values, each the mean over consecutive ones."""
    return np.array([part.mean() for part in np.array_split(np.asarray(values), min(len(values), _SHOWN_POINTS))])
