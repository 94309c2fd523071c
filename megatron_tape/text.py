"""Format numbers and times, and escape untrusted text."""

import re

CONTROLS = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Control characters, line separators and text-direction characters, to be put between `[]` in a
regular expression.
"""
LOG_TIME = "%Y-%m-%d %H:%M:%S"
"""Format of the local date and time at the beginning of each line of a training log."""
_IN_OUTPUT = re.compile(f"[{CONTROLS}]")
_IN_A_LINE = re.compile(rf"[{CONTROLS}\t\n\r]")


def printable(text: str, one_line: bool = False) -> str:
    """Return `text` with control characters replaced by escapes such as `\\x1b`.

    Tabs and line ends are kept unless `one_line` is true. Characters that change the text direction
    count as control characters.
    """
    pattern = _IN_A_LINE if one_line else _IN_OUTPUT
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def flop_count(value: float) -> str:
    """Format a number of floating-point operations with three digits and a unit: `1.50 TFLOP`,
    `25.3 GFLOP`.
    """
    return _scaled(value, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def byte_size(value: float) -> str:
    """Format a number of bytes with three digits and a binary unit: `1.50 GiB`, `25.3 MiB`."""
    return _scaled(value, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Format a number with three digits and a unit. Each unit is `base` times the previous one;
    `value` is in the first.
    """
    power = 0
    while power + 1 < len(units) and round(abs(value)) >= base:
        value /= base
        power += 1

    # Three digits of the rounded value: 9.996 is 10.0. The first unit has no fractions.
    digits = 2
    if power == 0 or round(value, 1) >= 100:
        digits = 0
    elif round(value, 2) >= 10:
        digits = 1
    return f"{value:.{digits}f} {units[power]}"


def counted(number: int, noun: str, several: str | None = None) -> str:
    """Format a number with its noun: `1 step`, `1,000 steps`. `several` is the plural of a noun
    that takes no s.
    """
    if number != 1:
        noun = several or f"{noun}s"
    return f"{number:,} {noun}"


def duration(seconds: float) -> str:
    """Format seconds as days, hours, minutes and seconds: `1d 2:03:04`. Negative values count as
    0.
    """
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{seconds:02}"
    return f"{days}d {clock}" if days else clock
