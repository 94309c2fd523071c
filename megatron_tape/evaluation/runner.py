"""Run tasks on a model: distribute their units over the ranks, save values, and write results and pictures.

Every rank appends the value of each finished unit to its own file in `parts/` of the output directory, so that an
interrupted evaluation can continue, on any number of processes. The files of a task are in a directory named by a
digest of everything the values depend on: model, settings, data and dtype.
"""

from __future__ import annotations

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
    EvaluatedModel,
    Results,
    TaskResult,
    locked,
    read_results,
    write_results,
)
from megatron_tape.evaluation.task import HuggingFaceModel, Task, Unit
from megatron_tape.io.files import digest, open_to_append, remove, write_whole
from megatron_tape.io.records import parse_record
from megatron_tape.io.versions import cpu_name, versions_with_commit
from megatron_tape.text import counted


@dataclass(frozen=True)
class Planned:
    """A task to run, and what its values depend on in addition to its settings."""

    task: str
    model_digest: str
    dtype: str
    data: dict[str, str]
    """Digests of the files it reads."""
    identity: str
    """Digest of everything its values depend on."""

    def parts(self, output: Path) -> Path:
        """Return the directory with the values of finished units."""
        return output / "parts" / f"{self.task}-{self.identity[:16]}"


def plan_task(task: Task, model_digest: str, dtype: str) -> Planned:
    """Return the plan of a task; reads its files."""
    data = {str(path): _sha256(path, path.stat().st_size, path.stat().st_mtime_ns) for path in task.inputs()}
    # Settings name the files; the paths here tell which file has which contents.
    facts = [task.name, asdict(task.settings), model_digest, dtype, sorted(data.items())]
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Planned(task.name, model_digest, dtype, data, identity)


@functools.lru_cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """Return the SHA-256 of a file; shows progress. Cached, since several tasks may read a file."""
    progress = command_line.Progress(size)
    found = digest(path, lambda done: progress.update(done, lambda _: f"reading {path}"))["sha256"]
    progress.end()
    return found


def unfinished(planned: list[Planned], output: Path, overwrite: bool) -> list[Planned]:
    """Return the tasks without results in the output directory, or all if `overwrite`; log the others.

    Raises FileError if the directory holds results of another model.
    """
    try:
        results = read_results(output)
    except FileNotFoundError:
        return planned
    left = []
    for one in planned:
        _check_same_model(output, results, one)
        finished = one.task in results.tasks and results.tasks[one.task].identity == one.identity
        if finished and not overwrite:
            command_line.log(f"{one.task} is finished already; --overwrite evaluates it again")
        else:
            left.append(one)
    return left


def _check_same_model(output: Path, results: Results, planned: Planned) -> None:
    if planned.model_digest != results.model.digest:
        problem = f"holds results of another model, {results.model.path:.200}"
        raise FileError(str(output / NAME), problem, "choose another --output")


class _Part(TypedDict):
    key: str
    value: dict[str, Any]


def read_parts(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the values of finished units by key. An incomplete line of a killed process is ignored."""
    values = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):
                part = parse_record(line, _Part)
                values[part["key"]] = part["value"]
    return values


def append_part(directory: Path, rank: int, key: str, value: dict[str, Any]) -> dict[str, Any]:
    """Append a unit's value to the rank's file; return the value as it will be read back.

    Raises ValueError unless it is plain JSON with finite numbers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key, "value": value}, allow_nan=False)
    # Starts with a newline, in case a killed process left an incomplete line.
    with open_to_append(directory / f"rank-{rank:05d}.jsonl") as file:
        file.write(f"\n{line}\n".encode())
    return json.loads(line)["value"]


def hardware(device: Any) -> str:
    """Return the name of the GPU or CPU."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"CPU {cpu_name()}, {os.cpu_count()} cores"


def run_task(task: Task, model: HuggingFaceModel, ranks: Ranks, output: Path, planned: Planned) -> TaskResult | None:
    """Evaluate the unfinished units of a task together with the other ranks; return the result on rank 0.

    All processes call this with the same arguments.
    """
    started = time.monotonic()
    units = task.units(model)
    values = read_parts(planned.parts(output)) if ranks.rank == 0 else {}
    done = set(ranks.share(sorted(values)))
    left = [unit for unit in units if unit.key not in done]
    if ranks.rank == 0:
        before = f", {len(units) - len(left):,} of them done before" if len(left) < len(units) else ""
        command_line.log(f"{task.name}: {counted(len(units), 'part')}{before}")
    own = _do(task, model, ranks, planned.parts(output), ranks.shares(left)[ranks.rank])
    # Gathered instead of read: a network file system may show files of other machines only after a minute.
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return None
    for part in gathered:
        values |= part
    examples = {unit.key: values[unit.key] for unit in units}
    summary = task.summarize(examples, model.info)
    return TaskResult(
        settings=asdict(task.settings),
        data=planned.data,
        seconds=time.monotonic() - started,
        processes=ranks.count,
        scores=[replace(score, task=task.name) for score in summary.scores],
        details=summary.details,
        notes=summary.notes,
        examples=examples,
        dtype=planned.dtype,
        hardware=hardware(model.device),
        versions=versions_with_commit(),
        identity=planned.identity,
        parts_before=len(units) - len(left),
    )


def _do(task: Task, model: HuggingFaceModel, ranks: Ranks, parts: Path, share: list[Unit]) -> dict[str, Any]:
    """Evaluate this rank's units, saving each value at once; rank 0 shows progress."""
    progress = command_line.Progress(1_000_000) if ranks.rank == 0 and share else None
    whole, finished, values = sum(unit.cost for unit in share), 0.0, {}
    for number, unit in enumerate(share, 1):
        with ranks.alone():
            values[unit.key] = append_part(parts, ranks.rank, unit.key, task.evaluate(unit, model))
        finished += unit.cost
        if progress is not None:
            shown = f"{task.name}: {number:,} of {len(share):,} parts"
            progress.update(round(1_000_000 * finished / whole), lambda _: shown)  # noqa: B023
    if progress is not None:
        progress.end()
    return values


def record(output: Path, label: str, model: EvaluatedModel, planned: Planned, result: TaskResult) -> Results:
    """Add the result of a task to the results in the output directory, and remove its parts.

    Raises FileError if the directory now holds results of another model.
    """
    with locked(output):
        try:
            before = read_results(output)
            _check_same_model(output, before, planned)
            tasks = before.tasks
        except FileNotFoundError:
            tasks = {}
        results = Results(label, model, time.time(), {**tasks, planned.task: result})
        write_results(output, results)
    remove(planned.parts(output))
    return results


def draw(output: Path, task: Task, results: Results) -> list[Path]:
    """Draw the pictures of a task into the output directory; return their files.

    A picture that cannot be drawn, such as from a diverged model, is a warning. Raises OSError.
    """
    from megatron_tape.evaluation.figures import encoding_of, model_encodings, png

    files = []
    try:
        with model_encodings({results.label: encoding_of(results.model.config)}):
            for picture in task.draw({results.label: results.tasks[task.name]}):
                write_whole(output / f"{picture.name}.png", [png(picture)])
                files.append(output / f"{picture.name}.png")
    except OSError:
        raise
    except Exception as error:
        command_line.log(f"warning: not all pictures of {task.name} could be drawn ({type(error).__name__}: {error})")
    return files
