"""The page: its sections in order, and the HTML file that they become."""

from __future__ import annotations

import base64
import io
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_tape.command_line import Progress
from megatron_tape.evaluation.base import Drawing, Picture
from megatron_tape.evaluation.comparison import Comparison
from megatron_tape.evaluation.figures import COLORS, MOST_MODELS, in_order, without_warnings
from megatron_tape.evaluation.report import comparison as comparing
from megatron_tape.evaluation.report.differences import comparability, setting_tables, token_differences
from megatron_tape.evaluation.report.models import Model, clean
from megatron_tape.evaluation.report.scores import draw_scores, score_tables
from megatron_tape.evaluation.report.tables import Table, enumerated, heading, task_names, task_title
from megatron_tape.evaluation.report.time_spent import attempts_of, goodput, phases, spent_by, spikes, time_lines
from megatron_tape.evaluation.report.training_curves import (
    curves,
    evaluation_seconds,
    limits,
    runs_table,
    training_speeds,
)
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.tasks import TASKS

HERE = Path(__file__).parent
PIXELS_PER_INCH = 96
_VARIABLES = {
    **{color: f"series-{index}" for index, color in enumerate(COLORS)},
    **{"#000000": "ink", "#ffffff": "paper", "#b0b0b0": "rule", "#cccccc": "rule"},
}
"""The colours of models, and matplotlib's own ones of text, background, grid lines and frames: names in colors.css."""
_COLOR = re.compile("|".join(_VARIABLES))
_ILLEGAL_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class EmbeddedPicture:
    """A picture as an address that holds all of it, and its natural width in pixels of the page.

    Without an address it is a picture that could not be drawn, and its text says so.
    """

    address: str
    width: int
    alternative_text: str


@dataclass
class Part:
    """A part of a section, with a heading if it has a title."""

    title: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[EmbeddedPicture] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Sentences, and the models that they are about, or nothing if they are about all."""
    warnings: list[str] = field(default_factory=list)
    id: str = ""
    """Of its heading, which its section gives it."""


@dataclass
class Section:
    """A section of the page."""

    id: str
    title: str
    introduction: str = ""
    parts: list[Part] = field(default_factory=list)

    def numbered(self) -> Section:
        """Give the parts their ids, and return the section."""
        for number, part in enumerate(self.parts, 1):
            part.id = f"{self.id}-{number}"
        return self


def page(models: Sequence[Model], comparisons: Sequence[Comparison] = (), missing: Sequence[str] = ()) -> str:
    """Return the HTML file about these models, whose labels all differ, and about comparisons of variants.

    `missing` names runs of the comparisons that are not finished.
    """
    compared = [_comparison(comparison, number, missing) for number, comparison in enumerate(comparisons, 1)]
    sections = [_scores, _training, _time_spent, _tasks, _settings, _speeds]
    with in_order([model.label for model in models]), without_warnings():
        made = [*compared, *(section(models) for section in sections)]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    labels = [model.label for model in models] or [clean(name) for one in comparisons for name in one.variants]
    return environment.get_template("page.html").render(
        title=f"{enumerated(labels[:4])}{' and others' if len(labels) > 4 else ''}",
        models=models,
        facts=[_facts(model) for model in models],
        sections=[section.numbered() for section in made if section.parts],
        colors=len(COLORS),
        script=Markup(_own("page.js")),
        style=Markup(_own("colors.css") + _own("page.css")),
    )


def _own(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def embedded(picture: Picture) -> EmbeddedPicture:
    """Return a picture as an SVG image, in which no script runs and whose colours follow light and dark pages."""
    import matplotlib

    content = io.StringIO()
    # Texts as texts take fonts of the browser; ids depend on the picture only.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}), without_warnings():
        picture.figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    svg = _ILLEGAL_IN_XML.sub("\N{REPLACEMENT CHARACTER}", content.getvalue())
    svg = re.sub(r'style="[^"]*"', _with_variables, svg)
    style = f"<style>{_own('colors.css')} svg {{ fill: var(--ink); }} text {{ font-family: var(--font) !important; }}"
    svg = svg.replace("<defs>", f"{style}</style><defs>", 1)
    address = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    width = round(picture.figure.get_figwidth() * PIXELS_PER_INCH)
    return EmbeddedPicture(address, width, clean(picture.alternative_text))


def _embedded(drawings: Iterable[Drawing]) -> list[EmbeddedPicture]:
    """Return the pictures of drawings; one that cannot be drawn, as values and texts of files decide, is a sentence."""
    found, progress = [], Progress(None)
    for shows, draw in drawings:
        progress.update(0, lambda _: f"drawing {shows}")  # noqa: B023
        try:
            found.append(embedded(draw()))
        except Exception as error:
            sentence = clean(f"The picture of {shows} could not be drawn ({type(error).__name__}: {error}).", 300)
            print(f"warning: {sentence}", file=sys.stderr)
            found.append(EmbeddedPicture("", 0, sentence))
    progress.end()
    return found


def _with_variables(style: re.Match) -> str:
    return _COLOR.sub(lambda color: f"var(--{_VARIABLES[color[0]]})", style[0])


def _facts(model: Model) -> str:
    found, length = [], model.run.setting("model.seq_length") if model.run else None
    if model.evaluated is not None:
        found.append(f"{_large(model.evaluated.parameters)} parameters")
        length = model.evaluated.trained_length
    if type(length) is int:
        found.append(f"trained at {length:,} tokens")
    if model.step is not None:
        found.append(f"step {model.step:,}")
    return ", ".join(found)


def _large(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _comparison(comparison: Comparison, number: int, missing: Sequence[str]) -> Section:
    notes = [(note, "") for note in comparing.notes(comparison, missing)]
    about = Part(warnings=comparing.warnings(comparison) + comparing.limits(comparison), notes=notes)
    parts = [about]
    with in_order(comparison.variants), without_warnings():
        for place, task in enumerate(comparing.tasks_of(comparison)):
            part = Part(heading(clean(task)), comparing.metric_tables(comparison, task))
            if place < comparing.MOST_TASKS:
                part.pictures = _embedded([(clean(task), partial(comparing.picture, comparison, task))])
            parts.append(part)
    return Section(f"comparison-{number}", "Comparison" if number == 1 else f"Comparison {number}", parts=parts)


def _scores(models: Sequence[Model]) -> Section:
    section = Section(
        "scores",
        "Scores",
        "The best value of each row is bold, whether or not intervals overlap, unless a warning says that the models "
        "cannot be compared, or a value has no interval. Click a column's title to sort by it.",
    )
    for task in task_names(models):
        warnings, comparable = comparability(models, task)
        if tables := score_tables(models, task, comparable):
            section.parts.append(Part(heading(task), tables, warnings=warnings))
    return section


def _training(models: Sequence[Model]) -> Section:
    table = runs_table(models)
    parts = [Part(tables=[table], pictures=_embedded(curves(models)))] if table is not None else []
    return Section("training", "Training", " ".join(limits(models)), parts)


def _time_spent(models: Sequence[Model]) -> Section:
    attempts = attempts_of(models)
    runs = spent_by(attempts)
    pictures = _embedded([*phases(models), *time_lines(runs)])
    tables = [table for table in [goodput(runs), spikes(attempts)] if table is not None]
    parts = [Part(tables=tables, pictures=pictures)] if pictures or tables else []
    some = f"Time lines show the first {MOST_MODELS} of {len(runs):,} runs." if len(runs) > MOST_MODELS else ""
    return Section("time", "Where the time went", some, parts)


def _tasks(models: Sequence[Model]) -> Section:
    section = Section("tasks", "Tasks side by side")
    for task in task_names(models):
        results = {model.label: model.tasks[task] for model in models if task in model.tasks}
        part = Part(heading(task))
        pictures: list[Picture] = []
        shown = dict(islice(results.items(), MOST_MODELS))
        if task in TASKS:
            pictures, part.warnings = _drawn_by(task, shown)
        else:
            part.warnings.append(f"This version does not know the task {task}, and shows only its scores.")
        if len(shown) < len(results):
            part.warnings.append(f"Pictures show the first {len(shown)} of {len(results):,} models.")
        drawings = [(picture.name, lambda picture=picture: picture) for picture in pictures]
        if not drawings:
            drawings, left_out = draw_scores(task, shown)
            part.warnings += left_out
        part.pictures = _embedded(drawings)
        if part.pictures and (tokens := token_differences(models, task)):
            part.warnings.append(tokens)
        about: dict[str, list[str]] = {}
        for label, result in results.items():
            for note in result.notes:
                about.setdefault(clean(note), []).append(label)
        everyone = len(results)
        part.notes = [(note, "" if len(which) == everyone else enumerated(which)) for note, which in about.items()]
        if part.pictures or part.notes or part.warnings:
            section.parts.append(part)
    return section


def _drawn_by(task: str, results: dict[str, TaskResult]) -> tuple[list[Picture], list[str]]:
    """Return a task's pictures, without the models whose results it cannot draw, and a warning about these."""
    draw = TASKS[task].draw
    try:
        return draw(results), []
    except Exception as error:  # details of another version, or damaged ones
        reason = f"{type(error).__name__}: {error}"
    left = {}
    for label, result in results.items():
        with suppress(Exception):
            draw({label: result})
            left[label] = result
    without = [label for label in results if label not in left]
    sentence = clean(f"The pictures of {task_title(task)} could not be drawn for {enumerated(without)} ({reason}).")
    print(f"warning: {sentence}", file=sys.stderr)
    return draw(left) if left and without else [], [sentence]


def _settings(models: Sequence[Model]) -> Section:
    parts = [Part(tables=[table]) for table in setting_tables(models)]
    return Section("settings", "Settings that differ", "Settings that are the same for all are left out.", parts)


def _speeds(models: Sequence[Model]) -> Section:
    tables = [table for table in (training_speeds(models), evaluation_seconds(models)) if table is not None]
    hardware = dict.fromkeys(clean(task.hardware) for model in models for task in model.tasks.values())
    introduction = f"Evaluated on {enumerated(list(hardware))}." if hardware else ""
    return Section("speeds", "Speeds", introduction, [Part(tables=tables)] if tables else [])
