"""The page and the Markdown of a ladder, from made-up results with planted effects."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from report_cases import write_run

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.evaluation.comparison_file import Comparison, FinishedRun, training_scores
from megatron_tape.evaluation.ladder_file import Ladder, LadderPoint, LearningRate, write_ladder
from megatron_tape.evaluation.report.ladder_findings import headline
from megatron_tape.evaluation.report.ladder_pictures import PICTURE_AXES, picture
from megatron_tape.evaluation.report.ladder_results import loss_series, task_series
from megatron_tape.evaluation.report.ladder_tables import (
    cost_table,
    markdown,
    parts,
    points_table,
    rate_warnings,
    rates_table,
    results_table,
    slopes_table,
)
from megatron_tape.evaluation.report.page import page
from megatron_tape.evaluation.results import Score
from megatron_tape.run.curves import read_run
from pretrain import report

SIZES = {"4M": 4_000_000, "8M": 8_000_000, "32M": 32_000_000}
BUDGETS = (5, 20)
TRAINED = 256
VARIANTS = {"rope": "rope", "tape": "tape", "fox": "fox+optimizer.lr_scale=2"}
VERSIONS = {"torch": "2.13.0", "commit": "abc"}


def training_score(metric, value, better="neither", **others):
    return Score(
        metric,
        value,
        better,
        task="training",
        **others,
    )


def run(variant, seed, scores, seconds=60.0):
    return FinishedRun(variant, seed, scores, seconds, 1.0, "CPU x, 2 cores", VERSIONS)


def losses(by_multiple):
    """Return the scores of the task perplexity, given losses by multiple of the trained length."""
    scores = []
    for multiple, value in by_multiple.items():
        place = {"length": multiple * TRAINED, "group": "books", "task": "perplexity"}
        scores.append(
            Score(
                "loss",
                value,
                "lower",
                unit="nats per token",
                **place,
            )
        )
        scores.append(Score("perplexity", math.exp(value), "lower", **place))
    return scores


def costs(variant):
    factor = 1.5 if variant == "tape" else 1.0
    return [
        training_score("validation loss", 3.0, "lower", unit="nats per token"),
        training_score("seconds per step", 2.0 * factor, "lower", unit="s"),
        training_score("parameters", 4_000_000.0),
        training_score("arithmetic", 120.0 * factor, unit="TFLOP"),
    ]


def nothing(doublings_of_size, doublings_of_budget):
    return 0.0


def ladder_of(effects, seeds=(1, 2), sizes=SIZES, budgets=BUDGETS, multiples=(1, 2, 4), noise=0.02):
    """Return a ladder whose losses at 4 times the trained length have planted effects.

    `effects` returns, by variant, the difference from rope, given the doublings of the smallest
    size and of the smallest budget.
    """
    random = np.random.default_rng(0)
    points = []
    for size, parameters in sizes.items():
        for budget in budgets:
            doublings = (math.log2(parameters / 4e6), math.log2(budget / 5))
            runs = []
            for seed in seeds:
                # What the runs of a seed have in common is no difference.
                common = random.normal(0, 0.5)
                for variant, effect in effects.items():
                    at_longest = 3.5 + common + effect(*doublings) + random.normal(0, noise)
                    by_multiple = {1: 3.0 + common, 2: 3.2 + common, 4: at_longest}
                    measured = {multiple: by_multiple[multiple] for multiple in multiples}
                    runs.append(run(variant, seed, [*losses(measured), *costs(variant)]))
            comparison = Comparison({"model": {"seq_length": TRAINED}}, {}, "rope", runs)
            points.append(
                LadderPoint(
                    size,
                    f"{budget} tokens per parameter",
                    float(budget),
                    parameters,
                    budget * parameters,
                    {variant: LearningRate(0.002) for variant in effects},
                    comparison,
                )
            )
    variants = {name: VARIANTS.get(name, "tape") for name in effects}
    return Ladder(variants, points)


def tuning(best, seed=101):
    """Return runs with three learning rates. `best` has the lowest loss, 3.0."""
    runs = []
    for rate in ("0.004", "0.001", "0.002"):
        loss = 3.0 + 100 * abs(float(rate) - best)
        score = training_score("validation loss", loss, "lower", unit="nats per token")
        runs.append(run(rate, seed, [score]))
    return Comparison({}, {}, "0.001", runs)


def recall_points(accuracies, sizes=SIZES, seeds=(1, 2)):
    """Return a point of the task recall for each size; `accuracies` are functions of the number of
    the size by variant.
    """
    random = np.random.default_rng(1)
    points = []
    for number, (size, parameters) in enumerate(sizes.items()):
        runs = []
        for seed in seeds:
            for variant, accuracy in accuracies.items():
                scores = []
                for length in (64, 256):
                    value = accuracy(number) + random.normal(0, 0.005)
                    scores.append(
                        Score(
                            "accuracy",
                            value,
                            "higher",
                            length=length,
                            task="recall",
                        )
                    )
                    scores.append(
                        Score("exact match", value**2, "higher", length=length, task="recall")
                    )
                runs.append(run(variant, seed, [*scores, *costs(variant)]))
        comparison = Comparison({"model": {"seq_length": TRAINED}}, {}, "rope", runs)
        points.append(LadderPoint(size, "recall", None, parameters, 1_000_000, {}, comparison))
    return points


def cells_of(table):
    """The rows of a table as texts, with the group first and smaller lines after bars."""
    return [
        [group, *("|".join([cell.text, *cell.detail.splitlines()]) for cell in row)]
        for group, row in zip(table.row_groups, table.rows)
    ]


def sentences_of(ladder, variant="tape"):
    """The sentences of the paragraph about a variant."""
    (paragraph,) = [text for text in headline(ladder)[1] if text.startswith(f"{variant}: ")]
    return paragraph.removesuffix(".").split(". ")


@pytest.mark.parametrize(
    "effect, beginnings",
    [
        (
            lambda size, budget: -0.3 - 0.1 * size + 0.05 * budget,
            [
                "tape: the loss at 4 times the trained length is 0.3",
                "This advantage grows with size: the difference changes by −0.1",
                "This advantage shrinks with tokens per parameter: the difference changes by +0.0",
            ],
        ),
        (
            lambda size, budget: 0.3,
            [
                "tape: the loss at 4 times the trained length is 0.3",
                "This disadvantage stays about the same with size",
                "This disadvantage stays about the same with tokens per parameter",
            ],
        ),
        (
            lambda size, budget: -0.3 + 0.1 * size,
            [
                "tape: the loss at 4 times the trained length is 0.",
                "This advantage shrinks with size: the difference changes by +0.",
                "At the upper end, no difference is certain any more",
                "This advantage stays about the same with tokens per parameter",
            ],
        ),
        (
            lambda size, budget: -0.3 + 0.2 * size,
            [
                "tape: the loss at 4 times the trained length is 0.",
                "This advantage turns into its opposite with size",
                "Whether this advantage changes with tokens per parameter cannot be decided",
            ],
        ),
        (
            nothing,
            [
                "tape: whether the loss at 4 times the trained length differs from that of rope"
                " cannot be decided",
                "Whether this difference changes with size cannot be decided",
                "Whether this difference changes with tokens per parameter cannot be decided",
            ],
        ),
    ],
)
def test_the_first_sentences_say_whether_a_planted_difference_grows_or_vanishes(effect, beginnings):
    sentences = sentences_of(ladder_of({"rope": nothing, "tape": effect}))
    assert [text[: len(start)] for text, start in zip(sentences, beginnings)] == beginnings
    assert len(sentences) == len(beginnings)


def test_an_effect_that_noise_hides_is_not_decided():
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3}, noise=0.4)
    _, *changes = sentences_of(ladder)
    assert all("cannot be decided" in sentence for sentence in changes)
    assert all("95 % interval −" in sentence and " to +" in sentence for sentence in changes)


def test_no_variant_but_the_baseline_is_treated_specially():
    effects = {"rope": nothing, "tape": lambda size, budget: -0.3 - 0.1 * size}
    renamed = {"tape": effects["rope"], "nope": effects["tape"]}
    expected = sentences_of(ladder_of(effects))
    ladder = ladder_of(renamed)
    for point in ladder.points:
        # The planted noise is the same, since variants have the same order.
        assert point.comparison.variants == ["tape", "nope"]
    found = sentences_of(ladder, "nope")
    exchanged = [text.replace("tape:", "nope:").replace("of rope", "of tape") for text in expected]
    assert found == exchanged


def test_the_table_has_differences_with_pooled_intervals_at_each_point_and_length():
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3})
    series = loss_series(ladder)
    table = results_table(series)
    assert table.columns == [
        "variant",
        "at the trained length",
        "at 2 times the trained length",
        "at 4 times the trained length",
    ]
    rows = cells_of(table)
    assert len(rows) == 12
    assert rows[0][:2] == ["4M, 5 tokens per parameter", "rope"]
    assert rows[-1][:2] == ["32M, 20 tokens per parameter", "tape"]

    # All points have an interval of the same width, that of the pooled variance.
    results = series[-1].results()
    estimates = [by_variant["tape"].difference for by_variant in results.values()]
    assert len({round(estimate.high - estimate.low, 9) for estimate in estimates}) == 1
    assert all(estimate.low < -0.3 < estimate.high < 0 for estimate in estimates)
    for row, estimate in zip(rows[1::2], estimates):
        shown = f"{estimate.value:.4f} ({estimate.low:.4f} – {estimate.high:.4f})"
        assert row[4].split("|")[1] == shown.replace("-", "−")
    # Differences that are 0 with every seed have no interval.
    assert rows[1][2].split("|")[1:] == ["0.0000"]
    assert [cell.strong for cell in table.rows[1]] == [False, False, False, True]


def test_the_table_of_slopes_contains_the_planted_ones():
    effects = {"rope": nothing, "tape": lambda size, budget: -0.3 - 0.1 * size + 0.05 * budget}
    ladder = ladder_of(effects)
    trend = loss_series(ladder)[-1].trends()["tape"]
    for axis, slope in (("size", -0.1), ("tokens per parameter", 0.05)):
        assert trend.slopes[axis].low < slope < trend.slopes[axis].high
    # 4 to 32 million parameters are 3 doublings; the mean number of doublings of the budget is 1.
    assert list(trend.doublings.values()) == pytest.approx([3, 2])
    assert trend.at_largest["size"].value == pytest.approx(-0.3 - 0.3 + 0.05, abs=0.02)

    table = slopes_table(loss_series(ladder))
    assert table.columns[3:5] == [
        "per doubling of the parameters",
        "per doubling of the tokens per parameter",
    ]
    last = cells_of(table)[-1]
    assert last[:3] == ["loss at 4 times the trained length (nats per token) ↓", "tape", "12"]
    shown = f"{trend.slopes['size'].value:.3f}".replace("-", "−")
    assert last[4].split("|")[0] == shown
    assert all(cell.strong for cell in table.rows[-1][2:4])


def test_intervals_and_p_values_are_corrected_alike_for_the_number_of_variants():
    effects = {"rope": nothing, "tape": nothing, "fox": nothing}
    series = loss_series(ladder_of(effects))[-1]
    alone = {}
    for variant in ("tape", "fox"):
        values = {
            point: {name: by_variant[name] for name in ("rope", variant)}
            for point, by_variant in series.values.items()
        }
        alone[variant] = replace(series, values=values).trends()[variant].mean
    for variant, trend in series.trends().items():
        # Bonferroni's method, with two variants.
        assert trend.mean.p == pytest.approx(min(1.0, 2 * alone[variant].p))
        assert trend.mean.low < alone[variant].low
        assert trend.mean.high > alone[variant].high


@pytest.mark.parametrize("effect", [0.004, 0.008, 0.012, 0.016, 0.02, 0.03, 0.05])
def test_a_difference_is_significant_exactly_if_its_interval_excludes_0(effect):
    effects = {"rope": nothing, "fox": nothing, "swan": nothing, "wall": nothing}
    effects["tape"] = lambda size, budget: effect
    series = loss_series(ladder_of(effects))[-1]
    estimates = [
        result.difference
        for by_variant in series.results().values()
        for variant, result in by_variant.items()
        if variant != "rope"
    ]
    for trend in series.trends().values():
        estimates += [trend.mean, *trend.slopes.values(), *trend.at_largest.values()]
    for estimate in estimates:
        excludes_0 = estimate.low > 0 or estimate.high < 0
        assert (estimate.p < 0.05) == excludes_0


def test_the_picture_has_a_panel_for_each_length_and_a_line_for_each_training():
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3})
    series = loss_series(ladder)
    by_parameters, by_tokens = PICTURE_AXES
    (shown,) = picture(series, by_parameters)
    assert len(shown.figure.axes) == 3
    axes = shown.figure.axes[-1]
    assert axes.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines] == [list(SIZES.values())] * 4
    (shown,) = picture(series, by_tokens)
    lines = [list(line.get_xdata()) for line in shown.figure.axes[-1].lines]
    assert lines[:3] == [[2e7, 8e7], [4e7, 16e7], [16e7, 64e7]]

    (shown,) = picture(series, by_parameters, differences=True)
    axes = shown.figure.axes[-1]
    # One line at 0, one of tape for each training, each with error bars.
    curves = [line for line in axes.lines if len(line.get_ydata()) == 3]
    means = [np.mean(line.get_ydata()) for line in curves if line.get_linestyle() != "None"]
    assert means == pytest.approx([-0.3, -0.3], abs=0.05)
    assert len(axes.containers) == 2
    assert "tape -0.3" in shown.alternative_text
    # Bars at the same point are apart, and their order is that of the sizes.
    drawn = [line for line in curves if line.get_linestyle() != "None"]
    places = sorted(x for line in drawn for x in line.get_xdata())
    assert all(right > 1.05 * left for left, right in zip(places, places[1:]))
    # The legend explains what is darker.
    entries = [text.get_text() for text in shown.figure.legends[0].get_texts()]
    assert entries == ["tape", "5 tokens per parameter", "20 tokens per parameter"]


def test_the_ticks_of_the_picture_are_rounded_to_the_unit_that_they_name():
    ladder = ladder_of({"rope": nothing, "tape": nothing}, sizes={"a": 499_700, "b": 999_700})
    (shown,) = picture(loss_series(ladder), PICTURE_AXES[0])
    ticks = [text.get_text() for text in shown.figure.axes[0].get_xticklabels()]
    assert ticks == ["500k", "1M"]


def test_the_bars_of_many_variants_stay_at_their_size():
    effects = {"rope": nothing} | {f"v{index}": nothing for index in range(8)}
    (shown,) = picture(loss_series(ladder_of(effects)), PICTURE_AXES[0], differences=True)
    for line in shown.figure.axes[-1].lines:
        xs = line.get_xdata()
        if len(xs) == 3:
            assert all(0.8 * size < x < 1.25 * size for x, size in zip(xs, SIZES.values()))


def test_the_picture_of_losses_counts_only_seeds_that_all_variants_have():
    ladder = ladder_of({"rope": nothing, "tape": nothing}, budgets=(5,))
    expected = picture(loss_series(ladder), PICTURE_AXES[0])[0].alternative_text
    for point in ladder.points:
        extra = [of for of in point.comparison.runs if of.variant == "rope" and of.seed == 1]
        # A third seed of one variant, far from the others.
        scores = [replace(score, value=score.value + 9) for score in extra[0].scores]
        point.comparison.runs.append(replace(extra[0], seed=3, scores=scores))
    assert picture(loss_series(ladder), PICTURE_AXES[0])[0].alternative_text == expected


def test_tasks_have_a_table_and_a_sentence():
    accuracies = {
        "rope": lambda number: 0.4,
        "tape": lambda number: 0.9,
        "fox": lambda number: 0.3,
        "nope": lambda number: 0.4,
    }
    ladder = Ladder({name: name for name in accuracies}, recall_points(accuracies))
    assert loss_series(ladder) == []
    series = task_series(ladder)["recall"]
    # Only the first metric that ranks variants.
    assert [one.name for one in series] == ["accuracy 64 tokens", "accuracy 256 tokens"]
    rows = cells_of(results_table(series))
    assert rows[1][:2] == ["4M, recall", "tape"]
    assert rows[1][2].split("|")[1].startswith("+0.")
    paragraphs = headline(ladder)[1]
    assert len(paragraphs) == 2
    assert paragraphs[0] == (
        "Recall, accuracy compared with rope, in numbers of points and conditions: tape is better"
        " in 6, worse in 0 and undecided in 0; fox is better in 0, worse in 6 and undecided in 0;"
        " nope is better in 0, worse in 0 and undecided in 6."
    )
    assert [part.title for part in parts(ladder)] == [
        "Recall",
        "Points and cost",
        "How to read the comparison",
    ]


def test_the_table_of_rates_marks_the_chosen_one_and_names_the_origin_of_others():
    ladder = ladder_of({"rope": nothing, "tape": nothing})
    first, second, *_ = ladder.points
    first.tuning.update({"rope": tuning(best=0.002), "tape": tuning(best=0.004)})
    first.learning_rates["tape"] = LearningRate(0.004)
    second.learning_rates["rope"] = LearningRate(0.002, taken_from=first.name)
    second.learning_rates["tape"] = LearningRate(0.004, taken_from=first.name)
    table = rates_table(ladder)
    assert table.columns == ["variant", "rate", "0.001", "0.002", "0.004"]
    rows = cells_of(table)
    point = "4M, 5 tokens per parameter"
    assert rows[0] == [point, "rope", "0.002|tuned here", "3.1000", "3.0000|chosen", "3.2000"]
    assert rows[1] == [point, "tape", "0.004|tuned here", "3.3000", "3.2000", "3.0000|chosen"]
    # The other point has no row of its own.
    assert second.name not in {row[0] for row in rows}
    origins = [row[4].text for row in points_table(ladder).rows]
    assert origins[:2] == ["tuned here", f"from {point}"]
    (warning,) = rate_warnings(ladder)
    assert warning.endswith(f": tape at {point}.")


def with_taken_rates(ladder):
    """Return the ladder with rates that all points take from the first one."""
    first, *others = ladder.points
    for point in others:
        for variant in ladder.variants:
            point.learning_rates[variant] = LearningRate(0.002, taken_from=first.name)
    return ladder


def test_the_first_paragraph_says_where_rates_were_taken_from_a_smaller_size():
    effects = {"rope": nothing, "tape": nothing, "fox": nothing}
    ladder = with_taken_rates(ladder_of(effects))
    assert headline(ladder)[1][0] == (
        "Learning rates at 8M and 32M were taken from a smaller size. They were not checked there,"
        " so these differences, and changes with size, may come from rates that suit some variants"
        " less. Rates for more text were taken from less text, and not checked."
    )
    point = ladder.points[2]
    point.tuning.update({"rope": tuning(0.002), "tape": tuning(0.001), "fox": tuning(0.004)})
    # The rate of fox diverged.
    point.tuning["fox"].runs[2] = run("0.002", 101, [])
    first = headline(ladder)[1][0]
    assert (
        "Checked at 8M, 5 tokens per parameter: half the rate was better for tape (by 0.100 nats"
        " per token); twice the rate was better for fox (the rate itself diverged); the rate was"
        " the best of three for rope. They were not checked at 32M,"
    ) in first
    # With a rate that has not been tried, nothing is said.
    point.tuning["tape"].runs.pop()
    assert "tape" not in headline(ladder)[1][0]


def test_rates_that_were_tuned_at_every_point_need_no_caveat():
    ladder = ladder_of({"rope": nothing, "tape": nothing})
    assert headline(ladder)[1][0].startswith("tape: ")
    by_size = with_taken_rates(ladder_of({"rope": nothing, "tape": nothing}, budgets=(5,)))
    assert "more text" not in headline(by_size)[1][0]


def test_a_ladder_whose_rates_are_those_of_the_recipe_says_nothing_of_tuning():
    ladder = ladder_of({"rope": nothing, "tape": nothing})
    table = rates_table(ladder)
    assert table.columns == ["variant", "rate"]
    for point in ladder.points:
        point.learning_rates.clear()
    assert "Learning rates" not in [part.title for part in parts(ladder)]


def test_costs_are_given_with_their_multiple_of_the_baseline():
    table = cost_table(ladder_of({"rope": nothing, "tape": nothing}))
    assert table.columns[1:] == [
        "parameters",
        "arithmetic (TFLOP)",
        "seconds per step (s) ↓",
        "seconds of a run",
    ]
    assert "--jobs 1" in table.caption
    point = "4M, 5 tokens per parameter"
    assert cells_of(table)[:2] == [
        [point, "rope", "4,000,000", "120", "2", "60"],
        [point, "tape", "4,000,000", "180|× 1.500", "3|× 1.500", "60"],
    ]


def test_without_losses_by_length_the_validation_loss_is_compared():
    ladder = ladder_of({"rope": nothing, "tape": nothing}, multiples=())
    (series,) = loss_series(ladder)
    assert series.name == "validation loss"
    assert results_table([series]).columns == ["variant", "validation loss (nats per token) ↓"]
    first = sentences_of(ladder)[0]
    assert first.startswith("tape: the validation loss is 0.000 nats per token higher")
    assert "without an interval" in first


def test_the_metrics_of_a_recorded_run_are_found(tmp_path):
    recipe = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
    arguments = ["--config", str(recipe), "--data.prefix", "x", "--train.steps", "100"]
    recorded = read_run(write_run(tmp_path / "run", steps=100))
    scores = training_scores(parse_run_config(arguments), recorded)
    ladder = ladder_of({"rope": nothing})
    for point in ladder.points:
        point.comparison.runs[:] = [run("rope", 1, scores)]
    ladder.points[0].tuning["rope"] = Comparison({}, {}, "", [run("0.01", 101, scores)])
    (series,) = loss_series(ladder)
    assert series.name == "validation loss"
    costs = cost_table(ladder)
    assert len(costs.columns) == 5
    assert all(cell.sort is not None for cell in costs.rows[0])
    assert rates_table(ladder).columns == ["variant", "rate", "0.01"]


def test_the_losses_of_each_source_are_apart():
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3})
    for point in ladder.points:
        for of_run in point.comparison.runs:
            others = [replace(score, group="code", value=1.0) for score in of_run.scores[:2]]
            of_run.scores.extend(others)
    names = [series.name for series in loss_series(ladder)]
    assert names == [
        "loss at the trained length, books",
        "loss at 2 times the trained length, books",
        "loss at 4 times the trained length, books",
        "loss at the trained length, code",
    ]
    # The headline is about the longest length of the first source.
    assert headline(ladder)[1][0].startswith("tape: the loss at 4 times the trained length, books")


def incomplete(case):
    """Return a ladder that is incomplete in one respect."""
    effects = {"rope": nothing, "tape": lambda size, budget: -0.3}
    if case == "one seed":
        return ladder_of(effects, seeds=(1,))
    if case == "one point":
        return ladder_of(effects, sizes={"4M": 4_000_000}, budgets=(5,))
    if case == "one size":
        return ladder_of(effects, sizes={"4M": 4_000_000})
    ladder = ladder_of(effects)
    for index, point in enumerate(ladder.points):
        runs = point.comparison.runs
        if case == "no runs" or (case == "points without runs" and index > 1):
            runs.clear()
        if case == "no baseline":
            runs[:] = [run for run in runs if run.variant != "rope"]
        if case == "variants missing at points" and index in (1, 2):
            runs[:] = [run for run in runs if run.variant == ("rope", "tape")[index - 1]]
        if case == "other seeds":
            runs[:] = [
                run if run.variant == "rope" else replace(run, seed=run.seed + 9) for run in runs
            ]
    return ladder


@pytest.mark.parametrize(
    "case, sentence",
    [
        ("one seed", "This advantage stays about the same with size"),
        ("one point", "All points with losses have the same size"),
        ("one size", "All points with losses have the same size"),
        ("no runs", "No run is finished."),
        ("points without runs", "Points without runs: 8M, 5 tokens per parameter; 8M, 20"),
        ("no baseline", "No variant has runs with the seeds of rope yet"),
        ("variants missing at points", "This advantage stays about the same with size"),
        ("other seeds", "No variant has runs with the seeds of rope yet"),
    ],
)
def test_an_incomplete_ladder_has_a_page_and_claims_no_more_than_it_knows(case, sentence):
    ladder = incomplete(case)
    content = page({}, {}, [], ["tape, seed 9"], [ladder])
    assert "could not be drawn" not in content
    assert "Not finished: tape, seed 9." in content
    text = markdown(ladder, ["tape, seed 9"])
    assert sentence in text
    assert "nan" not in text
    if case == "one seed":
        assert "±" not in text


def test_one_seed_has_no_intervals_at_the_points():
    (*_, series) = loss_series(incomplete("one seed"))
    for by_variant in series.results().values():
        assert by_variant["tape"].difference.value == pytest.approx(-0.3, abs=0.1)
        assert by_variant["tape"].difference.p is None


def test_a_page_is_made_from_the_file_or_its_directory(tmp_path, capsys):
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3 - 0.1 * size})
    ladder.points.extend(recall_points({"rope": lambda number: 0.4, "tape": lambda number: 0.9}))
    ladder.points[0].tuning["tape"] = tuning(best=0.002)
    write_ladder(tmp_path / "ladder.json", ladder)
    for path in (tmp_path, tmp_path / "ladder.json"):
        output = tmp_path / "page.html"
        report.main([str(path), "--output", str(output)])
        assert capsys.readouterr().out.startswith(f"{output}: 1 ladder, ")
        content = output.read_text(encoding="utf-8")
        assert "Comparison of rope and tape over 3 model sizes</h1>" in content
        assert "This advantage grows with size" in content
        # Losses and differences, each by parameters and by tokens.
        assert content.count("<img src=") == 4
        output.unlink()


def test_markdown_has_the_tables_and_the_reading_of_them():
    ladder = ladder_of({"rope": nothing, "tape": lambda size, budget: -0.3})
    text = markdown(ladder)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Loss by size and tokens",
        "## Changes of the difference with size and tokens",
        "## Learning rates",
        "## Points and cost",
        "## How to read the comparison",
    ]
    assert "| point " in text
    assert "the variance" in text
    assert "- 24 runs with 2 seeds (1 and 2) on CPU x, 2 cores." in text


def test_text_from_files_is_escaped_in_markdown_and_on_the_page():
    odd = "x<img src=x onerror=alert(1)> <script>y</script> [c](javascript:z) | **b** `code`"
    ladder = ladder_of({"rope": nothing, odd: lambda size, budget: -0.3})
    ladder.points[:] = [
        replace(
            point,
            size=f"{odd} {point.size}",
            learning_rates={odd: LearningRate(0.1, odd)},
            comparison=replace(
                point.comparison,
                runs=[replace(run, hardware=odd) for run in point.comparison.runs],
            ),
        )
        for point in ladder.points
    ]
    ladder.points[0].tuning[odd] = replace(
        tuning(0.002), runs=[run(odd, 1, []), *tuning(0.002).runs]
    )
    blocks = MarkdownIt("commonmark").enable(["table"]).parse(markdown(ladder, [odd]))
    inline = [child for block in blocks for child in block.children or ()]
    assert {token.type for token in inline} == {"text"}
    assert not [block for block in blocks if block.type.startswith(("html", "code", "fence"))]
    content = page({}, {}, [], [odd], [ladder])
    assert "onerror=alert" in content
    assert "<img src=x" not in content
    assert content.count("<script>") == 1
