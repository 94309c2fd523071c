"""The errors shown to users: subject (such as a setting's key), problem and fix, formatted as one sentence."""

from megatron_tape.text import printable

EXIT_REFUSED = 2
"""Exit status for invalid input, which a retry cannot fix."""
EXIT_RESTART = 75
"""Exit status of a program that continues if it is restarted."""


_LONGEST = 10_000
"""Maximum characters of a message, which may quote the contents of a file."""


class UserError(ValueError):
    """An error with structured parts; `str()` returns `place: subject problem; fix`.

    Code that handles an error must use its parts instead of parsing the message.
    """

    def __init__(self, subject: str | tuple[str, ...], problem: str, fix: str = "", place: str = ""):
        """Create an error.

        Args:
            subject: what the error is about: a setting's key, a file, a checkpoint. If there are several, the message
                starts with the first; the problem also depends on the others.
            problem: what is wrong, as the continuation of a sentence that starts with the subject.
            fix: how to fix it.
            place: where the subject was given, such as `recipe.yaml:12`.
        """
        super().__init__(subject, problem, fix, place)
        self.subjects = (subject,) if isinstance(subject, str) else tuple(subject)
        self.problem, self.fix, self.place = problem, fix, place

    @property
    def subject(self) -> str:
        """What the error is about."""
        return self.subjects[0]

    def at(self, place: str) -> "UserError":
        """Return the same error with the place where its subject was given."""
        return type(self)(self.subjects, self.problem, self.fix, place)

    def __str__(self) -> str:
        sentence = " ".join(filter(None, (self.subject, self.problem)))
        whole = (f"{self.place}: " if self.place else "") + sentence + (f"; {self.fix}" if self.fix else "")
        return printable(whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]} ...", one_line=True)


class ConfigError(UserError):
    """An invalid setting. Its subject is the setting's key, `section.key`."""

    @property
    def key(self) -> str:
        """The setting that the error is about."""
        return self.subject


class FileError(UserError):
    """A file or directory that cannot be used. Its subject is the path."""


class CheckpointError(FileError):
    """A checkpoint that cannot be used, or could not be written. Its subject is the path."""


class NodeError(UserError):
    """Nodes on which something fails that works on the others. Its subjects are their names."""


class StaleAttempt(RuntimeError):
    """A newer attempt has taken over the run; this one must exit without writing anything."""


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message is the reason."""


def refuse(condition: bool, subject: str | tuple[str, ...], problem: str, fix: str = "") -> None:
    """Raise `ConfigError` with these parts if `condition` is true."""
    if condition:
        raise ConfigError(subject, problem, fix)
