"""Read training runs, evaluation results and comparisons, and show them on one HTML page.

Text from files is cleaned and escaped when the page is rendered.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections import Counter
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
from megatron_tape.evaluation.report.findings import finding, measured
from megatron_tape.evaluation.report.tables import (
    Cell,
    Table,
    by_subject,
    comparison_warnings,
    enumerated,
    leader,
    number,
    score_table,
    table,
    text,
)
from megatron_tape.evaluation.results import NAME, Results, read_results
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import TASKS, group_names, title_of, with_group_names
from megatron_tape.run.curves import DURING, METRICS, SETTINGS, Run, read_run
from megatron_tape.run.metrics import (
    LEARNING_RATE,
    LOSS,
    TFLOPS_PER_SECOND,
    TOKENS,
    TOKENS_PER_SECOND,
    VALIDATION_LOSS,
)
from megatron_tape.text import counted, flop_count

_SHOWN_POINTS = 300
"""Maximum number of points of a curve. A longer curve is drawn as means over consecutive points."""
_NAMES = {LOSS: "training loss", VALIDATION_LOSS: "validation loss", LEARNING_RATE: "learning rate"}
_LENGTH = re.compile("[0-9]{1,12}")
Drawing = tuple[str, Callable[[], list[Picture]]]
"""What some pictures show, such as the name of a task, and a function that draws them."""


@dataclass
class Section:
    """A section of the page."""

    title: str
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str, float]] = field(default_factory=list)
    """Data URL, description and width in inches of each picture. If drawing failed, the URL is
    empty and the description contains the reason."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(paths: Iterable[str | Path]) -> tuple[dict[str, Run], dict[str, Results]]:
    """Read runs with their evaluations, and results files or their directories; return runs and
    results by label.

    `TaskResult.examples` are left empty. Raises OSError, or FileError if a path is invalid, or
    neither a run nor results.
    """
    runs: dict[str, Run] = {}
    results: dict[str, Results] = {}
    progress = Progress(None)
    for path in dict.fromkeys(map(Path, paths)):
        is_run, files = _files_of(path)
        if is_run:
            runs[_label(path.resolve().name, path, runs)] = read_run(path)
        for file in files:
            result = read_results(file)
            tasks = {
                name: replace(with_group_names(name, task), examples={})
                for name, task in result.tasks.items()
            }
            results[_label(result.label, file.parent, results)] = replace(result, tasks=tasks)
        progress.update(0, lambda _: f"reading {path}")  # noqa: B023
    progress.end()
    return runs, results


def _label(name: str, path: Path, taken: dict[str, Any]) -> str:
    if name in taken:
        return f"{name} ({path})"
    return name


def _files_of(path: Path) -> tuple[bool, list[Path]]:
    """Return whether a path is a run, and the results files that belong to it."""
    if not path.exists():
        raise FileError(
            str(path), "does not exist", f"give a run, a {NAME}, or a directory that contains one"
        )
    if not path.is_dir():
        return False, [path]
    is_run = any((path / name).exists() for name in (METRICS, SETTINGS))
    files = sorted(path.glob(f"evaluation/*/{NAME}")) if is_run else []
    files += [path / NAME] if (path / NAME).exists() else []
    if not is_run and not files:
        fix = "give a training run, or the --output of pretrain.evaluate"
        raise FileError(str(path), f"contains neither {METRICS} nor {NAME}", fix)
    return is_run, files


def page(
    runs: Mapping[str, Run],
    results: Mapping[str, Results],
    comparisons: Sequence[Comparison] = (),
    missing: Sequence[str] = (),
) -> str:
    """Return an HTML page that shows runs, results (both by label) and comparisons.

    `missing` names runs of the comparisons that are not finished.
    """
    sections = [
        section for comparison in comparisons for section in _comparison(comparison, missing)
    ]
    tasks = {name for one in results.values() for name in one.tasks}
    encodings = {
        label: run.settings.get("model", {}).get("position_encoding") for label, run in runs.items()
    }
    encodings = {label: encoding_of(one.model.config) for label, one in results.items()} | encodings
    with model_encodings({label: encodings[label] for label in [*runs, *results]}):
        sections += [
            _task(results, name) for name in sorted(tasks, key=[*TASKS, *sorted(tasks)].index)
        ]
        if runs:
            sections.append(
                Section("Training", runs_table(runs), draw(curves(runs)), training_warnings(runs))
            )
    title, sentences = _headline(runs, results, comparisons)
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=_shown, **options)
    return environment.get_template("page.html").render(
        title=title, sentences=sentences, sections=sections
    )


def _headline(
    runs: Mapping[str, Run], results: Mapping[str, Results], comparisons: Sequence[Comparison]
) -> tuple[str, list[str]]:
    """Return the title of the page, and the paragraphs below it: what was found, and what was
    compared.
    """
    titles: list[str] = []
    sentences: list[str] = []
    for comparison in comparisons:
        title, found = comparison_tables.headline(comparison)
        titles.append(title)
        sentences += found
    if results:
        kind = "evaluation" if comparisons else "Evaluation"
        titles.append(f"{kind} of {enumerated(list(results), 4)}")
        sentences += _outcome(results)
    if not titles:
        titles.append(f"Training of {enumerated(list(runs), 4)}")
        sentences.append(_last_losses(runs))
    return "; ".join(titles), sentences


def _last_losses(runs: Mapping[str, Run]) -> str:
    losses = {label: run.curve(VALIDATION_LOSS).last for label, run in runs.items()}
    shown = [f"{label} {last[1]:.4f} at step {last[0]:,}" for label, last in losses.items() if last]
    if shown:
        outcome = f"Last validation loss: {enumerated(shown, 6)}."
    else:
        outcome = "No validation loss was logged."
    if len(runs) > 1:
        outcome += (
            " There is one run of each, so this is no ranking; pretrain.compare trains several"
            " seeds."
        )
    return outcome


def _outcome(results: Mapping[str, Results]) -> list[str]:
    """Return paragraphs: the best models by the first metric of each task, in how many scores a
    model leads (see `leader`), and which models were evaluated."""
    found: list[str] = []
    wins: Counter[str] = Counter()
    count = 0
    intervals = False
    for name in dict.fromkeys(name for one in results.values() for name in one.tasks):
        evaluated = {label: one for label, one in results.items() if name in one.tasks}
        if comparison_warnings(list(evaluated.values()), name):
            continue
        subjects = by_subject({label: one.tasks[name] for label, one in evaluated.items()})
        ranking = {
            subject: scores for subject, scores in subjects.items() if subject.better != "neither"
        }
        if ranking:
            values = {
                what: {label: score.value for label, score in of.items()}
                for what, of in ranking.items()
            }
            made = measured(next(iter(ranking)).metric, values)
            found += [f"{title_of(name)}: {finding(made)}"] if made else []
        for scores in ranking.values():
            if len(scores) > 1:
                count += 1
                intervals = intervals or any(score.shown_interval for score in scores.values())
                wins.update(filter(None, [leader(scores)]))
    models = f"{counted(len(results), 'model')} evaluated: {enumerated(list(results), 6)}."
    if not count:
        return [
            *found,
            (
                f"{models} No two models have a score that can be compared, so these results rank"
                " no model."
            ),
        ]
    if not intervals:
        return [
            "No model leads clearly: no score has a 95 % interval to judge a difference by.",
            *found,
            models,
        ]
    scope = "Intervals reflect the choice of test samples, but not that of the training seed."
    if not wins:
        # Differences that are within the intervals are not the first thing to read.
        of = counted(count, "score")
        caveat = (
            f"No model leads clearly: in none of {of} is the best model's 95 % interval separate"
            " from the others."
        )
        return [caveat, *found, f"{scope} {models}"]
    leads = enumerated([f"{label} leads in {number}" for label, number in wins.most_common()], 6)
    evidence = (
        f"In {wins.total()} of {counted(count, 'score')}, the best model's 95 % interval is"
        " separate from others"
    )
    return [*found, f"{evidence}: {leads}. {scope} {models}"]


def training_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Return a warning for each setting that differs between runs and makes their losses
    incomparable.
    """
    warnings = []
    data = ("prefix", "stages", "generator", "examples", "loss_on", "tokenizer")
    for section, key in (("model", "seq_length"), *(("data", key) for key in data)):
        values: dict[str, list[str]] = {}
        for label, run in runs.items():
            if key in run.settings.get(section, {}):
                values.setdefault(
                    json.dumps(run.settings[section][key], sort_keys=True), []
                ).append(label)
        if len(values) > 1:
            of = enumerated(
                [f"{value:.60} in {enumerated(labels, 4)}" for value, labels in values.items()], 4
            )
            warnings.append(f"Losses of these runs may not be comparable: {section}.{key} is {of}.")
    return warnings


def _shown(value: Any) -> Any:
    """Return a text without the characters that a page cannot show; jinja2 escapes it
    afterwards.
    """
    # No line ends between a number and its percent sign.
    if type(value) is str:
        return clean(value).replace(" %", "\N{NO-BREAK SPACE}%")
    return value


def draw(drawings: Iterable[Drawing]) -> list[tuple[str, str, float]]:
    """Draw pictures; return URL, description and width of each (see `Section.pictures`). Warns if a
    drawing fails.
    """
    pictures: list[tuple[str, str, float]] = []
    progress = Progress(None)
    for subject, make in drawings:
        progress.update(0, lambda _: f"drawing {clean(subject)}")  # noqa: B023
        try:
            for picture in make():
                address = Markup(f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}")
                pictures.append((address, picture.alternative_text, picture.figure.get_figwidth()))
        except Exception as error:
            sentence = clean(
                f"The picture of {subject} could not be drawn ({type(error).__name__}: {error}).",
                300,
            )
            print(f"warning: {sentence}", file=sys.stderr)
            pictures.append(("", sentence, 0.0))
    progress.end()
    return pictures


def _comparison(comparison: Comparison, missing: Sequence[str]) -> list[Section]:
    variants = comparison.variants
    sections = []
    for task, by_metric in comparison_tables.by_task(comparison).items():
        pictures = draw([(task, partial(comparison_tables.picture, by_metric, variants))])
        tables = comparison_tables.task_tables(by_metric, comparison.baseline)
        sections.append(Section(comparison_tables.task_title(task), tables, pictures))
    notes = Section(
        "How to read the comparison", notes=comparison_tables.notes(comparison, missing)
    )
    sections.append(notes)
    sections[0].warnings = comparison_tables.warnings(comparison)
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
    notes = [
        note if len(of) == len(tasks) else f"{enumerated(of)}: {note}" for note, of in about.items()
    ]
    return Section(title_of(name), score_table(tasks, not warnings), pictures, warnings, notes)


def runs_table(runs: Mapping[str, Run]) -> list[Table]:
    """Return a table of the progress, losses and speed of each run."""
    rows = []
    for label, run in runs.items():
        validation = run.curve(VALIDATION_LOSS).last
        planned = run.settings.get("train", {}).get("steps", "unknown")
        losses = [number(run.curve(LOSS).recent, 4), number(validation and validation[1], 4)]
        teraflops = run.curve(TFLOPS_PER_SECOND).median
        if teraflops is None:
            flops = number(None)
        else:
            flops = Cell(f"{flop_count(teraflops * 1e12)}/s", teraflops)
        length = run.settings.get("model", {}).get("seq_length")
        steps = [number(run.last.get("step"), 0, f"of {planned}"), number(run.last.get(TOKENS), 0)]
        speeds = [number(run.curve(TOKENS_PER_SECOND).median), flops]
        rows.append([text(label), number(length, 0), *steps, *losses, *speeds])
    columns = (
        "run",
        "length (tokens)",
        "steps",
        "tokens",
        "training loss, last 5 %",
        "validation loss, last",
    )
    caption = (
        "Losses are in nats per token. Speeds are medians over the steps, for all processes"
        " together."
    )
    return table(caption, [*columns, "tokens/s", "FLOP/s"], rows)


def curves(runs: Mapping[str, Run]) -> Iterator[Drawing]:
    """Yield a drawing for each logged metric with at least two points; metrics by length have a
    panel per length.
    """
    keys = sorted(
        {key for run in runs.values() for key, curve in run.curves.items() if len(curve.steps) > 1}
    )
    stems: dict[str, list[str]] = {key: [key] for key in _NAMES if key in keys}
    for key in keys:
        stem, _, length = key.rpartition("/")
        if key.startswith(DURING):
            stems.setdefault(stem if _LENGTH.fullmatch(length) else key, []).append(key)
    names = _metric_names(runs)
    for stem, of in stems.items():
        name = (
            _NAMES.get(stem) or names.get(stem) or ", ".join(stem.removeprefix(DURING).split("/"))
        )
        yield name, partial(_draw_curves, runs, name, of)


def _metric_names(runs: Mapping[str, Run]) -> dict[str, str]:
    """Return names for readers of metrics from evaluations during training, by key, where a task
    declares them.
    """
    found: dict[str, str] = {}
    for run in runs.values():
        evaluation = run.settings.get("evaluation")
        for task, settings in evaluation.items() if isinstance(evaluation, dict) else ():
            if isinstance(settings, dict):
                groups = group_names(task, settings)
            else:
                groups = {}
            for key in run.curves:
                parts = key.removeprefix(DURING).split("/")
                if (
                    key.startswith(DURING)
                    and len(parts) == 3
                    and parts[0] == task
                    and parts[2] in groups
                ):
                    found.setdefault(key, f"{title_of(task)}, {parts[1]}, {groups[parts[2]]}")
    return found


def _draw_curves(runs: Mapping[str, Run], name: str, keys: list[str]) -> list[Picture]:
    figure, shown = figures.panels(len(keys), width=4.6, sharey=True)
    looks = figures.styles(runs)
    last = []
    for axes, key in zip(shown, keys):
        length = key.rpartition("/")[2]
        at = f" at {int(length):,} tokens" if _LENGTH.fullmatch(length) else ""
        for label, run in runs.items():
            if (curve := run.curve(key)).last is not None:
                axes.plot(
                    _thinned(curve.steps), _thinned(curve.values), **looks[label] | {"marker": ""}
                )
                last.append(f"{label} {curve.last[1]:.4g}{at}")
        axes.set(xlabel="step", ylabel=figures.plain(name, figures.LONGEST_AXIS_LABEL))
        axes.set_title(at.strip(), fontsize=10)
    figures.legend(figure)
    return [
        Picture("curve", f"{name.capitalize()} by step; at the end, {enumerated(last)}.", figure)
    ]


def _thinned(values: Sequence[float]) -> np.ndarray:
    """Shorten `values` to at most `_SHOWN_POINTS`, each the mean of consecutive values."""
    return np.array(
        [
            part.mean()
            for part in np.array_split(np.asarray(values), min(len(values), _SHOWN_POINTS))
        ]
    )
