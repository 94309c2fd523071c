"""Programs that report one result after another, started so that a fault or a hang ends none but the one it is in.

Such a program writes a JSON object per line: `{"begins": NAME}` before a check, `{"name": NAME, "passed": ...}` after
it, and `{"finished": true}` at the end. What else it writes is kept as the last lines of the check that fails.
"""

import json
import os
import subprocess
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GRACE = 10.0
"""Seconds that a program has to end after SIGTERM."""
LAST_LINES = 25
"""Lines that are kept of what a program writes during a check that fails."""
BROKEN = 3
"""Exit status of a program that ends because its device can no longer be trusted."""

Check = dict[str, Any]


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
        env=environment | {"PYTHONUNBUFFERED": "1"},
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


@dataclass
class _Seen:
    """What a program has reported since it started."""

    checks: int = 0
    running: str | None = None
    finished: bool = False
    last: deque = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def run_checks(
    command: Callable[[int], list[str]], environment: dict[str, str], deadline: float, add: Callable[[Check], None]
) -> bool:
    """Run a program that reports checks, and pass each one to `add`; return whether it finished them.

    `command` takes the number of checks to skip: behind a check that ends its process, another process goes on with the
    next one. Nothing runs on after `deadline`, as `time.monotonic` counts.
    """
    skip = 0
    while (left := deadline - time.monotonic()) > 0:
        seen = _Seen()
        status = follow(command(skip), environment, left, lambda line, seen=seen: _read(line, seen, add))
        skip += seen.checks
        if seen.finished:
            return True
        why = "no time was left for it" if status is None else f"its process ended with status {status}"
        failure = {"passed": False, "why": f"{why}: {seen.last[-1]}" if seen.last else why}
        failure |= {"last_lines": list(seen.last)}
        if seen.running is not None:
            add({"name": seen.running, **failure})
            skip += 1
        elif not seen.checks and status is not None:
            add({"name": "the start", **failure})
            break
        if status is None:
            break
    return False


def _read(line: str, seen: _Seen, add: Callable[[Check], None]) -> None:
    try:
        message = json.loads(line) if line.startswith("{") else None
    except ValueError:
        message = None
    if not isinstance(message, dict) or not message.keys() & {"begins", "name", "finished"}:
        seen.last.append(line)
    elif "begins" in message:
        seen.running = message["begins"]
        seen.last.clear()
    elif "finished" in message:
        seen.finished = True
    else:
        seen.running, seen.checks = None, seen.checks + 1
        if not message["passed"] and seen.last:
            message = {"last_lines": list(seen.last)} | message
        add(message)


def report(
    checks: Iterable[tuple[str, Callable[[], Check]]],
    skipped: int,
    measure: Callable[[], Check] = dict,
    speaks: bool = True,
) -> int:
    """Run and report checks, in a program of its own, behind those to skip; return the exit status.

    A check returns its results, with `passed` unless it has passed. One that raises an error has failed, and the next
    one follows, unless CUDA no longer works. `measure` returns more about the check that has just run. Of several
    processes that do the same, only one `speaks`.
    """

    def tell(message: Check) -> None:
        if speaks:
            print(json.dumps(message), flush=True)

    for index, (name, run) in enumerate(checks):
        if index < skipped:
            continue
        tell({"begins": name})
        started, broken = time.perf_counter(), False
        try:
            result = {"passed": True} | run()
        except Exception as error:  # a compiler may raise anything
            lines = traceback.format_exception(error)[-6:]
            result = {"passed": False, "why": reason(error), "traceback": "".join(lines).splitlines()[-LAST_LINES:]}
            broken = not _cuda_works()
        seconds = round(time.perf_counter() - started, 2)
        tell({"name": name, **result, "seconds": seconds, **measure(), **({"fault": True} if broken else {})})
        if broken:
            return BROKEN
    tell({"finished": True})
    return 0


def _cuda_works() -> bool:
    """Return whether the GPU, if there is one, still answers: after a fault every call fails."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def reason(error: Exception) -> str:
    """Describe an error by its first and its last line: a compiler shows the source in between."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"[:600]


def environment_of_cpu() -> dict[str, str]:
    """Return this process's environment without its GPUs, where Triton interprets kernels."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}


def environment_of_gpu() -> dict[str, str]:
    """Return this process's environment for exact comparisons: fp32 without TF32, which some images switch on."""
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return os.environ | exact
