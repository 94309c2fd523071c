"""Errors that a user can cause and that end a run; every message is one sentence that says what to do."""


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence naming the key, its value and the fix."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be written; the message says why and what to do."""


class StaleAttempt(RuntimeError):
    """A newer attempt has taken the run over; this one must end without writing anything."""


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message says why."""


def refuse(refused: bool, sentence: str) -> None:
    """Raise `ConfigError` with `sentence` if `refused`."""
    if refused:
        raise ConfigError(sentence)
