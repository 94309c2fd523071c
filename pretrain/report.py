"""Write a page that compares models: scores, training curves and figures.

    python -m pretrain.report RUN_OR_RESULTS... --output report.html

RUN is the directory of a training run: the page shows its curves and the evaluations in its
directory `evaluation`. RESULTS is a results.json of pretrain.evaluate, a comparison.json or
ladder.json of pretrain.compare, or the directory of one of them. The page is one HTML file that
works without network access.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation import ladder_file
from megatron_tape.evaluation.comparison_file import NAME, read_comparison
from megatron_tape.io.files import write_whole
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
        ladder = path / ladder_file.NAME if path.is_dir() else path
        if ladder.name == ladder_file.NAME and ladder.is_file():
            ladders.append(ladder_file.read_ladder(ladder))
            continue
        file = path / NAME if path.is_dir() else path
        # A run of a comparison also contains this file, but is shown as a run.
        if file.name == NAME and file.is_file() and not (path / METRICS).is_file():
            comparisons.append(read_comparison(file))
        else:
            others.append(path)
    runs, results = read_runs_and_results(others)
    # Generated text may contain lone surrogates, which UTF-8 cannot encode.
    content = page(runs, results, comparisons, missing, ladders).encode("utf-8", errors="replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, [content])
    # What the page shows, without what it does not have.
    numbers = {
        "ladder": len(ladders),
        "comparison": len(comparisons),
        "run": len(runs),
        "evaluated model": len(results),
    }
    shown = [counted(number, what) for what, number in numbers.items() if number]
    print(f"{output}: {', '.join(shown)}, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    command_line.run(main)
