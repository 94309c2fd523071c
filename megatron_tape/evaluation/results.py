"""`results.json`: what an evaluation found, and everything that is needed to judge it. Imports no torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from megatron_tape.io.records import read_record, write_record

FORMAT = 1
NAME = "results.json"
_BYTES = 1 << 30


class Model(TypedDict):
    """The model that was evaluated; `run` holds the settings and the step of a checkpoint."""

    path: str
    digest: str
    parameters: int
    trained_length: int | None
    config: dict[str, Any]
    run: dict[str, Any] | None


class _Recorded(TypedDict):
    metric: str
    value: float
    better: str


class Score(_Recorded, total=False):
    """A score, as `evaluation.base.Score` describes it."""

    length: int | None
    group: str
    low: float | None
    high: float | None
    count: int | None
    unit: str


class _TaskResult(TypedDict):
    settings: dict[str, Any]
    data: dict[str, str]
    seconds: float
    processes: int
    scores: list[Score]
    details: dict[str, Any]
    notes: list[str]
    examples: dict[str, Any]


class TaskResult(_TaskResult, total=False):
    """The outcome of one task; `identity` is a digest of all that it depends on.

    `parts_before` counts the parts that were done before an interruption, whose time is not in `seconds`.
    """

    identity: str
    parts_before: int
    dtype: str
    hardware: str
    versions: dict[str, str]


class Results(TypedDict):
    """The contents of `results.json`."""

    format: int
    label: str
    created: float
    model: Model
    versions: dict[str, str]
    hardware: str
    dtype: str
    tasks: dict[str, TaskResult]


def results_file(path: str | Path) -> Path:
    """Return the file that is meant by itself or by the directory that holds it."""
    path = Path(path)
    return path / NAME if path.is_dir() else path


def read_results(path: str | Path) -> Results:
    """Read a results file, or that of a directory. Raises OSError, or ValueError that names the file."""
    file = results_file(path)
    results = read_record(file, Results, _BYTES)
    if results["format"] != FORMAT:
        raise ValueError(
            f"{file} cannot be used: it has the format {results['format']}, and this version reads {FORMAT}; update "
            "this project, or evaluate again"
        )
    return results


def write_results(directory: Path, results: Results) -> None:
    """Replace the results in a directory, whole or not at all."""
    write_record(directory / NAME, results)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes of this project from changing the results in a directory meanwhile."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
