"""What `pretrain.evaluate` found out about a checkpoint, for the model card of its export."""

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult

from megatron_tape import command_line
from megatron_tape.checkpoint.locate import model_digest
from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import Results, read_results, results_file
from megatron_tape.huggingface.export.markdown import plain
from megatron_tape.model.names import AVERAGE

_SHOWN = ("torch", "transformers", "lm_eval", "megatron-tape", "commit")
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/]+/)+")


def find_results(checkpoint: Path, given: Sequence[str | Path] = (), average: bool = False) -> list[Results]:
    """Return the results of a checkpoint in the directories or files `given`, or where its evaluation writes them.

    With `average` those of its averaged weights.

    Raises FileError if those given cannot be read or are of another model.
    """
    of_model = model_digest(checkpoint, average)
    found = []
    for place in map(Path, given):
        if not results_file(place).is_file():
            raise FileError(str(place), "holds no results", "give the output directory of pretrain.evaluate")
        results = read_results(place)
        if results.model.digest != of_model:
            problem = f"holds results of another model than {checkpoint}"
            raise FileError(str(place), problem, f"evaluate it: python -m pretrain.evaluate TASK --model {checkpoint}")
        found.append(results)
    # As in evaluation.model_source: of a run, `evaluation/STEP` beside its checkpoints.
    step = f"{checkpoint.name}-{AVERAGE}" if average else checkpoint.name
    own = results_file(checkpoint.parent.parent / "evaluation" / step)
    if given or not own.is_file():
        return found
    try:
        results = read_results(own)
    except (ValueError, OSError) as error:
        command_line.say(f"the model card has no evaluation results: {error}")
        return []
    return [results] if results.model.digest == of_model else []


def rows_of(several: Sequence[Results]) -> list[list[str]]:
    """Return the cells of a card's table as Markdown, a row for each score."""
    rows = []
    for score in (score for results in several for task in results.tasks.values() for score in task.scores):
        length = f"{score.length:,}" if score.length else ""
        shown = (score.shown_value, score.shown_interval, score.shown_count)
        cells = [score.task, score.group, length, score.metric, *shown]
        rows.append([plain(cell) for cell in cells])
    return rows


def notes_of(several: Sequence[Results]) -> list[str]:
    """Return what a reader of the scores has to know, in Markdown, without the paths of the machine that evaluated."""
    notes: dict[str, None] = {}
    for name, task in (item for results in several for item in results.tasks.items()):
        versions = ", ".join(f"{key} {task.versions[key]}" for key in _SHOWN if key in task.versions)
        data = "".join(f", on {Path(path).name}" for path in task.data)
        notes[f"{name}: measured in {task.dtype} on {task.hardware}{data} ({versions})."] = None
        notes |= {f"{name}: {_FOLDERS.sub('', note)}": None for note in task.notes}
    return [plain(note) for note in notes]


def scores_for_hub(several: Sequence[Results]) -> list[EvalResult]:
    """Return every score as the Hub's metadata has it."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.task,
            dataset_name=f"{score.task}: {score.group}" if score.group else score.task,
            dataset_config=score.group or None,
            metric_type=score.metric.replace(" ", "_"),
            metric_name=score.metric + (f" at {score.length:,} tokens" if score.length else ""),
            metric_value=score.value,
        )
        for results in several
        for task in results.tasks.values()
        for score in task.scores
    ]
