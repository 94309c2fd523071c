"""Run tasks on a model: distribute their units over the ranks, save values, and write results and
pictures.

Each rank appends the value of each finished unit to its own file in `parts/TASK-DIGEST/` of the
output directory, so that an interrupted evaluation can continue, on any number of processes. The
digest covers everything that the values depend on: model, settings, data and dtype.
"""

import functools
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape import command_line
from megatron_tape.errors import FileError
from megatron_tape.evaluation.ranks import Ranks
from megatron_tape.evaluation.results import (
    NAME,
    ModelRecord,
    Results,
    TaskResult,
    locked,
    read_results,
    write_results,
)
from megatron_tape.evaluation.task import HuggingFaceModel, Task, Unit
from megatron_tape.evaluation.tasks import with_group_names
from megatron_tape.io.files import digest, remove, write_whole
from megatron_tape.io.records import parse_record
from megatron_tape.io.versions import cpu_name, versions_with_commit
from megatron_tape.text import byte_size, counted


@dataclass(frozen=True)
class TaskPlan:
    """A task to run, with digests of the model and the data that its results depend on."""

    task: str
    model_digest: str
    dtype: str
    data: dict[str, str]
    """SHA-256 of the files that the task reads, by path."""
    identity: str
    """Digest of everything that the results depend on."""

    def parts(self, output: Path) -> Path:
        """Return the directory for the values of finished units."""
        return output / "parts" / f"{self.task}-{self.identity[:16]}"


def plan_task(task: Task, model_digest: str, dtype: str) -> TaskPlan:
    """Return the plan of a task. Reads the task's files to compute their digests."""
    data = {
        str(path): _sha256(path, path.stat().st_size, path.stat().st_mtime_ns)
        for path in task.inputs()
    }
    # `data` includes the paths, so that exchanging the contents of two files changes the identity.
    facts = [task.name, asdict(task.settings), model_digest, dtype, sorted(data.items())]
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return TaskPlan(task.name, model_digest, dtype, data, identity)


@functools.lru_cache
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    """Return the SHA-256 of a file. Cached, since several tasks may read the file.

    `modified_ns`, the time of its last change, is only a key of the cache: a changed file is read
    again.
    """
    command_line.log(f"reading {path} ({byte_size(size)})")
    return digest(path)["sha256"]


def unfinished(plans: list[TaskPlan], output: Path, overwrite: bool) -> list[TaskPlan]:
    """Return the plans without results in the output directory, or all if `overwrite`; log the
    finished tasks.

    Raises FileError if the directory holds results of another model.
    """
    remaining = []
    for plan in plans:
        finished = _finished_tasks(output, plan)
        # A result of other settings or data has another identity, and is replaced.
        is_current = plan.task in finished and finished[plan.task].identity == plan.identity
        if is_current and not overwrite:
            command_line.log(f"{plan.task} is finished already; --overwrite evaluates it again")
        else:
            remaining.append(plan)
    return remaining


def _finished_tasks(output: Path, plan: TaskPlan) -> dict[str, TaskResult]:
    """Return the results in a directory by task. Raises FileError if they are of another model than
    the plan.
    """
    try:
        results = read_results(output)
    except FileNotFoundError:
        return {}
    if plan.model_digest != results.model.digest:
        raise FileError(
            output / NAME,
            f"holds results of another model, {results.model.path:.200}",
            "choose another --output",
        )
    return results.tasks


class _Part(TypedDict):
    """A line of a file in `parts`: the value of one finished unit."""

    key: str
    value: dict[str, Any]


def read_parts(directory: Path) -> dict[str, dict]:
    """Return the values of finished units by unit key. Incomplete lines, left by killed processes,
    are ignored.
    """
    values = {}
    # One file for each rank, of this attempt and of earlier ones.
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):
                part = parse_record(line, _Part)
                values[part["key"]] = part["value"]
    return values


def append_part(directory: Path, rank: int, key: str, value: dict) -> dict:
    """Append a unit's value to the rank's file; return the value as JSON reads it back.

    Raises ValueError if the value contains infinite numbers or NaN.
    """
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key, "value": value}, allow_nan=False)
    # A newline comes first, in case a killed process left an incomplete line before.
    with open(directory / f"rank-{rank:05d}.jsonl", "ab") as file:
        file.write(f"\n{line}\n".encode())
    # Values of this attempt and those that are read from files must have the same types.
    return json.loads(line)["value"]


def hardware(device: Any) -> str:
    """Return the name of the GPU `device`; for a CPU or None, its name and number of cores."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"CPU {cpu_name()}, {os.cpu_count()} cores"


def run_task(
    task: Task,
    model: HuggingFaceModel,
    ranks: Ranks,
    output: Path,
    plan: TaskPlan,
) -> TaskResult | None:
    """Evaluate the unfinished units of a task together with the other ranks; return the result on
    rank 0, else None.

    All ranks call this with the same arguments.
    """
    started = time.monotonic()
    units = task.units(model)
    values = ranks.run_on_rank_0(lambda: read_parts(plan.parts(output)))
    remaining = [unit for unit in units if unit.key not in values]
    finished_count = len(units) - len(remaining)
    if ranks.rank == 0:
        command_line.log(f"{task.name}: {counted(len(units), 'part')}")
        if finished_count:
            command_line.log(f"{task.name}: {finished_count:,} of them already finished")

    rank_units = ranks.assign(remaining)[ranks.rank]
    rank_values = _evaluate(task, model, ranks, plan.parts(output), rank_units)
    # The values are not read from the files, because a network file system may show files of other
    # machines only after a minute.
    for gathered in ranks.gather(rank_values):
        values |= gathered
    if ranks.rank != 0:
        return None

    # `values` is in the order in which ranks returned them; `examples` has the order of the units.
    examples = {unit.key: values[unit.key] for unit in units}
    summary = task.summarize(examples, model.info)
    return TaskResult(
        settings=asdict(task.settings),
        data=plan.data,
        seconds=time.monotonic() - started,
        processes=ranks.count,
        scores=[replace(score, task=task.name) for score in summary.scores],
        details=summary.details,
        notes=summary.notes,
        examples=examples,
        dtype=plan.dtype,
        hardware=hardware(model.device),
        versions=versions_with_commit(),
        identity=plan.identity,
        parts_before=finished_count,
    )


def _evaluate(
    task: Task,
    model: HuggingFaceModel,
    ranks: Ranks,
    parts: Path,
    units: list[Unit],
) -> dict:
    """Evaluate this rank's units, and save each value at once; return the values by unit key. Rank
    0 shows progress.
    """
    # Progress is in costs, since units may differ in length.
    total_cost = round(sum(unit.cost for unit in units))
    progress = command_line.Progress(total_cost)
    finished_cost = 0.0
    values = {}
    for number, unit in enumerate(units, 1):
        with ranks.rank_0_reports():
            values[unit.key] = append_part(parts, ranks.rank, unit.key, task.evaluate(unit, model))
        finished_cost += unit.cost
        if ranks.rank == 0:
            # The lambda receives the seconds since the start, which the message does not show.
            message = f"{task.name}: {number:,} of {len(units):,} parts"
            progress.update(round(finished_cost), lambda _: message)  # noqa: B023
    if ranks.rank == 0:
        progress.end()
    return values


def add_result(
    output: Path,
    label: str,
    model: ModelRecord,
    plan: TaskPlan,
    result: TaskResult,
) -> Results:
    """Add the result of a task to `results.json` in the output directory, and remove the saved
    values of its units.

    Raises FileError if the directory now holds results of another model.
    """
    # Several evaluations may write to one directory at a time, each with other tasks. So the other
    # results are read again, under the lock.
    with locked(output):
        tasks = {**_finished_tasks(output, plan), plan.task: result}
        results = Results(label, model, time.time(), tasks)
        write_results(output, results)
    remove(plan.parts(output))
    return results


def draw(output: Path, task: Task, results: Results) -> list[Path]:
    """Draw the pictures of a task into the output directory, as PNG files; return their paths.

    A failure to draw, such as for a diverged model, is logged as a warning. Raises OSError if a
    file cannot be written.
    """
    from megatron_tape.evaluation.figures import encoding_of, model_encodings, png

    result = with_group_names(task.name, results.tasks[task.name])
    images = {}
    try:
        with model_encodings({results.label: encoding_of(results.model.config)}):
            for picture in task.draw({results.label: result}):
                images[output / f"{picture.name}.png"] = png(picture)
    except Exception as error:  # of matplotlib, for values that it cannot draw
        command_line.log(
            f"warning: pictures of {task.name} are missing ({type(error).__name__}: {error})"
        )
    # Outside of `try`, so that a full disk is an error.
    for file, image in images.items():
        write_whole(file, [image])
    return list(images)
