"""Errors that are shown to users as one sentence: subject (such as a setting's key), problem and
fix.
"""

from pathlib import Path

from megatron_tape.text import printable

EXIT_REFUSED = 2
"""Exit status for invalid input, which a retry cannot fix."""
EXIT_RESTART = 75
"""Exit status of an unfinished program, which continues when the same command runs again."""
EXIT_DIVERGED = 78
"""Exit status of a training that has diverged, and would diverge again."""


_LONGEST = 10_000
"""Maximum characters of a message, which may quote the contents of a file."""


def one_line(error: BaseException) -> str:
    """Return the first 300 characters of an error's message as one line, or the name of its type if
    it has no message.
    """
    return " ".join(str(error).split())[:300] or type(error).__name__


class UserError(ValueError):
    """An error that a user can fix; `str()` returns `place: subject problem; fix`.

    Code that handles the error must read its attributes instead of parsing the message.
    """

    def __init__(
        self, subject: str | Path | tuple[str, ...], problem: str, fix: str = "", place: str = ""
    ):
        """Create an error.

        Args:
            subject: what the error is about: a setting's key, a file or a checkpoint. A tuple lists
                all subjects that the problem depends on; the message shows only the first.
            problem: what is wrong, as the continuation of a sentence that starts with the subject.
            fix: what the user can do, as an imperative.
            place: where the subject was set, such as `recipe.yaml:12`.
        """
        # pickle copies an error to another process by calling the class with these arguments.
        super().__init__(subject, problem, fix, place)
        self.subjects = subject if isinstance(subject, tuple) else (str(subject),)
        self.problem = problem
        self.fix = fix
        self.place = place

    @property
    def subject(self) -> str:
        """The subject, or the first one of several."""
        return self.subjects[0]

    def at(self, place: str) -> "UserError":
        """Return a copy of this error with another `place`."""
        return type(self)(self.subjects, self.problem, self.fix, place)

    def __str__(self) -> str:
        # The subject may be empty.
        message = " ".join(filter(None, (self.subject, self.problem)))
        if self.place:
            message = f"{self.place}: {message}"
        if self.fix:
            message = f"{message}; {self.fix}"
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]} ..."
        # A path or a value from a file may contain control characters.
        return printable(message, one_line=True)


class ConfigError(UserError):
    """An invalid setting. Its subject is the setting's key, `section.key`."""

    @property
    def key(self) -> str:
        """The key of the invalid setting."""
        return self.subject


class FileError(UserError):
    """A file or directory that cannot be used. Its subject is the path."""


class CheckpointError(FileError):
    """A checkpoint that cannot be used, or could not be written. Its subject is the path."""


class UnexpectedCheckpointError(CheckpointError):
    """A failure with an unforeseen error, such as a bug: none of the file system, of memory or of
    the input. A retry would fail, too.
    """


class NodeError(UserError):
    """Something failed on some nodes and works on the others. The subjects are the names of the
    failing nodes.
    """


class StaleAttempt(RuntimeError):
    """A newer attempt has taken over the run; this one must exit without writing anything."""


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message is the reason."""


class Diverged(TrainingStopped):
    """The loss or the gradients are no longer finite, or there were too many spikes."""
