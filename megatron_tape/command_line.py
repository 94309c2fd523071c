"""What the command-line tools share: one-sentence errors, clean exits on signals, progress with an estimate."""

import argparse
import codecs
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
from megatron_tape.errors import EXIT_REFUSED, ConfigError, UserError
from megatron_tape.home import expand_home, provide_caches
from megatron_tape.text import duration, printable


class Parser(argparse.ArgumentParser):
    """The command line of a program: mistakes raise ConfigError, options are written out, descriptions shown as is.

    A `~` at the beginning of an argument becomes the home directory, unless its option has a type other than Path. So
    texts that are no paths and may begin with one have `type=str`. An existing file `~name`, as a shell's `*` gives it,
    is not taken for a user's home directory.
    """

    command: ClassVar[str | None] = None
    """The installed command that runs, such as tape-train; None for `python -m`."""

    def __init__(self, **arguments: Any):
        # A parser of a subcommand has its parent's name already.
        if self.command and not (arguments.get("prog") or "").startswith(self.command):
            arguments["prog"] = self.command
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | arguments)
        version = f"megatron-tape {__version__}"
        self.add_argument("--version", action="version", version=version, help="show the version and exit")
        self.register("type", None, lambda text: _expanded(text))
        self.register("type", Path, path)

    def add_subparsers(self, **arguments: Any):
        """Add subparsers; they are given the arguments as they stand, and expand those of their own."""
        subparsers = super().add_subparsers(**arguments)
        subparsers.type = str  # argparse takes all later arguments for values of this one
        return subparsers

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the reason of argparse."""
        raise ConfigError("the command line", f"cannot be read: {message}", "see --help")


def path(text: str) -> Path:
    """Read an option that is a path, which may begin with `~`."""
    return Path(_expanded(text))


def _expanded(text: str) -> str:
    if not text.startswith("~/") and text != "~" and os.path.lexists(text):
        return text
    try:
        return expand_home(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(text: str) -> int:
    """Read an option that is a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


class Interrupted(BaseException):
    """A signal asked the program to end; like KeyboardInterrupt, this is not an Exception."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


REPORT_TIMEOUT = 5.0
"""Seconds that rank 0 has to say what is wrong before other ranks end."""
UNTOUCHED = "nothing unfinished was left behind"
"""What most programs can say when they are interrupted."""


def run(main: Callable[[], int | None], unavailable: int = 1, interrupted: str = UNTOUCHED) -> NoReturn:
    """Run a program's `main` and exit with the status that it returns, if any, or that of `status_of`.

    A stdout that is full counts as what the system refuses, since the program's output would be lost. SIGINT, SIGTERM
    and SIGHUP unwind the program, so that unfinished output is removed; the exit status is then 128 plus the
    signal's number.
    """
    escape_unprintable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)

    def whole() -> int | None:
        provide_caches()
        status = main()
        _flush_output()
        return status

    status = status_of(whole, unavailable, interrupted)
    if status:
        _end_output()
    sys.exit(status)


def status_of(main: Callable[[], int | None], unavailable: int = 1, interrupted: str = UNTOUCHED) -> int:
    """Return the exit status of a program's `main`, and report its error, if any, as one sentence on stderr.

    It is EXIT_REFUSED after a mistake (ValueError), `unavailable` after what the system refuses (OSError), and 1 where
    memory runs out or Rust code panics. The sentence about a signal ends with what `interrupted` says.
    """
    try:
        return main() or 0
    except Interrupted as interruption:
        sentence = f"ended by {signal.Signals(interruption.number).name}; {interrupted}"
        status = 128 + interruption.number
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        return 1
    except OSError as error:
        named = error.strerror and error.filename
        sentence = f"{error.strerror}: {error.filename}" if named else error.strerror or " ".join(str(error).split())
        status = unavailable
    except UserError as error:
        sentence, status = str(error), EXIT_REFUSED
    except ValueError as error:  # of a library, perhaps in several lines
        sentence, status = " ".join(str(error).split()), EXIT_REFUSED
    except BaseException as error:
        if (sentence := describe_fatal_error(error)) is None:
            raise
        status = 1
    with suppress(OSError):
        say(printable(f"error: {sentence}", one_line=True))
    return status


def describe_fatal_error(error: BaseException) -> str | None:
    """Return a sentence for an error that any call may raise: memory that runs out, or a panic of Rust code."""
    reason, name = " ".join(str(error).split())[:300], type(error).__name__
    # torch, which need not be imported, has errors of its own.
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in reason:
        reason = f" ({reason})" if reason else ""
        return f"memory ran out{reason}; use smaller inputs or settings, or give the program more memory"
    if name == "PanicException":  # a BaseException
        return f"a library failed ({reason}); one of the input files is damaged, or the library has a bug"
    return None


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the process as `run` does if a mistake is found, in a program of many ranks, which has its own signals."""
    escape_unprintable()
    try:
        yield
    except UserError as error:
        print_error(error)
        raise SystemExit(EXIT_REFUSED) from None
    except BaseException as error:
        if (sentence := describe_fatal_error(error)) is None:
            raise
        print_error(sentence)
        raise SystemExit(1) from None


def print_error(error: UserError | str) -> None:
    """Print a mistake, which mostly every rank of a program finds; all but rank 0 wait before they do."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # A launcher ends all ranks once one has ended, but rank 0 must be heard.
        time.sleep(REPORT_TIMEOUT)
    say(f"error{'' if rank == '0' else f' (rank {rank})'}: {error}")


def escape_unprintable() -> None:
    """Escape what is printed to stdout and stderr: control characters, and what their encoding cannot hold.

    A name from an untrusted file could otherwise change what a terminal shows; an é where PYTHONIOENCODING=ascii would
    raise an error, after hours that went into making a text.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.errors in ("strict", "surrogateescape"):
            strict = stream.errors == "strict"
            stream.reconfigure(errors="backslashreplace" if strict else _ESCAPE_OR_RESTORE)
        stream.write = functools.partial(_write_printable, stream)


_MOVES, _COLORS = re.compile(r"(\n|\x1b\[A)*"), re.compile(r"\x1b\[[0-9;]*m")
"""What tqdm writes to move between several bars, and how libraries color their warnings."""


def _write_printable(stream: io.TextIOWrapper, text: str) -> int:
    # Data is printed to stdout, and escapes of colors in it are shown.
    without_colors = _COLORS.sub("", text) if stream is sys.stderr else text
    type(stream).write(stream, text if _MOVES.fullmatch(text) else printable(without_colors))
    return len(text)


def _escape_or_restore(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write the bytes that Python has read as surrogates, such as those of a file's name, and escape other text."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


_ESCAPE_OR_RESTORE = "megatron_tape.escape_or_restore"
codecs.register_error(_ESCAPE_OR_RESTORE, _escape_or_restore)


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


def _end_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # Python would flush again at exit and report the failure in several lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
            line += f", {share:.1%}"
            if share >= 0.01 or elapsed > 60:  # before that, most of the time went into starting
                line += f", {duration(elapsed * (1 - share) / share)} left"
        if self._terminal:
            self._rewrite(line)
        else:
            say(line)

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._terminal:
            self._rewrite("")

    def _rewrite(self, line: str) -> None:
        # With the class's method, which does not escape the sequence that clears the line.
        type(sys.stderr).write(sys.stderr, f"\r\033[K{printable(line, one_line=True)}")
        sys.stderr.flush()
