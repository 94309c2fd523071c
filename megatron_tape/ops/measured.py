"""The table of measured attention: how long each backend took on which GPU. `auto` chooses by it.

`python -m benchmarks.attention` measures the rows, and `python -m benchmarks.measured` merges them into the table.
torch is not imported.
"""

import math
from pathlib import Path
from typing import NamedTuple, TypedDict

from megatron_tape.errors import ConfigError
from megatron_tape.io.records import read_record

TABLE = Path(__file__).parent / "backends" / "measured.json"


class Heads(NamedTuple):
    """What decides how long attention takes: query heads, key/value groups, their width, and tokens per sequence."""

    heads: int
    groups: int
    head_dim: int
    seq_length: int


class Row(TypedDict):
    """The seconds, forward and backward, that each backend took for one batch of one shape on one kind of GPU."""

    gpu: str
    precision: str
    heads: int
    groups: int
    head_dim: int
    seq_length: int
    averages: bool
    """Whether a position state was averaged beside the values (TAPE) or not (RoPE)."""
    batch: int
    seconds: dict[str, float]
    torch: str
    triton: str | None
    date: str
    commit: str | None
    record: str
    """Name of the benchmark's record."""


def key(row: Row) -> tuple:
    """Return what distinguishes a row; a later measurement with the same key replaces an earlier one."""
    names = ("gpu", "precision", "averages", "head_dim", "heads", "groups", "seq_length")
    return tuple(row[name] for name in names)


def read_table(path: Path | None = None) -> list[Row]:
    """Return the rows of the table. Raises `ConfigError`, in one sentence that names the file, if it is damaged."""
    path = TABLE if path is None else path
    try:
        rows = read_record(path, list[Row])
        check(rows)
    except (OSError, ValueError) as error:
        why = str(error) if str(path) in str(error) else f"{path} cannot be used: {error}"
        raise ConfigError(f"{why}; restore the file, or name a backend with model.attention_backend") from None
    return rows


def check(rows: list[Row]) -> None:
    """Raise ValueError if a row, whose types are right, contains a number that makes no sense."""
    for index, row in enumerate(rows):
        for name in ("heads", "groups", "head_dim", "seq_length", "batch"):
            if row[name] < 1:
                raise ValueError(f"[{index}].{name} is {row[name]}, where a number above zero belongs")
        for backend, seconds in row["seconds"].items():
            if seconds <= 0:
                raise ValueError(f"[{index}].seconds.{backend} is {seconds}, where a number above zero belongs")


def nearest(rows: list[Row], gpu: str, precision: str, averages: bool, shape: Heads) -> Row | None:
    """Return the row measured closest to `shape` on this kind of GPU, or None.

    The precision, the width of a head and whether a state is averaged must be equal. Among the others the closest
    sequence length counts, then the closest number of heads per group, both by their ratio.
    """

    def distance(row: Row) -> tuple[float, float]:
        per_group = row["heads"] * shape.groups / (row["groups"] * shape.heads)
        return abs(math.log2(row["seq_length"] / shape.seq_length)), abs(math.log2(per_group))

    wanted = (gpu, precision, averages, shape.head_dim)
    fitting = [row for row in rows if (row["gpu"], row["precision"], row["averages"], row["head_dim"]) == wanted]
    return min(fitting, key=distance, default=None)
