"""Measure one thing after another while there is time; what crashes or hangs must not cost the others.

A fault on a GPU spoils the whole process, and a compiler may hang, so each measurement on a GPU has its own process.
"""

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Tell = Callable[[str | dict], None]
"""Takes the name of what runs next, or the results so far."""

ATTEMPTS = 4
"""How often a measurement is begun, each time without what crashed or hung."""

GRACE = 30.0
"""Seconds after the time limit at which the running measurement is ended."""

MESSAGE_TIMEOUT = 150.0
"""Seconds without any message after which the process is killed."""


class Measurements:
    """Measurements that share a limit of time in minutes; if `apart`, each of them runs in a process of its own.

    `faulty` maps what crashed or hung to the reason; it is not tried again.
    """

    def __init__(self, minutes: float, apart: bool):
        self.started = time.monotonic()
        self.deadline = self.started + 60 * minutes
        self.apart = apart
        self.faulty: dict[str, str] = {}

    @property
    def over(self) -> bool:
        """Whether no further measurement should begin."""
        return time.monotonic() > self.deadline

    def say(self, line: str) -> None:
        """Report progress, with the time that has passed and the time that is left."""
        now = time.monotonic()
        left = max(0.0, self.deadline - now) / 60
        print(f"{now - self.started:6.1f} s, {left:.1f} min left: {line}", file=sys.stderr, flush=True)

    def run_all(
        self, work: Callable[..., None], combinations: dict[str, Any], *arguments: Any, write: Callable, show: Callable
    ) -> None:
        """Run `work` with every combination, by name, for which there is time.

        `write` is given all results whenever there are more, and `show` each combination's name and its last result.
        """
        results: list[dict] = []

        def keep(result: dict) -> None:
            results[-1] = result
            write(results)

        for done, (name, combination) in enumerate(combinations.items()):
            if self.over:
                self.say(f"no time for {', '.join(list(combinations)[done:])}; --minutes gives more")
                break
            self.say(f"{done + 1} of {len(combinations)}: {name}")
            results.append({})
            self.run(work, combination, *arguments, keep=keep)
            show(name, results[-1])

    def run(self, work: Callable[..., None], *arguments: Any, keep: Callable[[dict], None]) -> None:
        """Run `work(tell, deadline, faulty, *arguments)`; `keep` is given its results whenever there are more.

        If the process ends early, the results say so under `rejected`; what ran then is named as faulty, and everything
        is measured again without it.
        """
        for _ in range(ATTEMPTS):
            heard = _Heard(keep, self.say)
            if not self.apart:
                work(heard, self.deadline, self.faulty, *arguments)
                return
            latest = self.deadline + GRACE
            why = run_apart(work, self.deadline, self.faulty, *arguments, hear=heard, deadline=latest)
            if why is None:
                return
            running = heard.running or "everything else"
            self.say(f"{running} failed, and with it the process: {why}")
            heard.result.setdefault("rejected", {})[running] = why
            keep(heard.result)
            if not heard.running or self.over:
                return
            self.faulty[running] = why


class _Heard:
    """What a measurement has told."""

    def __init__(self, keep: Callable[[dict], None], say: Callable[[str], None]):
        self.keep, self.say = keep, say
        self.result: dict = {}
        self.running = ""
        self._said: set[str] = set()

    def __call__(self, message: str | dict) -> None:
        if isinstance(message, dict):
            self.result = message
            self.keep(message)
            return
        self.running = message
        if message not in self._said:
            self._said.add(message)
            self.say(message)


def run_apart(
    work: Callable[..., None],
    *arguments: Any,
    hear: Callable[[Any], None],
    deadline: float,
    timeout: float = MESSAGE_TIMEOUT,
) -> str | None:
    """Run `work(tell, *arguments)` in a new process and pass everything that it tells to `hear`.

    Returns None if it ended well, and otherwise why it did not: an error, a crash, no message for `timeout` seconds,
    or `deadline`, in seconds of `time.monotonic`, has passed. `work` and `arguments` must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, work, arguments))
    process.start()
    there.close()
    try:
        while True:
            left = deadline - time.monotonic()
            if not here.poll(max(0.0, min(timeout, left))):
                return "there was no time left" if left < timeout else f"was stuck for {timeout:.0f} seconds"
            try:
                told, message = here.recv()
            except EOFError:
                process.join()
                return f"its process ended with status {process.exitcode}"
            if not told:
                return message
            hear(message)
    finally:
        process.kill()
        process.join()


def _work(connection: Connection, work: Callable[..., None], arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(lambda message: connection.send((True, message)), *arguments)
        connection.send((False, None))
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"))
    # After a fault on the GPU, an orderly end could fail or hang.
    connection.close()
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
