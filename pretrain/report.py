"""Write a page that compares models: scores, training curves and figures.

    python -m pretrain.report RUN_OR_RESULTS... --output report.html

RUN is the directory of a training run: the page shows its curves and the evaluations in its
directory `evaluation`. RESULTS is a results.json of pretrain.evaluate, a comparison.json or
ladder.json of pretrain.compare (whatever its name), or the directory of one of them. The page is
one HTML file that works without network access.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation import comparison_file, ladder_file, results
from megatron_tape.evaluation.comparison_file import read_comparison
from megatron_tape.io.files import write_whole
from megatron_tape.io.records import RECORD_BYTES, read_record
from megatron_tape.run.curves import METRICS
from megatron_tape.text import counted


def main(argv: list[str] | None = None) -> None:
    """Write the page for the paths on the command line."""
    parser = command_line.Parser(prog="python -m pretrain.report", description=__doc__)
    parser.add_argument(
        "paths", nargs="+", metavar="RUN_OR_RESULTS", help="a run, a results file, or its directory"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        help="output file, which is replaced (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    write_report(arguments.paths, arguments.output)


def write_report(paths: list[str | Path], output: Path, missing: Sequence[str] = ()) -> None:
    """Write a page about runs, results, comparisons and ladders to `output`.

    `paths` are directories of runs, results files or their directories. `missing` are the names of
    the unfinished runs of a comparison or ladder, which the page lists.

    Raises UserError if `output` is not a .html file or an input is invalid, and OSError if reading
    or writing fails.
    """
    if output.suffix.lower() not in (".html", ".htm") or output.is_dir():
        raise ConfigError(
            "--output",
            f"is {output}",
            "give a file that ends in .html; an existing file of that name is replaced",
        )
    from megatron_tape.evaluation.report.page import page, read_runs_and_results

    comparisons = []
    ladders = []
    others = []
    for path in map(Path, paths):
        file = _results_file(path)
        kind = _kind(file)
        if kind == ladder_file.NAME:
            ladders.append(ladder_file.read_ladder(file))
        elif kind == comparison_file.NAME:
            comparisons.append(read_comparison(file))
        else:
            others.append(path)
    runs, evaluated = read_runs_and_results(others)
    # Generated text may contain lone surrogates, which UTF-8 cannot encode.
    content = page(runs, evaluated, comparisons, missing, ladders).encode("utf-8", errors="replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, [content])
    # What the page shows, without what it does not have.
    numbers = {
        "ladder": len(ladders),
        "comparison": len(comparisons),
        "run": len(runs),
        "evaluated model": len(evaluated),
    }
    shown = [counted(number, what) for what, number in numbers.items() if number]
    print(f"{output}: {', '.join(shown)}, {len(content) / 1e6:.1f} MB")


def _results_file(path: Path) -> Path:
    """Return the file of a ladder or of a comparison in a directory, or `path` if there is none."""
    # A run of a comparison also contains its file, but is shown as a run.
    if (path / METRICS).is_file():
        return path
    for name in (ladder_file.NAME, comparison_file.NAME):
        if (path / name).is_file():
            return path / name
    return path


def _kind(file: Path) -> str:
    """Return the name that pretrain.compare or pretrain.evaluate gives a file with such content."""
    known = (ladder_file.NAME, comparison_file.NAME, results.NAME)
    # Results of an evaluation may be larger than what the others are limited to.
    if file.name in known or not file.is_file() or file.stat().st_size > RECORD_BYTES:
        return file.name
    keys = read_record(file, dict[str, Any])
    if "points" in keys:
        return ladder_file.NAME
    if "runs" in keys:
        return comparison_file.NAME
    return results.NAME


if __name__ == "__main__":
    command_line.run(main)
