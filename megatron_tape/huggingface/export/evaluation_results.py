"""What `pretrain.evaluate` found out about a checkpoint, for the model card of its export."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import MANIFEST
from megatron_tape.io.records import read_record

RESULTS = "results.json"
_BYTES = 1 << 30
_SHOWN = ("torch", "transformers", "lm_eval", "megatron-tape", "commit")
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/]+/)+")


class _Score(TypedDict):
    metric: str
    value: float
    length: int | None
    group: str
    low: float | None
    high: float | None
    count: int | None
    unit: str


class _Task(TypedDict):
    data: dict[str, str]
    scores: list[_Score]
    notes: list[str]
    dtype: str
    hardware: str
    versions: dict[str, str]


class _Model(TypedDict):
    digest: str


class Results(TypedDict):
    """The part of `results.json`, in the format 1, that a model card shows."""

    format: Literal[1]
    model: _Model
    tasks: dict[str, _Task]


def find_results(checkpoint: Path, given: Sequence[str | Path] = ()) -> list[Results]:
    """Return the results of a checkpoint in the directories or files `given`, or where its evaluation writes them.

    Raises OSError or ValueError, in one sentence, if those given cannot be read or are of another model.
    """
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    found = []
    for place in map(Path, given):
        results = _read(place / RESULTS if place.is_dir() else place)
        if results["model"]["digest"] != digest:
            raise ValueError(
                f"{place} holds results of another model than {checkpoint}; evaluate that one: "
                f"python -m pretrain.evaluate TASK --model {checkpoint}"
            )
        found.append(results)
    # As in evaluation.source: of a run, `evaluation/STEP` beside its checkpoints.
    own = checkpoint.parent.parent / "evaluation" / checkpoint.name / RESULTS
    if given or not own.is_file():
        return found
    try:
        results = _read(own)
    except (ValueError, OSError) as error:
        command_line.say(f"the model card has no evaluation results: {error}")
        return []
    return [results] if results["model"]["digest"] == digest else []


def _read(path: Path) -> Results:
    if not path.is_file():
        raise FileNotFoundError(f"results {path} do not exist; give the output directory of pretrain.evaluate")
    return read_record(path, Results, _BYTES)


def rows_of(results: Results) -> Iterator[dict[str, Any]]:
    """Yield every score with the name of its `task`."""
    for task, found in results["tasks"].items():
        for score in found["scores"]:
            yield {"task": task, **score}


def results_section(several: Sequence[Results]) -> list[str]:
    """Return the section of the evaluation results; nothing without any."""
    if not several:
        return []
    lines = ["", "## Evaluation", "", "| task | | context | metric | value | 95 % interval | samples |"]
    lines.append("|---|---|---|---|---|---|---|")
    notes: dict[str, None] = {}
    for results in several:
        for row in rows_of(results):
            interval = "" if row["low"] is None or row["high"] is None else f"{row['low']:.4g} to {row['high']:.4g}"
            length, count = (f"{row[key]:,}" if row[key] else "" for key in ("length", "count"))
            unit = f" {row['unit']}" if row["unit"] else ""
            cells = (row["task"], row["group"], length, row["metric"], f"{row['value']:.4g}{unit}", interval, count)
            lines.append("| " + " | ".join(str(cell).replace("|", "&#124;") for cell in cells) + " |")
        for name, task in results["tasks"].items():
            versions = ", ".join(f"{key} {task['versions'][key]}" for key in _SHOWN if key in task["versions"])
            data = "".join(f", on {Path(path).name}" for path in task["data"])
            notes[f"{name}: measured in {task['dtype']} on {task['hardware']}{data} ({versions})."] = None
            # Paths of the machine that evaluated concern nobody else.
            notes |= {f"{name}: {_FOLDERS.sub('', note)}": None for note in task["notes"]}
    return [*lines, "", *(f"- {note}" for note in notes)]
