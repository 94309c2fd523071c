"""What the command-line tools share: one-sentence errors, clean exits on signals, progress with an estimate."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import NoReturn

from megatron_tape.errors import EXIT_REFUSED


def counted(number: int, noun: str, several: str | None = None) -> str:
    """Return a number with its noun, as `1 step` or `1,000 steps`; `several` is a plural that adds more than an s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


class Interrupted(BaseException):
    """A signal asked the program to end; like KeyboardInterrupt, this is not an Exception."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}; nothing unfinished was left behind")
        self.number = number


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's `main` and exit with the status that it returns, if any.

    A mistake (ValueError) is reported as one sentence on stderr with exit code 2, and what the system refuses (OSError)
    with 1; so is a stdout that is closed or full, since the tool's output would be lost. SIGINT, SIGTERM and SIGHUP
    unwind the program, so that unfinished output is removed; the exit code is then 128 plus the signal's number.
    """
    output_is_lost = sys.stdout is None
    _open_closed_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        if output_is_lost:
            raise OSError("stdout is closed; redirect it to a file or to /dev/null")
        status = main()
        _flush_output()
    except Interrupted as interruption:
        _fail(str(interruption), 128 + interruption.number)
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it.
        _end(1)
    except OSError as error:
        named = error.strerror and error.filename
        _fail(f"{error.strerror}: {error.filename}" if named else error.strerror or str(error), 1)
    except ValueError as error:
        _fail(str(error), EXIT_REFUSED)
    sys.exit(status or 0)


def _open_closed_streams() -> None:
    """Open /dev/null for the standard streams that the caller has closed."""
    # A file opened later would take a closed stream's number, and what a library prints would go into it.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Without a stderr, print(file=sys.stderr) writes to stdout.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "stdout"
        raise


def _interrupt(number: int, frame: object) -> NoReturn:
    # A second signal must not interrupt the removal of unfinished files.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    _end(code)


def _end(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:
        # Python would flush again at exit and report the failure in several lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def say(message: str) -> None:
    """Print a message for the user to stderr."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def step(description: str):
    """Announce a step that does not show its progress, and print how long it took."""
    say(f"{description} ...")
    started = time.monotonic()
    yield
    say(f"{description}: done in {time.monotonic() - started:.1f} s")


class Progress:
    """A progress line on stderr: about once a second on a terminal, every ten seconds in a log.

    `total` has the same unit as `done` and serves to estimate the remaining time; None means no estimate.
    """

    def __init__(self, total: int | None):
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._interval = 1.0 if self._terminal else 10.0
        self._started = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def update(self, done: int, message: Callable[[float], str]) -> None:
        """Show `message(seconds since the start)` and the share done, unless the last line is too recent."""
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        elapsed = now - self._started
        line = message(elapsed)
        if self._total and done:
            share = min(done / self._total, 1.0)
            line += f", {share:.1%}, {duration(elapsed * (1 - share) / share)} left"
        if self._terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            say(line)

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Write seconds as days, hours, minutes and seconds, `1d 2:03:04`; negative ones count as 0."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"
