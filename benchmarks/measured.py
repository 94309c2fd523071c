"""Merge what `python -m benchmarks.attention` measured on a GPU into the table by which `auto` chooses a backend.

    python -m benchmarks.measured benchmarks/results/attention-*.json

A row replaces an earlier one of the same GPU and shape. Records made without a GPU hold no rows. Needs no torch.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from megatron_tape.command_line import run
from megatron_tape.io.records import read_record, write_record
from megatron_tape.ops import measured
from megatron_tape.ops.measured import Row, check, key, read_table


class AttentionRecord(TypedDict):
    """What is read of a record."""

    rows: list[Row]


def merge(records: Iterable[str | Path], table: Path | None = None) -> int:
    """Merge the rows of attention records into the table, whole or not at all; return how many there were.

    Of rows with equal keys the last one counts. Raises ValueError if a record or the table is damaged, OSError if a
    file cannot be read or written.
    """
    table = measured.TABLE if table is None else table
    found: list[Row] = []
    for path in records:
        rows = read_record(path, AttentionRecord)["rows"]
        try:
            check(rows)
        except ValueError as error:
            raise ValueError(f"{path} cannot be used: rows{error}") from None
        found += ({name: row[name] for name in Row.__annotations__} for row in rows)
    if found:
        merged = {key(row): row for row in (*read_table(table), *found)}
        write_record(table, [merged[each] for each in sorted(merged)])
    return len(found)


def main() -> None:
    """Merge the named records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="RECORD.json", help="what benchmarks.attention wrote")
    count = merge(parser.parse_args().records)
    print(f"merged {count} row{'' if count == 1 else 's'} into {measured.TABLE}")


if __name__ == "__main__":
    run(main)
