"""Programs that a benchmark starts, so that a fault or a hang in one of them does not end the others."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 10.0
"""Seconds that a program has to end after SIGTERM."""


def follow(
    command: list[str], environment: dict[str, str], seconds: float, on_line: Callable[[str], None]
) -> int | None:
    """Run a program in the repository's root and pass on every line that it writes, without its end.

    Returns its exit status, or None if it took more than `seconds` and was ended. Whatever ends this call also ends the
    program.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()

    timer = threading.Timer(max(0.0, seconds), end)
    timer.start()
    try:
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        status = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    return None if late.is_set() else status
