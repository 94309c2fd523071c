"""Errors that a user can cause and mend: what each is about, as data, and the one place that makes a sentence of it."""

from megatron_tape.text import printable

EXIT_REFUSED = 2
"""Exit status of a program whose input cannot work, however often it is tried."""
EXIT_RESTART = 75
"""Exit status of a program that can go on if it is started again."""


_LONGEST = 10_000
"""Characters of a sentence: what a file holds may be part of it."""


class UserError(ValueError):
    """An error with its parts; `str()` makes the sentence `place: subject problem; fix`.

    No code may read the sentence back: whoever handles an error asks for its parts.
    """

    def __init__(self, subject: str | tuple[str, ...], problem: str, fix: str = "", place: str = ""):
        """Describe what is wrong.

        Args:
            subject: what the error is about: a setting's key, a file, a checkpoint. Of several, the first begins the
                sentence, and the others are what its problem depends on.
            problem: what is wrong with it, as a sentence goes on after the subject.
            fix: what to do.
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
    """A setting that cannot work. Its subject is the setting's key, `section.key`."""

    @property
    def key(self) -> str:
        """The setting that the error is about."""
        return self.subject


class FileError(UserError):
    """A file or directory that cannot be used. Its subject is the path."""


class CheckpointError(FileError):
    """A checkpoint that cannot be used, or could not be written. Its subject is the path."""


class NodeError(UserError):
    """Nodes that cannot do what the others can. Its subjects are their names."""


class StaleAttempt(RuntimeError):
    """A newer attempt has taken the run over; this one must end without writing anything."""


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message says why."""


def refuse(refused: bool, subject: str | tuple[str, ...], problem: str, fix: str = "") -> None:
    """Raise `ConfigError` with these parts if `refused`."""
    if refused:
        raise ConfigError(subject, problem, fix)
