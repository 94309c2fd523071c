"""Run tasks on a model: share their units among the ranks, keep what is done, and write results and pictures.

Every rank appends the value of each unit it has finished to a file of its own in `parts/` of the output directory, so
that an evaluation that was interrupted continues there, on any number of processes. The files of one task lie in a
directory that is named by a digest of all that their values depend on: model, settings, data and dtype.
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
    """A task that is to be done, with what its values depend on besides its settings."""

    task: str
    model_digest: str
    dtype: str
    data: dict[str, str]
    """The digests of the files that it reads."""
    identity: str
    """A digest of all that the values of its units depend on."""

    def parts(self, output: Path) -> Path:
        """Return the directory of the values of finished units."""
        return output / "parts" / f"{self.task}-{self.identity[:16]}"


def plan_task(task: Task, model_digest: str, dtype: str) -> Planned:
    """Return what is known of a task before it is done; reads its files."""
    data = {str(path): _sha256(path, path.stat().st_size, path.stat().st_mtime_ns) for path in task.inputs()}
    # Settings name files; which of them has what contents matters, too.
    facts = [task.name, asdict(task.settings), model_digest, dtype, sorted(data.items())]
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Planned(task.name, model_digest, dtype, data, identity)


@functools.lru_cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """Return the sha256 of a file, which several tasks may read; shows how much of a large one has been read."""
    progress = command_line.Progress(size)
    found = digest(path, lambda done: progress.update(done, lambda _: f"reading {path}"))["sha256"]
    progress.end()
    return found


def unfinished(planned: list[Planned], output: Path, overwrite: bool) -> list[Planned]:
    """Return the tasks whose results are not in the output directory yet, or all if `overwrite`; say which are.

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
            command_line.say(f"{one.task} is finished already; --overwrite evaluates it again")
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
    """Return the values of finished units by their keys; a line that a killed process left unfinished is ignored."""
    values = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):
                part = parse_record(line, _Part)
                values[part["key"]] = part["value"]
    return values


def append_part(directory: Path, rank: int, key: str, value: dict[str, Any]) -> dict[str, Any]:
    """Add a unit's value to the rank's file; return it as it is read back.

    Raises ValueError if it is not plain JSON of finite numbers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"key": key, "value": value}, allow_nan=False)
    # An unfinished line of a killed process must not swallow this one.
    with open_to_append(directory / f"rank-{rank:05d}.jsonl") as file:
        file.write(f"\n{line}\n".encode())
    return json.loads(line)["value"]


def hardware(device: Any) -> str:
    """Return the name of the GPU or CPU that computes."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"CPU {cpu_name()}, {os.cpu_count()} cores"


def run_task(task: Task, model: HuggingFaceModel, ranks: Ranks, output: Path, planned: Planned) -> TaskResult | None:
    """Do the units of a task that are not done yet, together with the other ranks; return the result on rank 0.

    Of several processes each calls this with the same arguments.
    """
    started = time.monotonic()
    units = task.units(model)
    values = read_parts(planned.parts(output)) if ranks.rank == 0 else {}
    done = set(ranks.share(sorted(values)))
    left = [unit for unit in units if unit.key not in done]
    if ranks.rank == 0:
        before = f", {len(units) - len(left):,} of them done before" if len(left) < len(units) else ""
        command_line.say(f"{task.name}: {counted(len(units), 'part')}{before}")
    own = _do(task, model, ranks, planned.parts(output), ranks.shares(left)[ranks.rank])
    # Not read from their files, which a network file system may show to other machines only after a minute.
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
    """Return the values of this rank's units, each kept as soon as it is known; rank 0 tells how far it is."""
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
    """Add the result of a task to the results in the output directory, and remove the parts it was made from.

    Raises FileError if it has got results of another model in the meantime.
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
    """Draw the pictures of one task's results into the output directory; return their files.

    Pictures that cannot be drawn, as the values of a broken model may not, cost a warning. Raises OSError.
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
        command_line.say(f"warning: not all pictures of {task.name} could be drawn ({type(error).__name__}: {error})")
    return files
