import base64
import json
import re
from pathlib import Path

import lxml.html
import pytest
from report_cases import CONFIG, results, score, task, write_results, write_rows, write_run

from megatron_tape.command_line import status_of
from megatron_tape.config.evaluation import SelectiveCopySettings
from megatron_tape.errors import FileError
from megatron_tape.evaluation import figures
from megatron_tape.evaluation.figures import clean
from megatron_tape.evaluation.report import page as page_module
from megatron_tape.evaluation.report.page import page, read_runs_and_results
from megatron_tape.evaluation.report.tables import decimals_for, shown_number
from megatron_tape.evaluation.task import Picture, Task
from megatron_tape.position import ENCODINGS
from megatron_tape.run import curves
from megatron_tape.run.curves import read_run
from pretrain import report

ROOT = Path(__file__).parents[2]
NASTY = '<script>alert("x")</script>&amp;"\' onload=$x$ \u202e\x07\ud800'
LENGTHS = (256, 512, 1024)


class Page:
    """A page: its root, the first paragraphs, and by the titles of sections their texts, tables as
    rows of texts, and descriptions of pictures.
    """

    def __init__(self, content):
        self.root = lxml.html.fromstring(content)
        self.outcome = [shown.text_content() for shown in self.root.xpath("//p[@class='outcome']")]
        self.sections = {}
        self.tables = {}
        self.pictures = {}
        for section in self.root.iter("section"):
            title = section.find("h2").text_content()
            self.sections[title] = section.text_content()
            self.pictures[title] = [picture.get("alt") for picture in section.iter("img")]
            for row in section.iter("tr"):
                # The smaller text of a cell follows after a bar.
                texts = ["|".join(text.strip() for text in cell.itertext()) for cell in row]
                self.tables.setdefault(title, []).append(texts)


def page_of(tmp_path, *paths):
    output = tmp_path / "report.html"
    report.main([*map(str, paths), "--output", str(output)])
    return Page(output.read_text(encoding="utf-8"))


def evaluated(tmp_path, **models):
    """Return the page of models, whose tasks are given by label."""
    files = [
        write_results(tmp_path / label, results(label, tasks)) for label, tasks in models.items()
    ]
    return Page(page(*read_runs_and_results(files)))


def accuracies(value, **changes):
    scores = [
        score(
            "accuracy",
            value - index / 10,
            "higher",
            length=length,
            low=0.1,
            high=0.95,
            count=8 + index,
            counted="prompt",
        )
        for index, length in enumerate(LENGTHS)
    ]
    return task(scores, **changes)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page of two runs with an evaluation each, and a third model that has only results, with a
    nasty label.
    """
    root = tmp_path_factory.mktemp("compared")
    for name, value in (("tape", 0.9), ("rope", 0.8)):
        run = write_run(root / name, position_encoding=name, offset=1 - value)
        tasks = {
            "shiny": accuracies(value, notes=["All of them.", f"Only {name}."]),
            "blunt": task([score(value=value)]),
        }
        write_results(run / "evaluation" / "step-00000300", results(name, tasks))
    nasty = {
        "shiny": accuracies(0.7, notes=["All of them.", NASTY]),
        NASTY: task([score(NASTY, unit=NASTY)]),
    }
    config = {**CONFIG, "model_type": NASTY}
    file = write_results(root / "other", results(NASTY, nasty, config))
    output = root / "report.html"
    report.main(
        [
            str(root / "tape"),
            str(root / "rope"),
            str(file),
            "--output",
            str(output),
        ]
    )
    return output.read_text(encoding="utf-8")


def test_the_page_loads_no_external_files_and_escapes_text(compared):
    root = lxml.html.fromstring(compared)
    (policy,) = root.xpath("//meta[@http-equiv]/@content")
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert re.search(r"https?://|@import|url\(", compared) is None
    for address in root.xpath("//@src"):
        kind, _, content = address.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content).endswith(b"IEND\xaeB`\x82")
    assert len(root.xpath("//script")) == 1
    assert not root.xpath("//@*[starts-with(name(), 'on')]")
    ids = root.xpath("//@id")
    assert [f"#{target}" for target in ids] == root.xpath("//@href") and len(ids) == len(set(ids))

    shown = clean(NASTY)
    assert shown.startswith('<script>alert("x")</script>&amp;')
    assert "\ufffd" in shown
    text = root.text_content()
    assert text.count(shown) >= 5
    assert "\x07" not in text
    assert "\u202e" not in text


def test_sections_have_scores_curves_pictures_and_notes(compared):
    parsed = Page(compared)
    assert list(parsed.sections)[1:] == ["Blunt", "Shiny", "Training"]
    rows = parsed.tables["Shiny"]
    assert rows[0] == ["metric", "length (tokens)", "tape", "rope", clean(NASTY)]
    assert [row[1] for row in rows[1:]] == ["256", "512", "1,024"]
    assert rows[1][2] == "0.900|0.100 \N{EN DASH} 0.950|8 prompts"
    assert parsed.tables["Blunt"][1][0] == "perplexity \N{DOWNWARDS ARROW}"
    notes = parsed.sections["Shiny"]
    assert notes.count("All of them.") == 1
    assert "tape: Only tape." in notes

    training = parsed.tables["Training"]
    assert [row[0] for row in training] == ["run", "tape", "rope"]
    assert training[1][2:4] == ["300|of 300", "614,400"]
    assert training[1][-2:] == ["1,155", "25.0 GFLOP/s"]
    names = [text.partition(" by step")[0] for text in parsed.pictures["Training"]]
    assert names == ["Training loss", "Validation loss", "Learning rate"]


def losses(value, *, vocab_size=9, digest=None, key_tokens=None):
    """Return results of a loss task, with the record of the scored tokens if `digest` is given."""
    scores = [
        score(
            "gain",
            value,
            "higher",
            unit="nats per token",
            length=512,
        )
    ]
    details = {}
    if digest is not None:
        details["scored"] = {"books": {"count": 512, "digest": digest}}
    if key_tokens is not None:
        details["key_tokens"] = key_tokens
    tasks = {"context_gain": task(scores, details=details)}
    return results(digest or "x", tasks, {**CONFIG, "vocab_size": vocab_size})


@pytest.mark.parametrize(
    "first, second, warning",
    [
        ({"digest": "a"}, {"digest": "a", "vocab_size": 8}, None),
        ({}, {"vocab_size": 9}, None),
        ({}, {"vocab_size": 8}, "did not score the same tokens"),
        ({"digest": "a"}, {"digest": "b"}, "did not score the same tokens"),
        ({"key_tokens": [1, 2]}, {"key_tokens": [1]}, "its own key tokens"),
        ({"key_tokens": [1, 2]}, {"key_tokens": [1, 2]}, None),
    ],
)
def test_scores_over_different_tokens_have_a_warning(tmp_path, first, second, warning):
    files = [
        write_results(tmp_path / str(index), losses(1.5, **changes))
        for index, changes in enumerate((first, second))
    ]
    warnings = Page(page(*read_runs_and_results(files))).root.xpath("//p[@class='warning']")
    assert bool(warnings) == (warning is not None)
    assert all(warning in shown.text for shown in warnings)


def test_settings_without_effect_on_scores_have_no_warning(tmp_path):
    def shiny(path, digest, **changes):
        settings = {"samples": 1, "data": path, "batch_size": len(path)}
        return {
            "shiny": task(
                [score()],
                settings=settings,
                data={path: digest},
                **changes,
            )
        }

    page = evaluated(tmp_path, x=shiny("a/x", "0"), y=shiny("b", "0"))
    assert "comparable" not in page.sections["Shiny"]
    page = evaluated(
        tmp_path,
        x=shiny("a/x", "0"),
        y=shiny("a/x", "1", dtype="bf16"),
    )
    assert "may not be comparable: data, dtype." in page.sections["Shiny"]


def test_passkeys_of_earlier_versions_have_a_warning(tmp_path):
    old = {"samples": 1, "form": "exact", "batch_size": 1}
    page = evaluated(
        tmp_path,
        x={"passkey": task([score()], settings=old)},
        y={"passkey": task([score()], settings={"samples": 1})},
    )
    assert "may not be comparable: form." in page.sections["Passkey"]


@pytest.mark.parametrize(
    "second, digest, bold",
    [
        ({"low": 11.0, "high": 13.0}, "0", ["x"]),
        ({"low": 10.1, "high": 13.0}, "0", []),
        ({}, "0", []),
        ({"low": 11.0, "high": 13.0}, "1", []),
    ],
)
def test_the_best_value_is_bold_only_if_intervals_allow_it(tmp_path, second, digest, bold):
    first = task(
        [score(value=10.0, low=9.0, high=10.5)],
        data={"text.jsonl": "0"},
    )
    other = task([score(value=12.0, **second)], data={"text.jsonl": digest})
    page = evaluated(tmp_path, x={"shiny": first}, y={"shiny": other})
    assert [cell.get("data-column") for cell in page.root.xpath("//td[b]")] == bold
    assert page.root.findtext(".//h1") == page.root.findtext(".//title") == "Evaluation of x and y"
    assert ("In 1 of 1 score" in "".join(page.outcome)) == bool(bold)


def test_lengths_of_a_metric_follow_each_other(tmp_path):
    scores = [
        score(metric, length=length) for length in (64, 128) for metric in ("loss", "perplexity")
    ]
    rows = evaluated(tmp_path, x={"shiny": task(scores)}).tables["Shiny"][1:]
    assert [row[1] for row in rows] == ["64", "128", "64", "128"]
    assert [row[0].split()[0] for row in rows] == ["loss", "loss", "perplexity", "perplexity"]


@pytest.mark.parametrize("spread, first", [(0.1, "Perplexity: x has"), (1.0, "No model leads")])
def test_the_first_sentences_name_the_best_model_or_say_that_none_leads(tmp_path, spread, first):
    def perplexity(*values):
        scores = [
            score(
                "loss",
                value,
                length=length,
                low=value - spread,
                high=value + spread,
            )
            for length, value in zip((64, 128), values)
        ]
        return {"perplexity": task(scores)}

    paragraphs = evaluated(tmp_path, x=perplexity(3.0, 2.0), y=perplexity(3.5, 2.5)).outcome
    assert paragraphs[0].startswith(first)
    finding = (
        "Perplexity: x has the lowest loss: 3.000 at 64 tokens and 2.000 at 128 tokens; y has 3.500"
        " at 64 tokens and 2.500 at 128 tokens."
    )
    assert finding in paragraphs


def test_groups_of_a_synthetic_task_are_named_by_their_sizes(tmp_path):
    """In tables, in pictures, and in curves of evaluations during training."""
    settings = {"blanks": {"IID": 16, "dense": 8}}
    scores = [score("accuracy", 0.5, "higher", group=group) for group in settings["blanks"]]
    page = evaluated(tmp_path, x={"selective_copy": task(scores, settings=settings)})
    rows = page.tables["Selective copy"]
    assert [row[1] for row in rows[1:]] == ["8 blanks", "16 blanks (as trained)"]
    shown = "0.5 8 blanks accuracy, 0.5 16 blanks (as trained) accuracy"
    assert shown in page.pictures["Selective copy"][0]

    run = write_run(tmp_path / "run", evaluation={"selective_copy": settings})
    key = "evaluation/selective_copy/accuracy/dense"
    write_rows(run, [{"step": step, key: 0.5} for step in (1, 2)])
    assert page_of(tmp_path, run).pictures["Training"] == [
        "Selective copy by step; at the end, run accuracy, 8 blanks 0.5."
    ]


def test_losses_at_different_lengths_come_with_a_warning(tmp_path):
    runs = [write_run(tmp_path / str(length), seq_length=length) for length in (256, 1024)]
    warning = "losses may not be comparable: model.seq_length."
    assert warning in page_of(tmp_path, *runs).sections["Training"]
    assert "comparable" not in page_of(tmp_path, runs[0]).sections["Training"]


def test_equal_labels_are_distinguished_by_path(tmp_path):
    a = write_run(tmp_path / "a" / "tape")
    b = write_run(tmp_path / "b" / "tape")
    for step in (100, 300):
        write_results(a / "evaluation" / f"step-{step:08}", results("tape"))
    runs, models = read_runs_and_results([a, b, a])
    assert list(runs) == ["tape", f"tape ({b})"]
    assert list(models) == ["tape", f"tape ({a / 'evaluation' / 'step-00000300'})"]


def test_a_run_without_settings_or_a_curve_is_shown(tmp_path):
    run = write_run(tmp_path / "tape", steps=10)
    (run / "config.yaml").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 60, "train/loss"')  # it is being written
    page = page_of(tmp_path, run)
    assert page.tables["Training"][1][1:3] == ["10|of unknown", "20,480"]
    assert page.pictures["Training"] == []


def test_long_curves_are_thinned_evenly(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", interval=1)
    whole = read_run(run).curve("train/loss")
    monkeypatch.setattr(curves, "MOST_POINTS", 16)
    some = read_run(run).curve("train/loss")
    assert some.last == whole.last
    assert len(whole.values) == 300
    assert list(some.steps) == list(range(1, 301, 32))
    assert list(some.values) == list(whole.values[::32])


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{", "it is not JSON"),
        (json.dumps(results(tasks={"x": {"settings": {}}})), "tasks.x.data: "),
        (json.dumps(results()).replace("10.0", "NaN"), "NaN is not a finite number"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence_that_names_the_file(
    tmp_path, capsys, content, problem
):
    file = tmp_path / "results.json"
    file.write_text(content)
    assert status_of(lambda: page_of(tmp_path, tmp_path)) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert str(file) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_records_of_any_name_are_recognized_by_their_content(tmp_path, capsys):
    records = ROOT / "benchmarks" / "results"
    files = [records / "ladders" / "small.json", records / "comparisons" / "recall.json"]
    output = tmp_path / "page.html"
    report.main([*map(str, files), "--output", str(output)])
    assert capsys.readouterr().out.startswith(f"{output}: 1 ladder, 1 comparison, ")


@pytest.mark.parametrize("name", ["ladder.json", "comparison.json"])
def test_a_damaged_record_of_a_known_name_is_named_with_its_problem(tmp_path, name):
    (tmp_path / name).write_text('{"format": 1}')
    with pytest.raises(FileError, match="Field required") as error:
        report.write_report([tmp_path], tmp_path / "page.html")
    assert error.value.subject == str(tmp_path / name)


def test_paths_without_a_run_or_results_are_rejected(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=20)
    (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    (tmp_path / "empty").mkdir()
    for arguments, problem in (
        ([tmp_path / "nowhere"], "contains neither metrics.jsonl nor results.json"),
        ([tmp_path / "empty"], "contains neither metrics.jsonl nor results.json"),
        ([run], "metrics.jsonl cannot be used: line 2"),
        ([run, "--output", run / "metrics.jsonl"], "ends in .html"),
    ):
        assert status_of(lambda: report.main([*map(str, arguments)])) == 2  # noqa: B023
        assert problem in capsys.readouterr().err


class _Drawn(Task):
    name = "shiny"
    Settings = SelectiveCopySettings

    @classmethod
    def draw(cls, results):
        figure, (left, right) = figures.new_figure(1, 2)
        looks = figures.styles(results)
        for label in results:
            figures.curve(
                left,
                looks[label],
                LENGTHS,
                [1, 2, None],
                [0.5, 2.5, None],
                [2, 3, None],
            )
        figures.length_axis(left, LENGTHS)
        figures.heat_map(
            right,
            [[0.0, 1.0], [None, 0.25]],
            ["0 %", "100 %"],
            LENGTHS[:2],
            bar="x",
        )
        figures.legend(figure)
        colors = [looks[label]["color"] for label in results]
        return [Picture("drawn", f"{', '.join(results)} in {', '.join(colors)}.", figure)]


def test_a_model_has_the_same_color_in_every_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(page_module.TASKS, "shiny", _Drawn)
    first = results(
        "first",
        {"blunt": task([score()])},
        {**CONFIG, "model_type": "rope"},
    )
    config = {**CONFIG, "model_type": "encoded", "position_encoding": "rope"}
    second = results("second", {"shiny": accuracies(0.5)}, config)
    files = [write_results(tmp_path / "1", first), write_results(tmp_path / "2", second)]
    color = figures.shade(figures.ENCODING_COLORS["rope"], 1)
    assert Page(page(*read_runs_and_results(files))).pictures["Shiny"] == [f"second in {color}."]


def test_a_picture_that_cannot_be_drawn_is_a_sentence_in_its_place(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_rows(run, [row | {"train/loss": 1e308} for row in rows])
    parsed = page_of(tmp_path, run)
    assert [text.split()[0] for text in parsed.pictures["Training"]] == ["Learning"]
    sentence = "The picture of training loss could not be drawn ("
    assert sentence in parsed.sections["Training"]
    assert f"warning: {sentence}" in capsys.readouterr().err


def test_styles_differ_and_accept_any_label():
    scales = "tape+increments=learned+optimizer.lr_scale_of={position: %d, position.increments: 1}"
    labels = [
        "_hidden",
        "$a",
        scales % 1,
        scales % 3,
        *map(str, range(20)),
    ]
    looks = figures.styles(labels)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(labels)
    shown = [look["label"] for look in looks.values()]
    assert shown[:2] == [" _hidden", "$a"]
    assert len(set(shown)) == len(labels)
    assert max(map(len, shown)) <= figures.LONGEST_LABEL
    with figures.model_encodings(dict.fromkeys(labels)):
        assert figures.styles([labels[3]]) == {labels[3]: looks[labels[3]]}


def test_every_encoding_has_its_own_color_and_its_variants_differ_by_shade_or_line():
    colors = figures.ENCODING_COLORS
    assert colors.keys() <= ENCODINGS.keys()
    assert len(set(colors.values())) == len(colors)
    variants = ["tape", "rope", *(f"tape+increments={number}" for number in range(8))]
    # Whatever else is in the picture, and in whatever order.
    for order in (variants, variants[::-1][-2:]):
        looks = figures.variant_styles(order)
        assert looks["rope"]["color"] == colors["rope"]
        assert looks["tape"]["color"] == colors["tape"]
        assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == len(order)
    unknown = {look["color"] for look in figures.styles(["gpt2", "mine"]).values()}
    assert not unknown & {colors["rope"], colors["tape"]}


@pytest.mark.parametrize(
    "values, shown",
    [
        ([0.5, 1.0], ["0.500", "1.000"]),
        ([4096, 65536], ["4,096", "65,536"]),
        ([-0.0123], ["\N{MINUS SIGN}0.0123"]),
        ([12.345, 3.2], ["12.35", "3.20"]),
        ([1234.56], ["1,234.6"]),
        ([3.21, 1.5e9], ["3.21", "1.5e+09"]),
        ([0.0], ["0.000"]),
        ([1.0, -0.0001], ["1.000", "0.000"]),
    ],
)
def test_numbers_of_one_table_have_the_same_decimals(values, shown):
    assert [shown_number(value, decimals_for(values)) for value in values] == shown
