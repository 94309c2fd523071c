"""What watches over a training process from beside it: signals, a lost claim to the run, a hang, a heartbeat.

A thread does it, as the main one may be anywhere: waiting in a collective for a rank that is gone, or in a file system
that does not answer.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_tape.run.attempts import HUNG, STALE, Attempt

POLL_SECONDS = 1.0
OWNER_SECONDS = 5.0
GRACE_SECONDS = 5.0
STARTUP_SECONDS = 3600.0
"""The least patience with imports, the index of the data, the checkpoint's checksums: everything before training."""
EXIT_INTERRUPTED = 75
EXIT_STALE = 76
EXIT_HUNG = 77
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def longest_wait(hang_timeout: float | None) -> float | None:
    """Return the seconds after which a rank that waits is ended at the latest, None for never."""
    return None if hang_timeout is None else max(hang_timeout, STARTUP_SECONDS)


class Watch:
    """Made at the very start, so that no signal is lost; `attach` follows when the attempt is known.

    SIGUSR1 and SIGTERM, and `Attempt.request_stop`, turn `stop` into the reason; the training loop looks at it between
    steps. After `hang_timeout` seconds (None: never) without `progress`, and before `begin_training` not before an
    hour, every thread's Python stack goes to `stacks-RANK.txt` in the attempt's directory and the process ends.
    """

    def __init__(self, hang_timeout: float | None):
        self.stop: str | None = None
        self._hang_timeout = longest_wait(hang_timeout)
        self._training_hang_timeout = hang_timeout
        self._attempt: Attempt | None = None
        self._rank = 0
        self._facts: dict[str, Any] = {"stage": "starting", "step": None}
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._handlers = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that was attached."""
        return self._attempt

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop = self.stop or signal.Signals(number).name

    def attach(self, attempt: Attempt, rank: int) -> None:
        """Begin to watch; rank 0 also writes the heartbeat."""
        self._attempt, self._rank = attempt, rank
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def progress(self, stage: str, step: int | None = None) -> None:
        """Note that something got done, and what comes next: a stage of the start-up, or of a step."""
        self._facts = {"stage": stage, "step": self._facts["step"] if step is None else step}
        self._since = time.monotonic()
        if self._attempt is not None and self._hang_timeout is not None:
            # Where a hang holds Python's lock the thread cannot act; this timer needs none.
            faulthandler.dump_traceback_later(self._hang_timeout + 4 * GRACE_SECONDS, exit=True)

    def begin_training(self) -> None:
        """From now on `hang_timeout` holds as it was given."""
        self.progress("training")
        self._hang_timeout = self._training_hang_timeout

    def each(self, stage: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items; taking one is progress."""
        for item in items:
            self.progress(stage)
            yield item

    def close(self) -> None:
        """Watch no longer, and give the signals back."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def record_end(self, outcome: str, message: str, error: BaseException | None = None) -> None:
        """Record how this rank ended."""
        detail = "" if error is None else "".join(traceback.format_exception(error))
        if self._attempt is not None:
            with contextlib.suppress(OSError):
                self._attempt.record_end(self._rank, outcome, message, detail)
                if self._rank == 0:
                    self._beat()

    def _watch(self) -> None:
        owner_seen = beaten = float("-inf")
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            # A full disk or a file system that stutters must not end the run.
            with contextlib.suppress(OSError):
                if now - owner_seen >= OWNER_SECONDS:
                    if not self._attempt.is_owner():
                        self._leave(STALE, EXIT_STALE, "a newer attempt has taken over this run")
                    owner_seen = now
                if self._rank == 0:
                    # One rank is enough: they agree on it after every step.
                    self.stop = self.stop or self._attempt.stop_reason()
                    if now - beaten >= OWNER_SECONDS:
                        beaten = now
                        self._beat()
            if self._hang_timeout is not None and now - self._since > self._hang_timeout:
                self._hang()

    def _beat(self) -> None:
        since = time.time() - (time.monotonic() - self._since)
        self._attempt.heartbeat(since=since, hang_timeout=self._hang_timeout, **self._facts)

    def _hang(self) -> None:
        where = f"{self._facts['stage']} (step {self._facts['step']})"
        path = self._attempt.directory / f"stacks-{self._rank:05d}.txt"
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(f"rank {self._rank} on {os.uname().nodename}, pid {os.getpid()}, while {where}\n")
            faulthandler.dump_traceback(file, all_threads=True)
            file.flush()
            os.fsync(file.fileno())
        # The first rank to end takes the others with it: let each write its stacks.
        time.sleep(GRACE_SECONDS)
        self._leave(
            HUNG,
            EXIT_HUNG,
            f"nothing happened for {self._hang_timeout:g} s (train.hang_timeout) while {where}; every rank's Python "
            f"stack is in {self._attempt.directory}",
        )

    def _leave(self, outcome: str, status: int, message: str) -> None:
        with contextlib.suppress(OSError):
            self._attempt.record_end(self._rank, outcome, message)
        print(f"error (rank {self._rank}): {message}", file=sys.stderr, flush=True)
        os._exit(status)
