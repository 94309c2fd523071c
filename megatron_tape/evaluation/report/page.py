"""The page: its sections in order, and the HTML file that they become."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.comparison import Comparison, variants
from megatron_tape.evaluation.figures import COLORS, in_order
from megatron_tape.evaluation.report import comparison as comparing
from megatron_tape.evaluation.report.inputs import Model, clean
from megatron_tape.evaluation.report.paper import paper_tables
from megatron_tape.evaluation.report.pictures import Drawing, drawn
from megatron_tape.evaluation.report.scores import draw_scores, heading, score_tables, task_names, title
from megatron_tape.evaluation.report.settings import evaluation_differences, setting_tables
from megatron_tape.evaluation.report.tables import Table, enumerated
from megatron_tape.evaluation.report.tokens import per_token, token_differences
from megatron_tape.evaluation.report.training import curves, evaluation_seconds, runs_table, training_speeds
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.tasks import TASKS

HERE = Path(__file__).parent


@dataclass
class Part:
    """A part of a section, with a heading if it has a title."""

    title: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Drawing] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Sentences, and the models that they are about, or nothing if they are about all."""
    warnings: list[str] = field(default_factory=list)


@dataclass
class Section:
    """A section of the page."""

    id: str
    title: str
    introduction: str = ""
    parts: list[Part] = field(default_factory=list)


def page(models: Sequence[Model], comparisons: Sequence[Comparison] = ()) -> str:
    """Return the HTML file about these models, whose labels all differ, and about comparisons of variants."""
    compared = [_comparison(comparison, number) for number, comparison in enumerate(comparisons, 1)]
    with in_order([model.label for model in models]):
        made = [
            *compared,
            _scores(models),
            _training(models),
            _tasks(models),
            _settings(models),
            _speeds(models),
            _paper(models),
        ]
    sections = [section for section in made if section.parts]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    labels = [model.label for model in models] or [clean(name) for one in comparisons for name in variants(one)]
    return environment.get_template("page.html").render(
        title=f"{enumerated(labels[:4])}{' and others' if len(labels) > 4 else ''}",
        models=models,
        facts=[_facts(model) for model in models],
        sections=sections,
        colors=len(COLORS),
        script=Markup(script),
        digest=digest,
        style=Markup(style),
    )


def _facts(model: Model) -> str:
    """Return in a few words what a model is."""
    found = []
    if model.facts is not None:
        found.append(f"{_large(model.facts.parameters)} parameters")
        if model.facts.trained_length is not None:
            found.append(f"trained at {model.facts.trained_length:,} tokens")
    elif (length := model.run.setting("model.seq_length")) is not None:
        found.append(f"trained at {length:,} tokens" if type(length) is int else "")
    if model.step is not None:
        found.append(f"step {model.step:,}")
    return ", ".join(filter(None, found))


def _large(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _comparison(comparison: Comparison, number: int) -> Section:
    section = Section(f"comparison-{number}", "Comparison" if number == 1 else f"Comparison {number}")
    about = Part(warnings=comparing.warnings(comparison), notes=[(note, "") for note in comparing.notes(comparison)])
    section.parts.append(about)
    for index, task in enumerate(comparing.tasks_of(comparison)):
        with in_order(variants(comparison)):
            pictures = _shown(f"comparison-{number}-{index}", [comparing.picture(comparison, task)])
        part = Part(comparing.task_title(task), comparing.metric_tables(comparison, task), pictures)
        section.parts.append(part)
    return section


def _scores(models: Sequence[Model]) -> Section:
    section = Section(
        "scores",
        "Scores",
        "The best value of each row is bold, whether or not intervals overlap, unless a warning says that the models "
        "cannot be compared. Click a column's title to sort by it.",
    )
    for task in task_names(models):
        part = _score_part(models, task)
        if part.tables:
            section.parts.append(part)
    return section


def _score_part(models: Sequence[Model], task: str) -> Part:
    differences, tokens = evaluation_differences(models, task), token_differences(models, task)

    def comparable(score: Score) -> bool:
        return differences is None and (tokens is None or not per_token(task, score))

    warnings = [warning for warning in (differences, tokens) if warning is not None]
    return Part(heading(task), score_tables(models, task, comparable), warnings=warnings)


def _training(models: Sequence[Model]) -> Section:
    section = Section("training", "Training")
    table = runs_table(models)
    if table is not None:
        pictures = _shown("training", curves(models))
        section.parts.append(Part(tables=[table], pictures=pictures))
    return section


def _tasks(models: Sequence[Model]) -> Section:
    section = Section("tasks", "Tasks side by side")
    for task in task_names(models):
        results = {model.label: model.tasks[task] for model in models if task in model.tasks}
        part = Part(heading(task))
        if task in TASKS:
            part.pictures, part.warnings = _drawn_by(task, results)
        else:
            part.warnings.append(f"This version does not know the task {task}, and shows only its scores.")
        if not part.pictures:
            part.pictures = _shown(f"task-{task_names(models).index(task)}", draw_scores(task, results))
        if part.pictures and (tokens := token_differences(models, task)):
            part.warnings.append(tokens)
        about: dict[str, list[str]] = {}
        for label, result in results.items():
            for note in result.notes:
                about.setdefault(clean(str(note)), []).append(label)
        everyone = len(results)
        part.notes = [(note, "" if len(which) == everyone else enumerated(which)) for note, which in about.items()]
        if part.pictures or part.notes or part.warnings:
            section.parts.append(part)
    return section


def _drawn_by(task: str, results: dict[str, TaskResult]) -> tuple[list[Drawing], list[str]]:
    """Return a task's pictures, without the models whose results it cannot draw, and a warning about these."""
    draw = TASKS[task].draw
    try:
        return _shown(f"task-{task}", draw(results)), []
    except Exception as error:  # details of another version, or damaged ones
        reason = f"{type(error).__name__}: {error}"
    left = {}
    for label, result in results.items():
        with suppress(Exception):
            draw({label: result})
            left[label] = result
    without = [label for label in results if label not in left]
    sentence = clean(f"The pictures of {title(task)} could not be drawn for {enumerated(without)} ({reason}).")
    print(f"warning: {sentence}", file=sys.stderr)
    return _shown(f"task-{task}", draw(left)) if left and without else [], [sentence]


def _shown(prefix: str, pictures: Sequence[Picture]) -> list[Drawing]:
    return [
        drawn(picture.figure, f"{prefix}-{index}-", clean(picture.alternative_text))
        for index, picture in enumerate(pictures, 1)
    ]


def _settings(models: Sequence[Model]) -> Section:
    section = Section("settings", "Settings that differ", "Settings that are the same for all are left out.")
    section.parts = [Part(tables=[table]) for table in setting_tables(models)]
    return section


def _speeds(models: Sequence[Model]) -> Section:
    section = Section("speeds", "Speeds")
    tables = [table for table in (training_speeds(models), evaluation_seconds(models)) if table is not None]
    hardware = dict.fromkeys(clean(task.hardware) for model in models for task in model.tasks.values())
    if tables:
        section.introduction = f"Evaluated on {enumerated(list(hardware))}." if hardware else ""
        section.parts = [Part(tables=tables)]
    return section


def _paper(models: Sequence[Model]) -> Section:
    section = Section(
        "papers",
        "Beside published figures",
        "Columns marked (paper) hold figures that a paper reports; they were not measured here. They are shown where "
        "task, protocol, data by name, model size and, where it is known, training agree with ours.",
    )
    section.parts = [Part(tables=[table]) for table in paper_tables(models)]
    return section
