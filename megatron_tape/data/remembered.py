"""Checks that read whole files and passed are not repeated while the files stay what they were. Imports no torch."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape.io.files import fingerprint
from megatron_tape.io.records import read_record, write_record


class _Passed(TypedDict):
    check: str
    files: dict[str, list[int | str]]


def check_once(
    check: str, files: Sequence[str | Path], directory: str | None, find: Callable[[], str | None]
) -> str | None:
    """Return what `find` finds wrong with the files, or None if it found nothing in the same files before.

    They are the same if their sizes, times of change (which copying cannot preserve) and digests of evenly spaced
    blocks are. What has passed is remembered in `directory`, if that is given and can be written, under `check`, which
    names a version of the check.
    """
    if directory is None:
        return find()
    try:
        passed = {"check": check, "files": {os.path.abspath(path): _state(path) for path in files}}
    except OSError:
        return find()
    names = "\n".join([check, *passed["files"]])
    record = Path(directory) / f"checked-{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        if read_record(record, _Passed) == passed:
            return None
    problem = find()
    if problem is None:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_record(record, passed, durable=False)
    return problem


def _state(path: str | Path) -> list[Any]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, fingerprint(path)]
