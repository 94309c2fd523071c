"""Read training runs and evaluation results, and show them with comparisons on one HTML page.

Text from files is cleaned and escaped when the page is rendered.
"""

import base64
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
from megatron_tape.evaluation.ladder_file import Ladder
from megatron_tape.evaluation.report import comparison_tables, ladder_findings, ladder_tables
from megatron_tape.evaluation.report.findings import finding, first_measured
from megatron_tape.evaluation.report.tables import (
    Table,
    by_subject,
    comparison_warnings,
    enumerated,
    leader,
    number,
    score_tables,
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
"""The metrics of training whose curves are drawn, and what a reader calls them."""
_LOSS_SETTINGS = (
    ("model", "seq_length"),
    ("data", "prefix"),
    ("data", "stages"),
    ("data", "generator"),
    ("data", "examples"),
    ("data", "loss_on"),
    ("data", "tokenizer"),
)
"""Settings, by section and key, that make losses incomparable if they differ."""
_RUN_COLUMNS = (
    "run",
    "length (tokens)",
    "steps",
    "tokens",
    "training loss, last 5 %",
    "validation loss, last",
    "tokens/s",
    "FLOP/s",
)
_ONE_RUN_EACH = (
    "There is one run of each, so this is no ranking; pretrain.compare trains several seeds."
)
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


def read_runs_and_results(paths: Iterable[str | Path]) -> tuple[dict[str, Run], dict[str, Results]]:
    """Read runs with their evaluations, and results files or their directories; return runs and
    results by label.

    `TaskResult.examples` are left empty. Raises OSError, or FileError if a path is invalid, or
    neither a run nor results.
    """
    runs = {}
    results = {}
    for path in dict.fromkeys(map(Path, paths)):
        files = [path]
        is_run = (path / METRICS).exists() or (path / SETTINGS).exists()
        if not path.is_file():
            # A run has an evaluation for each checkpoint that was evaluated.
            files = [*sorted(path.glob(f"evaluation/*/{NAME}")), *path.glob(NAME)]
        if not is_run and not files:
            raise FileError(
                path,
                f"contains neither {METRICS} nor {NAME}, or does not exist",
                "give a training run, or the output of pretrain.evaluate or pretrain.compare",
            )

        if is_run:
            runs[_label(path.resolve().name, path, runs)] = read_run(path)
        for file in files:
            result = read_results(file)
            # Examples may take gigabytes, and the page shows none.
            tasks = {
                name: replace(with_group_names(name, task), examples={})
                for name, task in result.tasks.items()
            }
            results[_label(result.label, file.parent, results)] = replace(result, tasks=tasks)
    return runs, results


def _label(name: str, path: Path, taken: dict) -> str:
    """Return a label that is not yet in `taken`: `name`, or `name (path)` if `name` is taken."""
    if name in taken:
        return f"{name} ({path})"
    return name


def page(
    runs: Mapping[str, Run],
    results: Mapping[str, Results],
    comparisons: Sequence[Comparison] = (),
    missing: Sequence[str] = (),
    ladders: Sequence[Ladder] = (),
) -> str:
    """Return an HTML page that shows runs, results (both by label), comparisons and ladders.

    `missing` names runs of the comparisons and ladders that are not finished.
    """
    sections = []
    comparable = []  # names of the tasks whose scores can be compared between models
    titles = []
    sentences = []
    for ladder in ladders:
        sections += [
            Section(part.title, part.tables, draw(part.drawings), part.warnings, part.notes)
            for part in ladder_tables.parts(ladder, missing)
        ]
        title, findings = ladder_findings.headline(ladder)
        titles.append(title)
        sentences += findings
    for comparison in comparisons:
        sections += _comparison_sections(comparison, missing)
        title, findings = comparison_tables.headline(comparison)
        titles.append(title)
        sentences += findings

    # A model has one color on the whole page, so all encodings are known before the first picture.
    encodings = {label: run.settings.get("model", {}) for label, run in runs.items()}
    for label, result in results.items():
        encodings.setdefault(label, result.model.config)
    with model_encodings({label: encoding_of(config) for label, config in encodings.items()}):
        evaluated = dict.fromkeys(name for result in results.values() for name in result.tasks)
        # In the order of `TASKS`; tasks of other versions come last.
        for name in sorted(evaluated, key=[*TASKS, *sorted(evaluated)].index):
            section = _task_section(results, name)
            sections.append(section)
            # The warnings of a section say that the scores of its task cannot be compared.
            if not section.warnings:
                comparable.append(name)
        if runs:
            pictures = draw(curves(runs))
            warnings = training_warnings(runs)
            sections.append(Section("Training", [runs_table(runs)], pictures, warnings))

    # If models were evaluated, the title and the sentences do not mention the training.
    if results:
        titles.append(f"evaluation of {enumerated(list(results), most=4)}")
        sentences += _evaluation_paragraphs(results, comparable)
    elif runs:
        titles.append(f"training of {enumerated(list(runs), most=4)}")
        if len(runs) > 1:
            sentences.append(_ONE_RUN_EACH)

    # Every text is escaped, since names of models and tasks come from files.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = "; ".join(titles)
    return environment.get_template("page.html").render(
        title=title[:1].upper() + title[1:], sentences=sentences, sections=sections
    )


def _evaluation_paragraphs(results: Mapping[str, Results], comparable: Sequence[str]) -> list[str]:
    """Return paragraphs: the best models by the first metric of each task, in how many scores the
    interval of the best model is separate from all others, and which models were evaluated.

    `comparable` names the tasks whose scores can be compared.
    """
    findings = []
    # The number of scores that several models have, and how many of them have a leader.
    compared_count = 0
    led_count = 0
    for name in comparable:
        tasks = {
            label: result.tasks[name] for label, result in results.items() if name in result.tasks
        }
        # The values of the task, by subject (a score without its value) and model label.
        values = {}
        for subject, scores in by_subject(tasks).items():
            if subject.better != "neither":
                values[subject] = {label: score.value for label, score in scores.items()}
                compared_count += len(scores) > 1
                led_count += leader(scores) is not None
        first_metric = first_measured(values)
        if first_metric is not None:
            findings.append(f"{title_of(name)}: {finding(first_metric)}")

    models = f"{counted(len(results), 'model')} evaluated: {enumerated(list(results), most=6)}."
    if not compared_count:
        return [
            *findings,
            f"No two models have comparable scores, so these results rank no model. {models}",
        ]
    scope = "Intervals reflect the choice of test samples, but not that of the training seed."
    compared_scores = counted(compared_count, "score")
    if led_count:
        clear = (
            f"In {led_count} of {compared_scores}, 95 % intervals separate the best model from the"
            " others."
        )
        return [*findings, f"{clear} {scope} {models}"]

    # The findings may be due to chance, so readers are told first that no model leads clearly.
    caveat = (
        f"No model leads clearly: in none of {compared_scores} do 95 % intervals separate the best"
        " model from the others."
    )
    return [caveat, *findings, f"{scope} {models}"]


def training_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Return a warning if settings differ between runs and make their losses incomparable."""
    differing = []
    for section, key in _LOSS_SETTINGS:
        values = [run.settings.get(section, {}).get(key) for run in runs.values()]
        # Values may be dictionaries, which a set cannot hold.
        if any(value != values[0] for value in values):
            differing.append(f"{section}.{key}")
    if not differing:
        return []
    return [f"These differ, and losses may not be comparable: {', '.join(differing)}."]


def _shown(value: Any) -> Any:
    """Return a value of the template as it is shown. jinja2 calls this for each value, and escapes
    texts afterwards.
    """
    # Numbers stay as they are, and so does `Markup`, a subclass of str for texts that are safe.
    if type(value) is not str:
        return value
    # A browser does not break a line at a no-break space, so a number stays with its percent sign.
    return clean(value).replace(" %", "\N{NO-BREAK SPACE}%")


def draw(drawings: Iterable[Drawing]) -> list[tuple[str, str, float]]:
    """Draw pictures; return a data URL, a description and the width in inches of each. If a drawing
    fails, print a warning, and return an empty URL with the reason as description.
    """
    pictures: list[tuple[str, str, float]] = []
    # The progress line names the current subject only: the number of drawings is not known (None),
    # none are counted (0), and the lambda ignores the seconds since the start that it receives.
    progress = Progress(None)
    for subject, make_pictures in drawings:
        progress.update(0, lambda _: f"drawing {clean(subject)}")  # noqa: B023
        try:
            for picture in make_pictures():
                # `_shown` would shorten a str of this length, but leaves `Markup` as it is.
                address = Markup(f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}")
                pictures.append((address, picture.alternative_text, picture.figure.get_figwidth()))
        except Exception as error:  # of a task's drawing; the other pictures are still shown
            reason = f"{type(error).__name__}: {error}"
            sentence = clean(
                f"The picture of {subject} could not be drawn ({reason}).", longest=300
            )
            print(f"warning: {sentence}", file=sys.stderr)
            pictures.append(("", sentence, 0.0))
    progress.end()
    return pictures


def _comparison_sections(comparison: Comparison, missing: Sequence[str]) -> list[Section]:
    """Return a section for each task and for the training, and one on how to read them."""
    sections = []
    for task, by_metric in comparison_tables.by_task(comparison).items():
        tables = comparison_tables.task_tables(by_metric, comparison.baseline)
        make_pictures = partial(comparison_tables.picture, by_metric, comparison.variants)
        pictures = draw([(task, make_pictures)])
        sections.append(Section(comparison_tables.task_title(task), tables, pictures))
    notes = comparison_tables.notes(comparison, missing)
    sections.append(Section("How to read the comparison", notes=notes))
    # Warnings concern all sections, and come before the first table.
    sections[0].warnings = comparison_tables.warnings(comparison)
    return sections


def _task_section(results: Mapping[str, Results], name: str) -> Section:
    """Return the section of the task `name`, with all models that have results of it."""
    results = {label: result for label, result in results.items() if name in result.tasks}
    tasks = {label: result.tasks[name] for label, result in results.items()}
    warnings = comparison_warnings(list(results.values()), name)
    pictures = []
    # The results may come from a version with other tasks.
    if name in TASKS:
        pictures = draw([(name, partial(TASKS[name].draw, tasks))])

    # The models to which each note applies.
    labels_by_note = {}
    for label, task in tasks.items():
        for note in task.notes:
            labels_by_note.setdefault(note, []).append(label)
    notes = []
    for note, labels in labels_by_note.items():
        # A note about all models needs no labels.
        if len(labels) < len(tasks):
            note = f"{enumerated(labels)}: {note}"
        notes.append(note)
    tables = score_tables(tasks, comparable=not warnings)
    return Section(title_of(name), tables, pictures, warnings, notes)


def runs_table(runs: Mapping[str, Run]) -> Table:
    """Return a table of the progress, losses and speed of each run."""
    rows = []
    for label, run in runs.items():
        model = run.settings.get("model", {})
        planned = run.settings.get("train", {}).get("steps", "unknown")
        _, validation_loss = run.curve(VALIDATION_LOSS).last or (None, None)
        teraflops = run.curve(TFLOPS_PER_SECOND).median
        speed = number(teraflops)
        if teraflops is not None:
            # The column is still sorted by the number of TFLOP/s.
            speed = replace(speed, text=f"{flop_count(teraflops * 1e12)}/s")

        # The arguments 0 and 4 of `number` are numbers of decimals.
        rows.append(
            [
                text(label),
                number(model.get("seq_length"), 0),
                number(run.last.get("step"), 0, f"of {planned}"),
                number(run.last.get(TOKENS), 0),
                number(run.curve(LOSS).recent, 4),
                number(validation_loss, 4),
                number(run.curve(TOKENS_PER_SECOND).median),
                speed,
            ]
        )

    caption = (
        "Losses are in nats per token. Speeds are medians over the steps, for all processes"
        " together."
    )
    return table(caption, _RUN_COLUMNS, rows)


def curves(runs: Mapping[str, Run]) -> Iterator[Drawing]:
    """Yield a drawing for each of `_NAMES` and for each task evaluated during training, if it was
    logged at least twice. The drawing of a task has a panel for each of its metrics.
    """
    # A single point is no curve.
    keys = {
        key for run in runs.values() for key, curve in run.curves.items() if len(curve.steps) > 1
    }
    # For each drawing, the titles of its panels by the key of the metric. The drawings of `_NAMES`
    # have a single panel, which needs no title.
    panels = {_NAMES[key]: {key: ""} for key in _NAMES if key in keys}
    for key in sorted(keys):
        # Scores of tasks have the keys DURING + TASK/METRIC/GROUP/LENGTH, without empty parts.
        if key.startswith(DURING):
            task, *parts = key.removeprefix(DURING).split("/")
            # The names for readers of the task's groups, from the settings of all runs.
            names = {}
            for run in runs.values():
                names |= group_names(task, run.settings.get("evaluation", {}).get(task) or {})
            panel = ", ".join(names.get(part, part) for part in parts)
            panels.setdefault(title_of(task), {})[key] = panel
    for name, titles in panels.items():
        yield name, partial(_draw_curves, runs, name, titles)


def _draw_curves(runs: Mapping[str, Run], name: str, titles: Mapping[str, str]) -> list[Picture]:
    """Return a picture with a panel for each metric. `titles` are those of the panels, by the key
    of the metric; `name` is what all of them show, such as `training loss`.
    """
    figure, panels = figures.panels(len(titles), width=4.6)
    looks = figures.styles(runs)
    ends = []
    for axes, (key, title) in zip(panels, titles.items()):
        for label, run in runs.items():
            curve = run.curve(key)
            if curve.last is not None:
                steps = _thinned(curve.steps)
                axes.plot(steps, _thinned(curve.values), **looks[label] | {"marker": ""})
                # A single panel has an empty title, which would leave two spaces.
                ends.append(f"{label} {title} {curve.last[1]:.4g}".replace("  ", " "))
        axes.set(xlabel="step", ylabel=figures.plain(name, figures.LONGEST_AXIS_LABEL))
        axes.set_title(figures.plain(title, figures.LONGEST_LABEL), fontsize=10)
    figures.legend(figure)
    description = f"{name.capitalize()} by step; at the end, {enumerated(ends)}."
    return [Picture("curve", description, figure)]


def _thinned(values: Sequence[float]) -> np.ndarray:
    """Shorten `values` to at most `_SHOWN_POINTS`, each the mean of consecutive values."""
    parts = np.array_split(np.asarray(values), min(len(values), _SHOWN_POINTS))
    return np.array([part.mean() for part in parts])
