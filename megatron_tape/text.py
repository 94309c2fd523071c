"""Numbers and times as a reader meets them."""


def counted(number: int, noun: str, several: str | None = None) -> str:
    """Return a number with its noun, as `1 step` or `1,000 steps`; `several` is a plural that adds more than an s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Write seconds as days, hours, minutes and seconds, `1d 2:03:04`; negative ones count as 0."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"
