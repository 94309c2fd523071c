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
    empty_comparison,
    read_comparison,
    results_by_metric,
    write_comparison,
)
from megatron_tape.evaluation.report.comparison_tables import (
    by_task,
    headline,
    markdown,
    picture,
    task_tables,
    warnings,
)
from megatron_tape.evaluation.report.findings import finding, first_measured
from megatron_tape.evaluation.report.page import page
from megatron_tape.evaluation.results import Score

ROOT = Path(__file__).parents[2]
FOUND = {
    "rope": {1: 0.5, 2: 0.6, 3: 0.7},
    "tape": {1: 0.7, 2: 0.7, 3: 0.9},
    "nope<b>": {2: 0.4, 3: 0.4},
}
CLEAR = {"rope": {1: 0.5, 2: 0.6, 3: 0.7}, "tape": {1: 0.8, 2: 0.91, 3: 1.0}}
ONE_SEED = {"rope": {1: 0.5}, "tape": {1: 0.6}}


def score(value, metric="accuracy", better="higher", group="IID", task="selective_copy", **others):
    return Score(
        metric,
        value,
        better,
        group=group,
        task=task,
        **others,
    )


def run(variant, seed, *scores):
    versions = {"torch": "2.13.0", "commit": "abc"}
    return FinishedRun(variant, seed, list(scores), 1.0, 1.0, "CPU x, 2 cores", versions)


def comparison(values=FOUND, baseline="rope"):
    """Return a comparison with one accuracy by variant and seed."""
    runs = [
        run(variant, seed, score(value))
        for variant, by_seed in values.items()
        for seed, value in by_seed.items()
    ]
    return Comparison({}, {}, baseline, runs)


def tables_of(comparison, task="selective_copy"):
    return task_tables(by_task(comparison)[task], "rope")


def cells_of(table):
    """The cells of a table as texts, with their smaller lines after bars."""
    return [
        ["|".join([cell.text, *cell.detail.splitlines()]) for cell in row] for row in table.rows
    ]


def test_means_spreads_and_differences_are_over_the_seeds():
    ((rope, tape, nope),) = results_by_metric(comparison()).values()
    assert rope.mean == pytest.approx(0.6)
    assert rope.spread == pytest.approx(0.1)
    assert rope.difference is None
    assert tape.mean == pytest.approx(2.3 / 3)
    assert tape.spread == pytest.approx(statistics.stdev([0.7, 0.7, 0.9]))
    # Differences 0.2, 0.1 and 0.2: t = 5 with two degrees of freedom; two variants are compared.
    assert tape.difference.value == pytest.approx(0.5 / 3)
    assert tape.difference.p == pytest.approx(2 * 0.037750, abs=2e-6)
    # Over the seeds of both.
    assert nope.difference.count == 2
    assert nope.difference.value == pytest.approx(-0.25)


def test_a_table_has_a_row_for_each_variant_and_marks_missing_values():
    values = {
        "rope": {1: 1.0, 2: 1.0},
        "tape": {1: 1.0, 2: 1.0},
        "nope": {1: 0.5},
    }
    (table,) = tables_of(comparison(values))
    assert table.columns == ["variant", "IID"]
    assert set(table.row_groups) == {"accuracy \N{UPWARDS ARROW}"}
    assert cells_of(table) == [
        ["rope|2 seeds", "1.0000 ± 0.0000"],
        ["tape|2 seeds", "1.0000 ± 0.0000|0.0000"],
        ["nope|1 seed", "0.5000|−0.5000"],
    ]
    (table,) = tables_of(comparison())
    shown = "0.7667 ± 0.1155|+0.1667 (0.0232 – 0.3101)|p = 0.0755"
    assert cells_of(table)[1] == ["tape|3 seeds", shown]


def test_a_table_of_one_seed_has_neither_mean_nor_deviation():
    (table,) = tables_of(comparison(ONE_SEED))
    assert table.caption == "Below each value: the difference from rope."
    assert cells_of(table) == [["rope", "0.5000"], ["tape", "0.6000|+0.1000"]]


def copying(values, blanks={"IID": 16, "dense": 8, "sparse": 32}):  # noqa: B006
    """Return a comparison of runs with one seed: for each variant the accuracies by group, and
    their squares as exact matches.
    """
    runs = []
    for variant, accuracies in values.items():
        scores = []
        for group, accuracy in zip(("IID", "dense", "sparse"), accuracies):
            scores.append(score(accuracy, group=group))
            scores.append(score(accuracy**2, "exact match", group=group))
        runs.append(run(variant, 1, *scores))
    settings = {"blanks": blanks, "samples": 9, "of a later version": 1}
    return Comparison({}, {"selective_copy": settings}, "rope", runs)


SIGNED = {"rope": (1, 0.2235, 0.25), "tape": (0.996, 0.22, 0.26)}
SIGNED |= {f"{name}+increments=signed": (1, 1, 1) for name in ("rope", "tape")}


def test_a_task_has_one_table_with_a_column_for_each_condition_as_the_task_names_it():
    (table,) = tables_of(copying(SIGNED))
    assert table.columns == ["variant", "8 blanks", "16 blanks (as trained)", "32 blanks"]
    metrics = ["accuracy \N{UPWARDS ARROW}", "exact match \N{UPWARDS ARROW}"]
    assert table.row_groups == [metrics[0]] * 4 + [metrics[1]] * 4
    assert cells_of(table)[1] == ["tape", "0.2200|−0.0035", "0.9960|−0.0040", "0.2600|+0.0100"]

    content = page({}, {}, [copying(SIGNED)])
    assert content.count("<table") == 1
    assert content.count('scope="rowgroup"') == 2
    assert "IID" not in content
    assert "dense" not in content
    heading, *lines = [
        line for line in markdown(copying(SIGNED)).splitlines() if line.startswith("|")
    ]
    assert heading.split()[1:4:2] == ["metric", "variant"]
    assert len(lines) == 9


def test_lengths_are_columns_and_so_are_metrics_of_the_training():
    lengths = [
        score(
            1.0,
            "loss",
            "lower",
            "books",
            "perplexity",
            length=length,
        )
        for length in (64, 128)
    ]
    training = [
        score(2.0, name, "lower", "", "training") for name in ("validation loss", "seconds")
    ]
    made = Comparison(
        {},
        {},
        "rope",
        [run("rope", 1, *training, *lengths)],
    )
    (table,) = tables_of(made, "perplexity")
    assert table.columns == ["variant", "64 tokens", "128 tokens"]
    assert table.row_groups == ["loss \N{DOWNWARDS ARROW}, books"]
    (table,) = tables_of(made, "training")
    arrow = "\N{DOWNWARDS ARROW}"
    assert table.columns == ["variant", f"validation loss {arrow}", f"seconds {arrow}"]


@pytest.mark.parametrize(
    "blanks",
    [{"IID": "many"}, {"IID": 4, "dense": 8, "sparse": 8}, None],
)
def test_groups_keep_their_names_if_the_recorded_settings_give_none(blanks):
    (table,) = tables_of(copying(SIGNED, blanks))
    assert table.columns[1:] == ["IID", "dense", "sparse"]


@pytest.mark.parametrize(
    "values, sentence",
    [
        (
            SIGNED,
            "With increments=signed, the accuracy is 100 % at 8 blanks, 16 blanks (as trained) and"
            " 32 blanks; without, it is 22 % at 8 blanks, 99.6 to 100 % at 16 blanks (as trained)"
            " and 25 to 26 % at 32 blanks.",
        ),
        (
            {
                "rope": (0.9, 0.5, 0.5),
                "tape": (0.9, 0.6, 0.7),
                "nope": (0.8, 0.1, 0),
            },
            "tape has the highest accuracy: 60 % at 8 blanks, 90 % at 16 blanks (as trained) and"
            " 70 % at 32 blanks; rope has 50 % at 8 blanks and 32 blanks and 90 % at 16 blanks (as"
            " trained).",
        ),
        (
            {"rope": (0.9, 0.5, 0.5), "tape": (0.8, 0.6, 0.7)},
            "The highest accuracy is that of tape with 60 % at 8 blanks and 70 % at 32 blanks and"
            " that of rope with 90 % at 16 blanks (as trained); rope has 50 % at 8 blanks and 32"
            " blanks and 90 % at 16 blanks (as trained).",
        ),
        (
            {"rope": (0.9, 0.5, 0.5), "tape": (0.901, 0.5, 0.5)},
            "rope and tape have about the same accuracy: 50 % at 8 blanks and 32 blanks and 90 % at"
            " 16 blanks (as trained).",
        ),
        (
            {"rope": (0.0004, 0, 1)},
            "rope has the accuracy 0 % at 8 blanks, 0.04 % at 16 blanks (as trained) and 100 % at"
            " 32 blanks.",
        ),
    ],
)
def test_the_first_sentence_says_which_variants_are_best_where(values, sentence):
    _, (first, _) = headline(copying(values))
    assert first == sentence


def finding_of(values):
    """Return the sentences about losses by label, in the order of lengths."""
    scores = {}
    for number, length in enumerate((64, 128, 256, 512, 1024)):
        losses = {label: of[number] for label, of in values.items() if number < len(of)}
        if losses:
            scores[
                score(
                    0.0,
                    "loss",
                    "lower",
                    "",
                    length=length,
                )
            ] = losses
    return finding(first_measured(scores))


@pytest.mark.parametrize(
    "values, sentence",
    [
        # No label is said to be one of the others if it is the best somewhere.
        (
            {"x": [1.5, 5.0], "y": [3.0, 2.0]},
            "The lowest loss is that of x with 1.500 at 64 tokens and that of y with 2.000 at 128"
            " tokens.",
        ),
        (
            {
                "x": [1.5, 5.0],
                "y": [3.0, 2.0],
                "z": [9.0, 9.0],
            },
            "The lowest loss is that of x with 1.500 at 64 tokens and that of y with 2.000 at 128"
            " tokens; z has 9.000 at 64 tokens and 128 tokens.",
        ),
        # The ends alone would hide the values between them.
        (
            {"x": [2, 4, 8.5, 4, 2], "y": [9, 9, 9.5, 9, 9]},
            "x has the lowest loss: 2.000 to 8.500 from 64 tokens to 1,024 tokens; y has 9.000 to"
            " 9.500 from 64 tokens to 1,024 tokens.",
        ),
        # z has the lowest value at 64 tokens, and none at 128.
        (
            {"x": [1.5, 2.0], "y": [3.0, 3.0], "z": [1.0]},
            "x has the lowest loss: 1.500 at 64 tokens and 2.000 at 128 tokens; y has 3.000 at 64"
            " tokens and 128 tokens. Without a value everywhere: z.",
        ),
    ],
)
def test_a_finding_claims_no_more_than_the_values_show(values, sentence):
    assert finding_of(values) == sentence


@pytest.mark.parametrize(
    "values, bold, outcomes",
    [
        (
            CLEAR,
            True,
            [
                "tape has the highest mean accuracy: 90 % for IID; rope has 60 % for IID.",
                "In accuracy, these differ significantly from rope (bold in the table; paired t",
            ],
        ),
        # What may be due to chance is not the first sentence.
        (
            FOUND,
            False,
            ["No difference in accuracy from rope is significant", "tape has the highest mean"],
        ),
        (ONE_SEED, False, ["tape has the highest accuracy", "No difference in accuracy is tested"]),
        # A difference that does not vary cannot be tested, and is not hidden by that.
        (
            {"rope": {1: 0.0, 2: 0.0}, "tape": {1: 1.0, 2: 1.0}},
            False,
            ["tape has the highest mean accuracy: 100 %", "No difference in accuracy is tested"],
        ),
    ],
)
def test_only_a_significant_difference_is_bold_and_a_result(values, bold, outcomes):
    _, paragraphs = headline(comparison(values))
    assert [text.startswith(outcome) for text, outcome in zip(paragraphs, outcomes)] == [True] * 2
    assert f"{len(values)} variants of one recipe (rope" in paragraphs[-1]
    (table,) = tables_of(comparison(values))
    assert any(cell.strong for row in table.rows for cell in row) == bold


def test_seeds_that_not_all_variants_have_make_no_difference_in_the_findings():
    # As after an interruption: rope is as good as tape with seed 1, and tape has not run with seed
    # 2 yet.
    _, paragraphs = headline(comparison({"rope": {1: 0.5, 2: 0.9}, "tape": {1: 0.5}}))
    assert paragraphs[:2] == [
        "rope and tape have about the same accuracy: 50 % for IID.",
        "This counts only the seeds that all variants have: 1.",
    ]
    assert "counts only" not in " ".join(headline(comparison(CLEAR))[1])
    _, paragraphs = headline(comparison({"rope": {1: 0.9}, "tape": {2: 0.5}}))
    assert paragraphs[0].startswith("rope has the highest mean accuracy: 90 %")


def test_the_result_of_one_task_claims_nothing_about_another_task():
    runs = [
        run(variant, seed, score(value), score(value, task="passkey"), score(1.0, task="training"))
        for variant, by_seed in CLEAR.items()
        for seed, value in by_seed.items()
    ]
    _, paragraphs = headline(Comparison({}, {}, "rope", runs))
    assert [text.partition(":")[0] for text in paragraphs[:2]] == ["Selective copy", "Passkey"]
    assert paragraphs[2].startswith("In accuracy (Selective copy), these differ significantly")


def test_a_comparison_without_finished_runs_has_a_page():
    assert "No run is finished." in page({}, {}, [Comparison({}, {}, "rope")])


def test_panels_of_one_metric_have_the_same_limits():
    runs = []
    for variant, losses in (("rope", (3.0, 4.0)), ("tape", (3.1, 5.0))):
        scores = [
            score(loss, "loss", "lower", length=length) for length, loss in zip((128, 256), losses)
        ]
        runs.append(run(variant, 1, *scores))
    made = by_task(Comparison({}, {}, "rope", runs))["selective_copy"]
    first, second = picture(made, ["rope", "tape"])[0].figure.axes
    assert first.get_xlim() == second.get_xlim()


def test_the_picture_shows_every_seed_unless_all_values_are_equal():
    (axes,) = picture(by_task(comparison())["selective_copy"], list(FOUND))[0].figure.axes
    points = [sorted(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None"]
    assert points == [sorted(by_seed.values()) for by_seed in FOUND.values()]
    assert axes.get_xlim() == pytest.approx((-0.05, 1.05))
    equal = by_task(comparison({"rope": {1: 0.0, 2: 0.0}, "tape": {1: 0.0}}))["selective_copy"]
    assert picture(equal, ["rope", "tape"]) == []


def test_markdown_has_a_row_for_each_variant_and_the_notes():
    text = markdown(comparison(), ["tape, seed 4"])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert "| tape (3 seeds) " in lines[3]
    assert "| 0.7667 ± 0.1155 (+0.1667 (0.0232 – 0.3101), p = 0.0755) |" in lines[3]
    assert "With 3 seeds" in text
    assert "more than 2.5 times" in text
    assert "Not finished: tape, seed 4." in text


@pytest.mark.parametrize("metrics", [1, 2])
def test_text_from_files_is_escaped_in_markdown_and_on_the_page(metrics):
    odd = (
        "x<img src=x onerror=alert(1)> <script>y</script> [c](javascript:z) | **b** `code`"
        " https://h.org"
    )
    scores = [
        score(
            0.5,
            f"{odd} {number}",
            group=odd,
            unit=odd,
            task=odd,
        )
        for number in range(metrics)
    ]
    runs = [
        replace(run(odd, seed, *scores), hardware=odd, data={odd: str(seed)}) for seed in (1, 2)
    ]
    made = Comparison({}, {}, odd, runs)
    blocks = MarkdownIt("commonmark").enable(["table"]).parse(markdown(made, [odd]))
    inline = [child for block in blocks for child in block.children or ()]
    assert {token.type for token in inline} == {"text"}
    assert not [block for block in blocks if block.type.startswith(("html", "code", "fence"))]
    # In a heading, a caption for each table, cells, and notes on hardware, data, missing runs and
    # variants.
    shown = "".join(child.content for child in inline)
    assert shown.lower().count(odd.lower()) >= 9
    content = page({}, {}, [made])
    assert "onerror=alert" in content
    assert "<img src=x" not in content


def test_a_warning_names_what_differs_between_runs():
    mixed = comparison()
    data = {"a.idx": "1 bytes", "b.bin": "2 bytes"}
    mixed.runs[:2] = [replace(mixed.runs[0], data=data), replace(mixed.runs[1], data=data)]
    assert warnings(mixed) == []
    versions = {"torch": "2.13.0", "commit": "def"}
    mixed.runs[0] = replace(mixed.runs[0], hardware="GPU y", versions=versions)
    mixed.runs[1] = replace(
        mixed.runs[1],
        data=data | {"b.bin": "3 bytes"},
    )
    (sentence,) = warnings(mixed)
    assert sentence.endswith(": the hardware, commit, b.bin.")


def base(*others):
    recipe = ROOT / "tests" / "recipes" / "tiny.yaml"
    return parse_run_config(["--config", str(recipe), "--data.prefix", "x", *others])


def test_a_file_omits_defaults_and_can_be_read_back(tmp_path):
    write_comparison(tmp_path / "a.json", comparison())
    assert read_comparison(tmp_path / "a.json") == comparison()
    first = json.loads((tmp_path / "a.json").read_text())["runs"][0]["scores"][0]
    assert sorted(first) == ["better", "group", "metric", "task", "value"]


def recorded(path, config):
    """Write a comparison of one run with the settings `config`."""
    made = replace(
        empty_comparison(config, [], "rope"),
        runs=[run("rope", 1, score(0.5))],
    )
    write_comparison(path, made)
    return path


def test_runs_of_a_file_are_added_unless_they_are_known(tmp_path):
    path = recorded(tmp_path / "a.json", base())
    # Neither the recipe's own encoding nor what is logged has an effect.
    now = base("--model.position_encoding", "nope", "--logging.interval", "7")
    target = replace(
        empty_comparison(now, [], "rope"),
        runs=[run("tape", 1, score(0.6))],
    )
    for _ in range(2):
        add_runs(target, path, now)
        assert [(run.variant, run.scores[0].value) for run in target.runs] == [
            ("tape", 0.6),
            ("rope", 0.5),
        ]


@pytest.mark.parametrize(
    "key, before, now",
    [
        ("model.num_layers", "3", "2"),
        ("optimizer.lr", "0.01", "0.5"),
        ("train.steps", "10", "11"),
        # The recipe's own encoding does not read it, but variants do.
        ("model.position.gate_input", "mlp", "attention"),
    ],
)
def test_runs_with_other_settings_are_refused(tmp_path, key, before, now):
    path = recorded(tmp_path / "a.json", base())
    changed = base(f"--{key}", now)
    with pytest.raises(FileError) as error:
        add_runs(empty_comparison(changed, [], "rope"), path, changed)
    assert error.value.subject == str(path)
    # The order of the data follows from train.steps; only the setting itself is named.
    assert f"({key}: was {before}, is now {now})" in error.value.problem


OTHER_FORMAT = '{"settings": {}, "evaluation": {}, "baseline": "", "format": 2}'


def test_passkeys_of_earlier_prompts_are_refused(tmp_path):
    path = recorded(tmp_path / "a.json", base())
    old = replace(read_comparison(path), evaluation={"passkey": {"form": "exact"}})
    write_comparison(path, old)
    target = replace(empty_comparison(base(), [], "rope"), evaluation={"passkey": {}})
    with pytest.raises(FileError, match="passkey was evaluated with other prompts"):
        add_runs(target, path, base())


@pytest.mark.parametrize("content", ["{", '{"format": 1}', "[]", OTHER_FORMAT])
def test_damaged_files_and_files_of_another_format_are_refused_by_name(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(FileError) as error:
        read_comparison(tmp_path / "a.json")
    assert error.value.subject == str(tmp_path / "a.json")


def test_all_comparisons_in_the_repository_can_be_read():
    files = sorted((ROOT / "benchmarks" / "results" / "comparisons").glob("*.json"))
    comparisons = {file.stem: read_comparison(file) for file in files}
    assert len(comparisons["grid_navigation_1d"].runs) == 66
    assert all(
        score.task for made in comparisons.values() for run in made.runs for score in run.scores
    )
