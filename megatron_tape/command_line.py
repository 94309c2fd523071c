"""Code that all programs share: options, errors in one sentence, clean exits on signals, progress
lines.
"""

import argparse
import errno
import functools
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from megatron_tape import __version__
from megatron_tape.errors import EXIT_REFUSED, ConfigError, UserError, one_line
from megatron_tape.home import expand_home, provide_caches, refuse_address
from megatron_tape.text import duration, printable


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, rejects abbreviated options and does not rewrap
    descriptions.

    An argument that has no type or the type Path is a path: a leading `~` becomes the home
    directory, and an address such as `s3://bucket/run` is refused. An argument `~name` is not
    changed if a file of that name exists. Use `type=str` for text that is not a path.
    """

    command: ClassVar[str | None] = None
    """The installed command that was started, such as `tape-train`; None under `python -m`."""

    def __init__(self, **arguments: Any):
        # Show the name of the command instead of that of the file. The `prog` of a subcommand
        # already begins with it.
        if self.command and not (arguments.get("prog") or "").startswith(self.command):
            arguments["prog"] = self.command
        arguments.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **arguments)
        version = f"megatron-tape {__version__}"
        self.add_argument(
            "--version", action="version", version=version, help="show the version and exit"
        )
        # argparse looks up the type of each argument here; None is that of arguments without one.
        self.register("type", None, _expanded)
        self.register("type", Path, path)

    def add_subparsers(self, **arguments: Any):
        """Add subcommands as argparse does; each expands `~` in its own arguments."""
        subparsers = super().add_subparsers(**arguments)
        subparsers.type = str  # its values include the arguments, which the subcommand expands
        return subparsers

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        raise ConfigError("the command line", f"cannot be read: {message}", "see --help")


def path(text: str) -> Path:
    """Parse a path option, which may begin with `~`."""
    return Path(_expanded(text))


def _expanded(text: str) -> str:
    """Return a path with a leading `~` expanded, unless a file of that name exists. Raises
    ArgumentTypeError for an address, to which argparse adds the name of the option.
    """
    try:
        refuse_address(text)
        # A file may be called ~name, but ~ and ~/ are always the home directory.
        if not text.startswith("~/") and text != "~" and os.path.lexists(text):
            return text
        return expand_home(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(text: str) -> int:
    """Parse the value of an option as an integer of at least 1. Raises ValueError or
    ArgumentTypeError, which argparse reports.
    """
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def add_rope_scaling(add: Callable[..., Any]) -> None:
    """Add the options that scale a model's positions, which `extension.rope_scaling.read_options`
    reads. `add` is `add_argument` of a parser.
    """
    add(
        "--rope-scaling",
        choices=("linear", "llama3", "yarn"),
        help="scale the positions of a model with rope, tape or repo for longer texts, without"
        " training; a model that has a scaling keeps its type (default: the model as it is)",
    )
    add(
        "--rope-scaling-factor",
        type=float,
        metavar="F",
        help="with --rope-scaling: new context length divided by the model's own; multiplies the"
        " factor of a model that has a scaling",
    )


class Interrupted(BaseException):
    """Raised in a program when signal `number` arrives. `except Exception` does not catch it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


LASTING_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
LASTING_ERRORS |= {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a file system that responds: a full disk, missing rights, and impossible paths."""
REPORT_TIMEOUT = 5.0
"""Seconds that ranks other than 0 wait before they report an error, so that rank 0 reports first.
"""
UNTOUCHED = "nothing unfinished was left behind"
"""Default end of the message after a signal."""


def run(
    main: Callable[[], int | None], unavailable: int = 1, interrupted: str = UNTOUCHED
) -> NoReturn:
    """Run a program's `main`, report its error, if any, in one sentence on stderr, and exit.
    `status_of` describes the arguments and the exit statuses.

    SIGINT, SIGTERM and SIGHUP raise Interrupted in `main`, so that its context managers remove
    unfinished output. Failing to write stdout, for example to a full disk, counts as an OSError of
    `main`.
    """
    escape_unprintable()
    # A signal that is ignored from the start stays ignored, since a parent such as nohup wants the
    # program to survive it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)

    # `status_of` also reports the errors of the steps before and after `main`.
    def flushed_main() -> int | None:
        provide_caches()
        status = main()
        _flush_output()
        return status

    status = status_of(flushed_main, unavailable, interrupted)
    # After an error, `main` may have left output that is not flushed.
    if status:
        _end_output()
    sys.exit(status)


def status_of(
    main: Callable[[], int | None], unavailable: int = 1, interrupted: str = UNTOUCHED
) -> int:
    """Run a program's `main`, report its error, if any, as one sentence on stderr, and return the
    exit status:

    - the value that `main` returns, or 0 for None;
    - EXIT_REFUSED after a ValueError, such as a UserError;
    - `unavailable` after an OSError that may pass within minutes, and 1 after one of
      `LASTING_ERRORS`;
    - 128 + N after signal N, as in a shell, with a message that ends with `interrupted`;
    - 1 after a broken pipe or an out-of-memory error.

    Other errors are raised.
    """
    try:
        return main() or 0
    except Interrupted as interruption:
        sentence = f"ended by {signal.Signals(interruption.number).name}; {interrupted}"
        status = 128 + interruption.number
    except BrokenPipeError:  # the reader, such as `head`, has closed stdout
        return 1
    except OSError as error:
        sentence = error.strerror or str(error)
        if error.strerror and error.filename:
            sentence = f"{error.strerror}: {error.filename}"
        status = 1 if error.errno in LASTING_ERRORS else unavailable
    except UserError as error:
        sentence = str(error)
        status = EXIT_REFUSED
    except ValueError as error:  # a library's message, possibly of several lines
        sentence = " ".join(str(error).split())
        status = EXIT_REFUSED
    except Exception as error:
        sentence = describe_fatal_error(error) or ""
        if not sentence:
            raise
        status = 1
    log(printable(f"error: {sentence}", one_line=True))
    return status


def describe_fatal_error(error: BaseException) -> str | None:
    """Return one sentence about an out-of-memory error, and None for any other error."""
    reason = one_line(error)
    # torch's own error is recognized by its name, since torch may not be imported. On a CPU, torch
    # raises a RuntimeError with this message.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in reason:
        fix = "use smaller inputs or settings, or give the program more memory"
        return f"memory ran out ({reason}); {fix}"
    return None


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Report a UserError or out-of-memory error in the block as `run` does, and exit; raise other
    errors.

    For programs that run on many ranks and install their own signal handlers.
    """
    escape_unprintable()
    try:
        yield
    except UserError as error:
        print_error(error)
        raise SystemExit(EXIT_REFUSED) from None
    except Exception as error:
        if (sentence := describe_fatal_error(error)) is None:
            raise
        print_error(sentence)
        raise SystemExit(1) from None


def print_error(error: UserError | str) -> None:
    """Print an error to stderr; ranks other than 0 first wait REPORT_TIMEOUT, since most errors
    occur on every rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        log(f"error: {error}")
        return
    # A launcher ends all ranks as soon as one exits, so rank 0 must print first.
    time.sleep(REPORT_TIMEOUT)
    log(f"error (rank {rank}): {error}")


def escape_unprintable() -> None:
    """Make stdout and stderr escape control characters, and characters that their encoding cannot
    represent.

    Without this, a name from an untrusted file could change what a terminal shows. If
    PYTHONIOENCODING is ascii, an é could raise an error at the end of a long run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            # The encoding can represent control characters, so `errors` does not escape them.
            stream.write = functools.partial(_write_printable, stream)


_MOVES = re.compile(r"(\n|\x1b\[A)*")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""Moves of the cursor between tqdm's bars (`\\x1b[A` is one line up), which are printed unchanged,
and color codes such as `\\x1b[31m`, which are removed on stderr.
"""


def _write_printable(stream: io.TextIOWrapper, text: str) -> int:
    """Write `text` with control characters escaped, in place of the stream's method `write`.
    Return the number of characters of `text`.
    """
    shown = text
    # Stdout carries data, so color codes in it are escaped instead of removed.
    if stream is sys.stderr:
        shown = _COLORS.sub("", text)
    if not _MOVES.fullmatch(text):
        shown = printable(shown)
    # The stream's own attribute `write` is this function, so call the method of its class.
    type(stream).write(stream, shown)
    return len(text)


def _flush_output() -> None:
    """Write what stdout still buffers. Raises OSError with the file name `stdout` if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "stdout"
        raise


def _interrupt(number: int, frame: object) -> NoReturn:
    """Raise Interrupted, as a signal handler."""
    # A second signal must not interrupt the removal of unfinished files.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _end_output() -> None:
    """Flush stdout before an exit after an error, and redirect it to /dev/null if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes again at exit. To /dev/null, this does not fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def log(message: str) -> None:
    """Print a message to stderr, unless that fails, such as on a full disk."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


@contextmanager
def step(description: str):
    """Print the description of a step before the block, and its duration after the block."""
    log(f"{description} ...")
    started = time.monotonic()
    yield
    log(f"{description}: done in {time.monotonic() - started:.1f} s")


class Progress:
    """A progress line on stderr, updated about once a second on a terminal and every ten seconds in
    a log.

    `total` is the value of `done` at the end, in any unit, such as bytes. None means that it is not
    known: the percentage and the time left are then not shown. `start` is the value of `done` at
    the beginning, such as the part that an earlier run has completed.
    """

    def __init__(self, total: int | None, start: int = 0):
        self._total = total
        self._start = start
        self._is_terminal = sys.stderr.isatty()
        self._interval = 1.0 if self._is_terminal else 10.0
        self._started = self._last_update = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def update(self, done: int, message: Callable[[float], str]) -> None:
        """Show `message(seconds since the start)`, the percentage done and the time left, if an
        update is due.
        """
        now = time.monotonic()
        if now - self._last_update < self._interval:
            return
        self._last_update = now
        elapsed = now - self._started
        line = message(elapsed)
        # `total` may be an estimate that is too small, so fractions are at most 1.
        if self._total and done > self._start:
            line += f", {min(done / self._total, 1.0):.1%}"
            # The fraction done since `start`, since `elapsed` lacks the time of an earlier run.
            fraction = min((done - self._start) / (self._total - self._start), 1.0)
            # At first, startup takes most of the time, so the time left cannot be estimated.
            if fraction >= 0.01 or elapsed > 60:
                line += f", {duration(elapsed * (1 - fraction) / fraction)} left"
        if self._is_terminal:
            self._rewrite(line)
        else:
            log(line)

    def end(self) -> None:
        """Remove the progress line from a terminal."""
        if self._is_terminal:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        """Replace the current line of the terminal."""
        # `sys.stderr.write` may be `_write_printable`, which would escape the codes `\r\033[K` that
        # clear the line. The method of the class does not.
        type(sys.stderr).write(sys.stderr, f"\r\033[K{printable(line, one_line=True)}")
        sys.stderr.flush()
