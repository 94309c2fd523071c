"""Write the tables and figures of docs/reproductions.md from the records in benchmarks/results/comparisons/.

    python -m benchmarks.reproductions --write

A table has one row a variant: how many of its seeds solved the task where it was trained, then mean and standard
deviation over all seeds, with the p of a paired t test against the first variant (corrected by Holm's method for the
number of variants), and the arithmetic of a training. In a figure every run is a point. Where variants differ in their
learning rate, the table has one column a rate instead, and the figure one line a variant.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.comparison import Comparison, Row, read_comparison, rows
from megatron_tape.evaluation.figures import curve, legend, new_figure, plain, save, styles
from megatron_tape.evaluation.results import Score
from megatron_tape.io.files import write_whole
from megatron_tape.planning.flops import flops_per_token
from pretrain.comparison.variants import Variant, parse_variants

ROOT = Path(__file__).parents[1]
RECORDS, RECIPES = ROOT / "benchmarks" / "results" / "comparisons", ROOT / "pretrain" / "recipes" / "compare"
PAGE = ROOT / "docs" / "reproductions.md"
BEGINNING, END = "<!-- {}: written by python -m benchmarks.reproductions --write -->\n", "<!-- end of {} -->\n"


@dataclass(frozen=True)
class Shown:
    """One task's record, and which of its figures the page shows."""

    record: str
    columns: dict[str, tuple[str, str | int]]
    """By heading, the metric and the group or the length of a score. `solved` and `by_rate` are about the first."""
    solved: float | None = None
    """What the first column must reach for a run to have solved the task; None where that cannot be said."""
    digits: int = 3
    recipe: str | None = None
    """What was trained, if it does not have the record's name."""
    changes: tuple[str, ...] = ()
    """Settings that were not the recipe's, of all variants."""
    by_rate: bool = False
    """Whether learning rates are compared."""


NARROW = ("--model.hidden_size=96", "--model.num_attention_heads=3", "--model.ffn_hidden_size=256")
LOSS = {"loss, nats a token": ("validation loss", "")}
LENGTHS_WITH_YARN = {"512 tokens (trained)": ("loss", 512), "1,024": ("loss", 1024), "2,048": ("loss", 2048)}
LENGTHS = {"128 tokens": ("loss", 128), "256": ("loss", 256)} | LENGTHS_WITH_YARN
GRIDS = {name: ("accuracy", name) for name in ("IID", "dense", "sparse")}
RECALL = {
    f"{length:,}{more}": ("accuracy", f"{length} tokens")
    for length, more in ((64, " tokens"), (128, ""), (256, " (trained)"), (512, ""), (1024, ""))
}
SUMS = {
    heading: ("exact match", f"{group} digits")
    for heading, group in (("to 5 digits", "up to 5"), ("beyond", "beyond 5"), ("to 10", "up to 10"))
}
TASKS = {
    "selective_copy": Shown(
        "selective_copy",
        {name: ("accuracy", group) for name, group in (("16 blanks", "IID"), ("8", "dense"), ("32", "sparse"))},
        0.95,
    ),
    "selective_copy_published": Shown(
        "selective_copy_published",
        {name: ("accuracy", group) for name, group in (("128 blanks", "IID"), ("64", "dense"), ("256", "sparse"))},
        0.95,
    ),
    "grid_navigation": Shown("grid_navigation_1d", GRIDS, 0.8),
    "grid_navigation_rates": Shown("grid_navigation_1d_rates", GRIDS, 0.8, recipe="grid_navigation_1d", by_rate=True),
    "grid_navigation_2d": Shown("grid_navigation_2d", GRIDS, 0.8),
    "recall": Shown("recall", RECALL, 0.95),
    "addition_hints": Shown("addition_hints", SUMS, 0.95),
    "addition_5_digits": Shown("addition_5_digits", SUMS, 0.95),
    "addition": Shown("addition", LOSS),
    "language_512": Shown("language_512", LENGTHS),
    "language_512_20m": Shown("language_512_20m", LENGTHS, recipe="language_512", changes=("--train.steps=5000",)),
    "language_512_20m_yarn": Shown(
        "language_512_20m_yarn", LENGTHS_WITH_YARN, recipe="language_512", changes=("--train.steps=5000",)
    ),
    "language_512_yarn": Shown("language_512_yarn", LENGTHS_WITH_YARN, recipe="language_512"),
    "language": Shown("language", LOSS),
    "language_start": Shown("language_start", LOSS, recipe="language"),
    "grid_navigation_start": Shown("grid_navigation_1d_start", GRIDS, 0.8, recipe="grid_navigation_1d"),
    "language_rates": Shown("language_rates", LOSS, recipe="language", by_rate=True),
    "language_muon": Shown("language_muon", LOSS, recipe="language"),
    "language_mup_base": Shown("language_mup_base", LOSS, recipe="language", changes=NARROW, by_rate=True),
    "language_mup": Shown("language_mup", LOSS),
}


def table(shown: Shown, comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a task's table."""
    if shown.by_rate:
        yield from _rates_table(shown, comparison)
        return
    headings = ["variant", "seeds", *(["solved"] if shown.solved else []), *shown.columns, "TFLOP"]
    yield f"| {' | '.join(headings)} |"
    yield "|---|" + "--:|" * (len(headings) - 1)
    by_column = [
        {row.variant: row for row in rows(comparison, _metric(comparison, *c))} for c in shown.columns.values()
    ]
    for variant in comparison.variants:
        found = [column[variant] for column in by_column]
        seeds = len(found[0].values)
        cells = [f"`{variant}`", f"{seeds}"]
        if shown.solved:
            cells.append(f"{sum(value >= shown.solved for value in found[0].values.values())}")
        cells += [_described(row, shown.digits) for row in found]
        yield f"| {' | '.join([*cells, f'{_teraflops(shown, variant):,.0f}'])} |"


def _rates_table(shown: Shown, comparison: Comparison) -> Iterator[str]:
    by_variant = _by_rate(shown, comparison)
    best = max if _first_metric(shown, comparison).better == "higher" else min
    rates = sorted({rate for scores in by_variant.values() for rate in scores})
    yield f"| variant | {' | '.join(f'{rate:g}' for rate in rates)} |"
    yield "|---|" + "--:|" * len(rates)
    for variant, scores in by_variant.items():
        texts = {rate: f"{score:.{shown.digits}f}" for rate, score in scores.items()}
        if len(texts) > 1:
            chosen = best(scores, key=scores.__getitem__)
            texts[chosen] = f"**{texts[chosen]}**"
        yield f"| `{variant}` | {' | '.join(texts.get(rate, '') for rate in rates)} |"


def _by_rate(shown: Shown, comparison: Comparison) -> dict[str, dict[float, float]]:
    """Return the means of the first column by learning rate, by the variant without it."""
    found: dict[str, dict[float, float]] = {}
    for row in rows(comparison, _first_metric(shown, comparison)):
        variant = parse_variants(row.variant)[0]
        settings = dict(variant.settings)
        rate = float(settings.pop("optimizer.lr", comparison.settings["optimizer"]["lr"]))
        without = Variant(variant.encoding, tuple(settings.items()))
        found.setdefault(without.label, {})[rate] = row.mean
    return found


def _teraflops(shown: Shown, variant: str) -> float:
    """Return the arithmetic of a training, in 10^12 FLOPs."""
    changes = parse_variants(variant)[0].arguments
    recipe = RECIPES / f"{shown.recipe or shown.record}.yaml"
    config = parse_run_config(["--config", str(recipe), *shown.changes, *changes])
    tokens = config.train.samples_after(config.train.steps) * config.model.seq_length
    return flops_per_token(config.model) * tokens / 1e12


def _described(row: Row, digits: int) -> str:
    spread = "" if row.spread is None else f" ± {row.spread:.{digits}f}"
    test = row.difference
    p = "" if test is None or test.p is None else " (p < 0.001)" if test.p < 0.001 else f" (p {test.p:.3f})"
    return f"{row.mean:.{digits}f}{spread}{p}"


def _metric(comparison: Comparison, metric: str, of: str | int) -> Score | None:
    return next((one for one in comparison.metrics if one.metric == metric and of in (one.group, one.length)), None)


def _first_metric(shown: Shown, comparison: Comparison) -> Score:
    return _metric(comparison, *next(iter(shown.columns.values())))


def figure(shown: Shown, comparison: Comparison):
    """Draw a column for each of the table's, in which every run is a point; or a line a variant over the rates."""
    if shown.by_rate:
        return _rates_figure(shown, comparison)
    drawn, axes = new_figure(1, len(shown.columns), width=2.6 if len(shown.columns) > 1 else 5, height=3.6)
    looks = _looks(comparison.variants)
    for one in axes[1:]:
        one.sharey(axes[0])
    for one, (heading, column) in zip(axes, shown.columns.items()):
        for place, row in enumerate(rows(comparison, _metric(comparison, *column))):
            look = looks[row.variant] | {"linestyle": "none"}
            one.plot([place] * len(row.values), list(row.values.values()), **look)
        one.set_xticks([])
        one.set_title(heading, fontsize=10)
    axes[0].set_ylabel(next(iter(shown.columns.values()))[0])
    legend(drawn)
    return drawn


def _rates_figure(shown: Shown, comparison: Comparison):
    drawn, (axes,) = new_figure(width=6.5, height=3.6)
    by_variant = _by_rate(shown, comparison)
    for variant, look in styles(by_variant).items():
        rates, scores = zip(*sorted(by_variant[variant].items()))
        curve(axes, look, rates, scores)
    axes.set_xscale("log")
    rates = sorted({rate for scores in by_variant.values() for rate in scores})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    heading, (metric, group) = next(iter(shown.columns.items()))
    axes.set(xlabel="learning rate", ylabel=f"{metric}, {heading}" if group else metric)
    legend(drawn)
    return drawn


def _looks(variants: list[str]) -> dict[str, dict[str, Any]]:
    """Return how each variant is drawn; its label is without what all of them begin with."""
    looks, parts = styles(variants), [variant.split("+") for variant in variants]
    shared = len(os.path.commonprefix(parts))
    for variant, own in zip(variants, parts):
        if shared:
            looks[variant]["label"] = plain("".join(f"+{part}" for part in own[shared:]) or variant)
    return looks


def written(page: str) -> tuple[str, dict[str, Picture]]:
    """Return the page with its tables, and its figures by name; tasks without a record are left out."""
    pictures = {}
    for name, shown in TASKS.items():
        path = RECORDS / f"{shown.record}.json"
        before, begins, rest = page.partition(BEGINNING.format(name))
        if not begins or not path.exists():
            continue
        comparison = read_comparison(path)
        lines = "\n".join(table(shown, comparison))
        picture = f"![{name}](reproductions/{name}.png)"
        page = f"{before}{begins}\n{lines}\n\n{picture}\n\n{END.format(name)}{rest.partition(END.format(name))[2]}"
        pictures[name] = Picture(name, name, figure(shown, comparison))
    return page, pictures


def main(argv: list[str] | None = None) -> None:
    """Print the page, or write it and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page and its figures")
    page, pictures = written(PAGE.read_text(encoding="utf-8"))
    if not parser.parse_args(argv).write:
        print(page, end="")
        return
    write_whole(PAGE, [page.encode()])
    PAGE.with_suffix("").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        save(picture, PAGE.with_suffix("") / f"{name}.png")


if __name__ == "__main__":
    main()
