"""Comparisons as data, tables and pictures."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import FileError
from megatron_tape.evaluation.comparison_file import (
    Comparison,
    FinishedRun,
    add_runs,
    empty,
    read_comparison,
    results_by_metric,
    write_comparison,
)
from megatron_tape.evaluation.report.comparison_tables import (
    by_task,
    headline,
    markdown,
    notes,
    picture,
    task_tables,
    warnings,
)
from megatron_tape.evaluation.report.findings import finding, measured
from megatron_tape.evaluation.report.page import page
from megatron_tape.evaluation.results import Score

ROOT = Path(__file__).parents[2]
FOUND = {
    "rope": {1: 0.5, 2: 0.6, 3: 0.7},
    "tape": {1: 0.7, 2: 0.7, 3: 0.9},
    "nope<b>": {2: 0.4, 3: 0.4},
}


def score(value, metric="accuracy", group="IID", better="higher"):
    return Score(metric, value, better, group=group, task="selective_copy")


def run(variant, seed, *scores):
    return FinishedRun(
        variant,
        seed,
        list(scores),
        1.0,
        1.0,
        "CPU x, 2 cores",
        {"torch": "2.13.0", "commit": "abc"},
    )


def comparison(found=FOUND, baseline="rope"):
    runs = [
        run(variant, seed, score(number))
        for variant, of in found.items()
        for seed, number in of.items()
    ]
    return Comparison({}, {}, baseline, runs)


def rows_of(made):
    (found,) = results_by_metric(made).values()
    return found


def test_means_spreads_and_differences_are_over_the_seeds():
    rope, tape, nope = rows_of(comparison())
    assert (
        rope.mean == pytest.approx(0.6)
        and rope.spread == pytest.approx(0.1)
        and rope.difference is None
    )
    assert tape.mean == pytest.approx(2.3 / 3) and tape.spread == pytest.approx(
        statistics.stdev([0.7, 0.7, 0.9])
    )
    # Differences 0.2, 0.1 and 0.2: t = 5 with two degrees of freedom; and two variants are
    # compared.
    assert tape.difference.mean == pytest.approx(0.5 / 3) and tape.difference.p == pytest.approx(
        2 * 0.037750, abs=2e-6
    )
    # Over the seeds of both.
    assert nope.difference.count == 2 and nope.difference.mean == pytest.approx(-0.25)


def test_a_baseline_is_chosen_and_may_be_missing():
    assert [row.difference is None for row in rows_of(comparison(baseline="tape"))] == [
        False,
        True,
        False,
    ]
    assert all(row.difference is None for row in rows_of(comparison(baseline="fox")))


def rows_of_table(table):
    """The cells of a table as texts, with their smaller lines after bars."""
    return [
        ["|".join([cell.text, *cell.detail.splitlines()]) for cell in row] for row in table.rows
    ]


def test_a_table_has_a_row_for_each_variant_and_marks_missing_values():
    found = {"rope": {1: 1.0, 2: 1.0}, "tape": {1: 1.0, 2: 1.0}, "nope": {1: 0.5}}
    (table,) = task_tables(by_task(comparison(found))["selective_copy"], "rope")
    assert table.columns == ["variant", "IID"] and set(table.row_groups) == {
        "accuracy \N{UPWARDS ARROW}"
    }
    assert rows_of_table(table) == [
        ["rope|2 seeds", "1.0000 ± 0.0000"],
        ["tape|2 seeds", "1.0000 ± 0.0000|0.0000"],
        ["nope|1 seed", "0.5000|−0.5000"],
    ]
    (table,) = task_tables(by_task(comparison())["selective_copy"], "rope")
    assert rows_of_table(table)[1] == [
        "tape|3 seeds",
        "0.7667 ± 0.1155|+0.1667 (0.0232 – 0.3101)|p = 0.0755",
    ]


def test_a_table_of_one_seed_has_neither_mean_nor_deviation():
    (table,) = task_tables(
        by_task(comparison({"rope": {1: 0.5}, "tape": {1: 0.6}}))["selective_copy"], "rope"
    )
    assert table.caption == "Below each value: the difference from rope."
    assert rows_of_table(table) == [["rope", "0.5000"], ["tape", "0.6000|+0.1000"]]


def copying(values, **settings):
    """Return a comparison of runs with one seed: accuracies and exact matches by variant and
    group.
    """
    runs = [
        run(
            variant,
            1,
            *(
                score(value, metric, group)
                for group, of in groups.items()
                for metric, value in of.items()
            ),
        )
        for variant, groups in values.items()
    ]
    blanks = {"IID": 16, "dense": 8, "sparse": 32}
    return Comparison(
        {},
        {"selective_copy": {"blanks": blanks, "samples": 9, "of a later version": 1}},
        "rope",
        runs,
    )


def of_groups(*accuracies):
    return {
        group: {"accuracy": x, "exact match": x**2}
        for group, x in zip(("IID", "dense", "sparse"), accuracies)
    }


SIGNED = {"rope": of_groups(1, 0.2235, 0.25), "tape": of_groups(0.996, 0.22, 0.26)}
SIGNED |= {f"{name}+increments=signed": of_groups(1, 1, 1) for name in ("rope", "tape")}


def test_a_task_has_one_table_with_a_column_for_each_condition_as_the_task_names_it():
    (table,) = task_tables(by_task(copying(SIGNED))["selective_copy"], "rope")
    assert table.columns == ["variant", "8 blanks", "16 blanks (as trained)", "32 blanks"]
    assert (
        table.row_groups
        == ["accuracy \N{UPWARDS ARROW}"] * 4 + ["exact match \N{UPWARDS ARROW}"] * 4
    )
    assert rows_of_table(table)[1] == ["tape", "0.2200|−0.0035", "0.9960|−0.0040", "0.2600|+0.0100"]
    content = page({}, {}, [copying(SIGNED)])
    assert content.count("<table") == 1 and content.count('scope="rowgroup"') == 2
    assert "IID" not in content and "dense" not in content
    lines = [
        line.split("|") for line in markdown(copying(SIGNED)).splitlines() if line.startswith("|")
    ]
    assert [cell.strip() for cell in lines[0][1:3]] == ["metric", "variant"] and len(lines) == 10


def test_metrics_by_length_have_a_column_for_each_length_and_metrics_of_the_training_are_columns():
    lengths = [
        replace(score(1.0, "loss", better="lower"), length=length, group="books")
        for length in (64, 128)
    ]
    training = [
        Score(name, 2.0, "lower", task="training")
        for name in ("validation loss", "seconds per step")
    ]
    tasks = by_task(Comparison({}, {}, "rope", [run("rope", 1, *training, *lengths)]))
    (by_length,), (of_training,) = (task_tables(of, "rope") for of in tasks.values())
    assert by_length.columns == ["variant", "64 tokens", "128 tokens"]
    assert (
        by_length.row_groups == ["loss \N{DOWNWARDS ARROW}, books"] and not of_training.row_groups
    )
    arrow = "\N{DOWNWARDS ARROW}"
    assert of_training.columns == [
        "variant",
        f"validation loss {arrow}",
        f"seconds per step {arrow}",
    ]


@pytest.mark.parametrize(
    "blanks", [{"IID": "many"}, {"IID": 4, "dense": 8, "sparse": 8}, [1], None]
)
def test_groups_keep_their_names_if_the_recorded_settings_give_none(blanks):
    made = replace(copying(SIGNED), evaluation={"selective_copy": {"blanks": blanks}})
    assert task_tables(by_task(made)["selective_copy"], "rope")[0].columns[1:] == [
        "IID",
        "dense",
        "sparse",
    ]


def test_a_metric_that_is_equal_in_all_runs_has_no_picture():
    found = by_task(comparison({"rope": {1: 0.0, 2: 0.0}, "tape": {1: 0.0}}))["selective_copy"]
    assert picture(found, ["rope", "tape"]) == []


@pytest.mark.parametrize(
    "values, sentence",
    [
        (
            SIGNED,
            (
                "With increments=signed, the accuracy is 100 % at 8 blanks, 16 blanks (as trained)"
                " and 32 blanks; without, it is 22 % at 8 blanks, 99.6 to 100 % at 16 blanks (as"
                " trained) and 25 to 26 % at 32 blanks."
            ),
        ),
        (
            {
                "rope": of_groups(0.9, 0.5, 0.5),
                "tape": of_groups(0.9, 0.6, 0.7),
                "nope": of_groups(0.8, 0.1, 0),
            },
            (
                "tape has the highest accuracy: 60 % at 8 blanks, 90 % at 16 blanks (as trained)"
                " and 70 % at 32 blanks; rope has 50 % at 8 blanks and 32 blanks and 90 % at 16"
                " blanks (as trained)."
            ),
        ),
        (
            {"rope": of_groups(0.9, 0.5, 0.5), "tape": of_groups(0.8, 0.6, 0.7)},
            (
                "The highest accuracy is that of tape with 60 % at 8 blanks and 70 % at 32 blanks"
                " and that of rope with 90 % at 16 blanks (as trained); rope has 50 % at 8 blanks"
            ),
        ),
        (
            {"rope": of_groups(0.9, 0.5, 0.5), "tape": of_groups(0.901, 0.5, 0.5)},
            (
                "The accuracy is about the same for both: 50 % at 8 blanks and 32 blanks and 90 %"
                " at 16 blanks"
            ),
        ),
        (
            {"rope": of_groups(0.0004, 0, 1)},
            "rope has the accuracy 0 % at 8 blanks, 0.04 % at 16 blanks (as trained)",
        ),
    ],
)
def test_the_first_sentence_says_which_variants_are_best_where_and_that_one_seed_was_run(
    values, sentence
):
    _, (first, second) = headline(copying(values))
    assert first.startswith(sentence)
    assert second.startswith(
        "One seed of each variant was run: a difference may come from the seed"
    )


def test_the_first_sentence_about_losses_names_the_lowest():
    def losses(variant, *values):
        lengths = zip((64, 128, 256, 512, 1024), values)
        of = {"group": "books", "task": "perplexity"}
        return run(
            variant,
            1,
            *(replace(score(v, "loss", better="lower"), length=n, **of) for n, v in lengths),
        )

    made = Comparison(
        {}, {}, "rope", [losses("rope", 3, 3.1, 3.2, 4, 5), losses("tape", 3, 3, 3, 3, 3.5)]
    )
    assert (
        headline(made)[1][0]
        == "tape has the lowest loss: 3.000 at 64 tokens to 3.500 at 1,024 tokens; rope has 3.000"
        " at 64 tokens to 5.000 at 1,024 tokens."
    )


def by_length(values, metric="accuracy", better="higher", conditions=(64, 128, 256, 512, 1024)):
    """Return a `Measured` of values by label, in the order of `conditions`: lengths, or names of
    groups.
    """
    subjects = [
        Score(metric, 0.0, better, length=one if isinstance(one, int) else None)
        for one in conditions
    ]
    subjects = [
        replace(one, group="" if one.length else name) for one, name in zip(subjects, conditions)
    ]
    scores = {
        one: {label: of[n] for label, of in values.items() if n < len(of)}
        for n, one in enumerate(subjects)
    }
    return measured(metric, {subject: of for subject, of in scores.items() if of})


@pytest.mark.parametrize(
    "found, sentence",
    [
        # No label is said to be one of the others if it is the best somewhere.
        (
            by_length({"x": [0.9, 0.2], "y": [0.5, 0.4]}),
            (
                "The highest accuracy is that of x with 90 % at 64 tokens and that of y with 40 %"
                " at 128 tokens."
            ),
        ),
        (
            by_length({"x": [0.9, 0.2], "y": [0.5, 0.4], "z": [0.1, 0.1]}),
            (
                "The highest accuracy is that of x with 90 % at 64 tokens and that of y with 40 %"
                " at 128 tokens; z has 10 % at 64 tokens and 128 tokens."
            ),
        ),
        # x is not the best from 64 to 1,024 tokens.
        (
            by_length({"x": [0.9, 0.8, 0.2, 0.7, 0.6], "y": [0.5] * 5}),
            (
                "The highest accuracy is that of x with 90 % at 64 tokens, 80 % at 128 tokens, 70 %"
                " at 512 tokens and 60 % at 1,024 tokens and that of y with 50 % at 256 tokens."
            ),
        ),
        # The ends alone would hide the values between them.
        (
            by_length({"x": [2, 4, 9, 4, 2], "y": [9, 9, 9.5, 9, 9]}, "loss", "lower"),
            (
                "x has the lowest loss: 2.000 to 9.000 from 64 tokens to 1,024 tokens; y has 9.000"
                " to 9.500 from 64 tokens to 1,024 tokens."
            ),
        ),
        # Names have no order.
        (
            by_length(
                {"x": [0.9, 0.1, 0.8, 0.7, 0.6]}, conditions=("law", "web", "art", "sea", "sky")
            ),
            "x has the accuracy 10 to 90 % for law, web, art and 2 others.",
        ),
        # z has the highest value at 64 tokens, and none at 128.
        (
            by_length({"x": [0.9, 0.8], "y": [0.5, 0.4], "z": [1.0]}),
            (
                "x has the highest accuracy: 90 % at 64 tokens and 80 % at 128 tokens; y has 50 %"
                " at 64 tokens and 40 % at 128 tokens. This leaves out z, which lacks some of these"
                " scores."
            ),
        ),
    ],
)
def test_a_finding_claims_no_more_than_the_values_show(found, sentence):
    assert finding(found) == sentence


CLEAR = {"rope": {1: 0.5, 2: 0.6, 3: 0.7}, "tape": {1: 0.8, 2: 0.91, 3: 1.0}}


@pytest.mark.parametrize(
    "found, bold, outcomes",
    [
        (
            CLEAR,
            True,
            [
                "tape has the highest mean accuracy: 90 % for IID; rope has 60 % for IID.",
                (
                    "Compared with rope, accuracy is significantly better with tape (+0.303 for"
                    " IID) (paired t tests"
                ),
            ],
        ),
        # What may be due to chance is not the first sentence.
        (
            FOUND,
            False,
            [
                "No difference in accuracy from rope is significant",
                "tape has the highest mean accuracy",
            ],
        ),
        (
            {"rope": {1: 0.5}, "tape": {1: 0.9}},
            False,
            ["tape has the highest accuracy", "One seed of each variant"],
        ),
        # A difference that does not vary cannot be tested, and is not hidden by that.
        (
            {"rope": {1: 0.0, 2: 0.0}, "tape": {1: 1.0, 2: 1.0}},
            False,
            [
                "tape has the highest mean accuracy: 100 %",
                "No difference in accuracy can be tested",
            ],
        ),
    ],
)
def test_only_a_significant_difference_is_bold_and_a_result(found, bold, outcomes):
    title, paragraphs = headline(comparison(found))
    assert title.startswith("Comparison of rope")
    assert [text.startswith(outcome) for text, outcome in zip(paragraphs, outcomes)] == [True] * 2
    assert f"{len(found)} variants of one recipe (rope" in paragraphs[-1]
    (table,) = task_tables(by_task(comparison(found))["selective_copy"], "rope")
    assert any(cell.strong for row in table.rows for cell in row) == bold


def test_seeds_that_not_all_variants_have_make_no_difference_in_the_findings():
    # As after an interruption: rope is as good as tape with seed 1, and tape has not run with seed
    # 2 yet.
    _, paragraphs = headline(comparison({"rope": {1: 0.5, 2: 0.9}, "tape": {1: 0.5}}))
    assert paragraphs[:2] == [
        "The accuracy is about the same for both: 50 % for IID.",
        "This counts only seed 1, which all variants have.",
    ]
    _, paragraphs = headline(comparison(FOUND))
    assert paragraphs[1].startswith(
        "tape has the highest mean accuracy: 80 % for IID; rope has 65 % for IID."
    )
    assert paragraphs[2] == "This counts only seeds 2 and 3, which all variants have."
    assert not any("counts only" in text for text in headline(comparison(CLEAR))[1])


def test_the_result_of_one_task_claims_nothing_about_another_task():
    def both(variant, seed, value, other):
        return run(variant, seed, score(value), replace(score(other), task="passkey"))

    values = {"rope": (0.5, 0.6, 0.7), "tape": (0.8, 0.91, 1.0)}
    runs = [
        both(variant, seed, x, x) for variant, of in values.items() for seed, x in enumerate(of)
    ]
    runs += [
        both("nope", seed, x + (0.1, -0.1, 0.02)[seed], 0.1 * x)
        for seed, x in enumerate(values["rope"])
    ]
    _, paragraphs = headline(Comparison({}, {}, "rope", runs))
    assert [text.partition(":")[0] for text in paragraphs[:2]] == ["Selective copy", "Passkey"]
    assert paragraphs[2].startswith(
        "Compared with rope, accuracy (Selective copy) is significantly better with tape"
    )


def test_a_comparison_without_finished_runs_has_a_page():
    assert "No run is finished." in page({}, {}, [Comparison({}, {}, "rope")])


def test_panels_of_one_metric_have_the_same_limits():
    def losses(variant, *values):
        lengths = zip((128, 256), values)
        return run(
            variant, 1, *(replace(score(v, "loss", better="lower"), length=n) for n, v in lengths)
        )

    made = Comparison({}, {}, "rope", [losses("rope", 3.0, 4.0), losses("tape", 3.1, 5.0)])
    drawn = picture(by_task(made)["selective_copy"], ["rope", "tape"])[0].figure.axes
    assert len(drawn) == 2 and len({axes.get_xlim() for axes in drawn}) == 1
    shares = (
        picture(by_task(comparison())["selective_copy"], list(FOUND))[0].figure.axes[0].get_xlim()
    )
    assert shares == pytest.approx((-0.05, 1.05))


def test_markdown_has_a_row_for_each_variant_and_the_notes():
    text = markdown(comparison(), ["tape, seed 4"])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert (
        "| tape (3 seeds) " in lines[3]
        and "| 0.7667 ± 0.1155 (+0.1667 (0.0232 – 0.3101), p = 0.0755) |" in lines[3]
    )
    assert "With 3 seeds" in text and "more than 2.5 times" in text
    assert (
        "Fewer seeds than the others: nope&#60;b&#62; (2)." in text
        and "Not finished: tape, seed 4." in text
    )


@pytest.mark.parametrize("metrics", [1, 2])
def test_text_from_files_is_escaped_in_markdown(metrics):
    odd = (
        "x<img src=x onerror=alert(1)> <script>y</script> [c](javascript:z) | **b** `code`"
        " https://h.org"
    )
    scores = [
        Score(f"{odd} {number}", 0.5, "higher", group=odd, unit=odd, task=odd)
        for number in range(metrics)
    ]
    runs = [
        replace(run(odd, seed, *scores), hardware=odd, data={odd: str(seed)}) for seed in (1, 2)
    ]
    text = markdown(Comparison({}, {}, odd, runs), [odd])
    blocks = MarkdownIt("commonmark").enable(["table"]).parse(text)
    inline = [child for block in blocks for child in block.children or ()]
    assert {token.type for token in inline} == {"text"}
    assert not [block for block in blocks if block.type.startswith(("html", "code", "fence"))]
    # In a heading, a caption for each table, cells, and notes on hardware, data, missing runs and
    # variants.
    shown = "".join(child.content for child in inline)
    assert shown.lower().count(odd.lower()) >= 9


def test_the_notes_say_that_one_seed_has_no_test():
    assert "There is one seed" in notes(comparison({"rope": {1: 0.5}, "tape": {1: 0.6}}))[1]


def test_a_warning_names_what_differs_between_runs():
    mixed = comparison()
    one = {"a.idx": "1 bytes", "b.bin": "2 bytes"}
    assert warnings(mixed) == []
    mixed.runs[:2] = [replace(mixed.runs[0], data=one), replace(mixed.runs[1], data=one)]
    assert warnings(mixed) == []
    mixed.runs[0] = replace(
        mixed.runs[0], hardware="GPU y", versions={"torch": "2.13.0", "commit": "def"}
    )
    mixed.runs[1] = replace(mixed.runs[1], data=one | {"b.bin": "3 bytes"})
    (sentence,) = warnings(mixed)
    assert sentence.endswith(": the hardware, commit, b.bin.")


def test_the_picture_shows_every_seed_and_the_page_escapes_names():
    found = by_task(comparison())["selective_copy"]
    (axes,) = picture(found, list(FOUND))[0].figure.axes
    points = [sorted(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None"]
    assert points == [sorted(of.values()) for of in FOUND.values()]
    content = page({}, {}, [comparison(), comparison()])
    assert "nope&lt;b&gt;" in content and "nope<b>" not in content and content.count("<img") == 2


def base(*others):
    recipe = ROOT / "tests" / "recipes" / "tiny.yaml"
    return parse_run_config(["--config", str(recipe), "--data.prefix", "x", *others])


def test_a_file_omits_defaults_and_can_be_read_back(tmp_path):
    write_comparison(tmp_path / "a.json", comparison())
    assert read_comparison(tmp_path / "a.json") == comparison()
    first = json.loads((tmp_path / "a.json").read_text())["runs"][0]["scores"][0]
    assert sorted(first) == ["better", "group", "metric", "task", "value"]


def test_runs_are_added_only_with_equal_settings(tmp_path):
    first = replace(empty(base(), [], "rope"), runs=[run("rope", 1, score(0.5))])
    write_comparison(tmp_path / "a.json", first)
    # Neither the recipe's own encoding nor what is logged has an effect.
    now = base("--model.position_encoding", "nope", "--logging.interval", "7")
    target = replace(
        empty(now, [], "rope"), runs=[run("tape", 1, score(0.6)), run("rope", 1, score(0.7))]
    )
    add_runs(target, tmp_path / "a.json", now)
    assert [(r.variant, r.scores[0].value) for r in target.runs] == [("tape", 0.6), ("rope", 0.7)]
    target.runs.pop()
    add_runs(target, tmp_path / "a.json", now)
    assert [r.variant for r in target.runs] == ["tape", "rope"]
    for change, reported in (
        (["--model.num_layers", "2"], "model.num_layers: was 3, is now 2"),
        (["--optimizer.lr", "0.5"], "optimizer.lr: was 0.01, is now 0.5"),
        # The order of the data follows from this; only the setting itself is named.
        (["--train.steps", "11"], "train.steps: was 10, is now 11"),
        # The recipe's own encoding does not read it, but variants do.
        (
            ["--model.position.gate_input", "attention"],
            "model.position.gate_input: was mlp, is now attention",
        ),
    ):
        with pytest.raises(FileError) as error:
            add_runs(empty(base(*change), [], "rope"), tmp_path / "a.json", base(*change))
        assert (
            error.value.subject == str(tmp_path / "a.json")
            and f"({reported})" in error.value.problem
        )
    write_comparison(
        tmp_path / "a.json", replace(empty(base(*change), [], "rope"), runs=first.runs)
    )
    with pytest.raises(FileError, match="model.position.gate_input: was attention, is now mlp"):
        add_runs(empty(base(), [], "rope"), tmp_path / "a.json", base())


OTHER_FORMAT = '{"settings": {}, "evaluation": {}, "baseline": "", "format": 2}'


@pytest.mark.parametrize("content", ["{", '{"format": 1}', "[]", OTHER_FORMAT])
def test_damaged_files_and_files_of_another_format_are_refused_by_name(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(FileError) as error:
        read_comparison(tmp_path / "a.json")
    assert error.value.subject == str(tmp_path / "a.json")


def test_all_comparisons_in_the_repository_can_be_read():
    files = sorted((ROOT / "benchmarks" / "results" / "comparisons").glob("*.json"))
    found = {file.stem: read_comparison(file) for file in files}
    assert len(found["grid_navigation_1d"].runs) == 66
    assert all(score.task for one in found.values() for run in one.runs for score in run.scores)
