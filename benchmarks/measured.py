"""Merge what `python -m benchmarks.attention` measured on a GPU into the table by which `auto` chooses a backend.

    python -m benchmarks.measured benchmarks/results/attention-*.json

A row replaces an earlier one of the same GPU and shape. Records made without a GPU hold no rows. Needs no torch.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from benchmarks.environment import Record
from megatron_tape.command_line import run
from megatron_tape.io.records import read_record, write_record
from megatron_tape.ops import measured
from megatron_tape.ops.measured import Row, check, key, read_table

BACKENDS = ("triton", "flash_attn", "torch", "tiled")
"""Backends of a model that `benchmarks.attention` measures, each as `rope NAME` and as `tape NAME`."""


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


def table_rows(results: list[dict], precision: str, record: Record) -> list[Row]:
    """Return the rows for the table by which `auto` chooses: what the backends of a model took on this GPU."""
    origin, rows = record.origin, []
    if not origin["gpus"]:
        return rows
    for result in results:
        timings = result.get("attention forward+backward", {"timings": {}})["timings"]
        for encoding, averages in (("tape", True), ("rope", False)):
            names = {backend: f"{encoding} {backend}" for backend in BACKENDS}
            seconds = {b: timings[n]["seconds"] for b, n in names.items() if "seconds" in timings.get(n, {})}
            if seconds:
                rows.append(
                    Row(
                        gpu=origin["gpus"][0],
                        precision=precision,
                        heads=result["heads"],
                        groups=result["groups"],
                        head_dim=result["head_dim"],
                        seq_length=result["length"],
                        averages=averages,
                        batch=result["batch"],
                        seconds=seconds,
                        torch=origin["packages"]["torch"],
                        triton=origin["packages"].get("triton"),
                        date=origin["date"],
                        commit=origin["commit"],
                        record=record.path.name,
                    )  # fmt: skip
                )
    return rows


def main() -> None:
    """Merge the named records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="RECORD.json", help="what benchmarks.attention wrote")
    count = merge(parser.parse_args().records)
    print(f"merged {count} row{'' if count == 1 else 's'} into {measured.TABLE}")


if __name__ == "__main__":
    run(main)
