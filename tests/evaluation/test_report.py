import base64
import json
import re
from functools import partial

import lxml.html
import pytest
from report_cases import CONFIG, results, score, settings, task, write_results, write_run

from megatron_tape.command_line import status_of
from megatron_tape.config.evaluation import SelectiveCopySettings
from megatron_tape.evaluation import figures
from megatron_tape.evaluation.figures import clean
from megatron_tape.evaluation.report import page as page_module
from megatron_tape.evaluation.report.page import page, read
from megatron_tape.evaluation.report.tables import decimals_for, shown_number
from megatron_tape.evaluation.task import Picture, Task
from megatron_tape.position import ENCODINGS
from megatron_tape.run import curves
from megatron_tape.run.curves import read_run
from pretrain import report

NASTY = '<script>alert("x")</script>&amp;"\' onload=$x$ \u202e\x07\ud800'
LENGTHS = (256, 512, 1024)


class Page:
    """A page: its root, and by the titles of sections their texts, tables as rows of texts, and
    descriptions.
    """

    def __init__(self, content):
        self.root = lxml.html.fromstring(content)
        self.sections = {}
        self.tables = {}
        self.pictures = {}
        for section in self.root.iter("section"):
            title = section.find("h2").text_content()
            self.sections[title] = section.text_content()
            self.pictures[title] = [picture.get("alt") for picture in section.iter("img")]
            for table in section.iter("table"):
                rows = [[_text_of(cell) for cell in row] for row in table.iter("tr")]
                self.tables[title] = [row for row in rows]


def _text_of(cell):
    """The text of a cell, with its smaller text after a bar."""
    return "|".join(text.strip() for text in cell.itertext())


def page_of(tmp_path, *paths):
    output = tmp_path / "report.html"
    report.main([*map(str, paths), "--output", str(output)])
    return Page(output.read_text(encoding="utf-8"))


def evaluated(tmp_path, **models):
    """Return the page of models, whose `results` are given by label."""
    files = [
        write_results(tmp_path / label, results(label, **given)) for label, given in models.items()
    ]
    return Page(page(*read(files)))


def ours(value, *, count=8, notes=(), **others):
    known = {"low": 0.1, "high": 0.95, "counted": "prompt"}
    scores = [
        score("accuracy", value - index / 10, "higher", length=length, count=count + index, **known)
        for index, length in enumerate(LENGTHS)
    ]
    return task(scores, settings={"samples": count}, notes=notes, **others)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page of two runs with an evaluation each, and a third model that has only results, with a
    nasty label.
    """
    root = tmp_path_factory.mktemp("compared")
    for name, value in (("tape", 0.9), ("rope", 0.8)):
        run = write_run(
            root / name, config=settings(model__position_encoding=name), offset=1 - value
        )
        tasks = {
            "shiny": ours(value, notes=["All of them.", f"Only {name}."]),
            "blunt": task([score(value=value)]),
        }
        write_results(run / "evaluation" / "step-00000300", results(name, tasks))
    other = {
        "shiny": ours(0.7, count=9, notes=["All of them.", NASTY]),
        NASTY: task([score(NASTY, unit=NASTY)]),
    }
    file = write_results(
        root / "other", results(NASTY, other, config={**CONFIG, "model_type": NASTY})
    )
    output = root / "report.html"
    report.main([str(root / "tape"), str(root / "rope"), str(file), "--output", str(output)])
    return output.read_text(encoding="utf-8")


def test_the_page_loads_no_external_files_and_escapes_text(compared):
    root = lxml.html.fromstring(compared)
    policy = root.xpath("//meta[@http-equiv]/@content")
    assert policy[0].startswith("default-src 'none'; img-src data:;")
    assert re.search(r"https?://|@import|url\(", compared) is None
    for address in root.xpath("//@src"):
        kind, _, content = address.partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(content).endswith(
            b"IEND\xaeB`\x82"
        )
    assert all(address.startswith("#") for address in root.xpath("//@href"))
    assert len(root.xpath("//script")) == 1 and not root.xpath("//@*[starts-with(name(), 'on')]")
    ids = root.xpath("//@id")
    assert len(ids) == len(set(ids)) and {link[1:] for link in root.xpath("//a/@href")} == set(ids)
    shown = clean(NASTY)
    assert (
        shown.startswith('<script>alert("x")</script>&amp;')
        and "\N{REPLACEMENT CHARACTER}" in shown
    )
    text = root.text_content()
    assert text.count(shown) >= 5 and "\x07" not in text and "\u202e" not in text


def test_sections_have_scores_curves_pictures_and_notes(compared):
    parsed = Page(compared)
    assert list(parsed.sections)[1:] == ["Blunt", "Shiny", "Training"]
    rows = parsed.tables["Shiny"]
    assert rows[0] == ["metric", "length (tokens)", "tape", "rope", clean(NASTY)]
    assert [row[1] for row in rows[1:]] == ["256", "512", "1,024"]
    assert rows[1][2] == "0.900|0.100 \N{EN DASH} 0.950|8 prompts" and rows[3][3].startswith(
        "0.600|"
    )
    assert "perplexity \N{DOWNWARDS ARROW}" == parsed.tables["Blunt"][1][0]
    notes = parsed.sections["Shiny"]
    assert (
        notes.count("All of them.") == 1
        and "tape: Only tape." in notes
        and "rope: Only rope." in notes
    )
    how_far = parsed.tables["Training"]
    assert [row[0] for row in how_far] == ["run", "tape", "rope"]
    assert how_far[1][2:4] == ["300|of 300", "614,400"] and how_far[1][-2:] == [
        "1,155",
        "25.0 GFLOP/s",
    ]
    begins = ("Training loss by step", "Validation loss by step", "Learning rate by step")
    assert [
        text.startswith(start)
        for text, start in zip(parsed.pictures["Training"], begins, strict=True)
    ] == [True] * 3


def measured(value, *, vocab_size=None, digest=None, key_tokens=None):
    """Return results of loss tasks, with the record of the scored tokens if `digest` is given."""
    place = {"length": 512, "group": "books"}
    scores = [
        score("loss", value, unit="nats per token", **place),
        score("perplexity", 10 * value, **place),
    ]
    gains = [score("gain", value, "higher", unit="nats per token", **place)]
    if digest is None:
        details = {}
    else:
        details = {"scored": {"books": {"count": 512, "digest": digest}}}
    of_gains = details | ({} if key_tokens is None else {"key_tokens": key_tokens})
    tasks = {
        "perplexity": task(scores, details=details),
        "context_gain": task(gains, details=of_gains),
    }
    return {
        "tasks": tasks,
        "config": CONFIG if vocab_size is None else {**CONFIG, "vocab_size": vocab_size},
    }


@pytest.mark.parametrize(
    "first, second, warned",
    [
        ({"digest": "a"}, {"digest": "a", "vocab_size": 9}, False),
        ({}, {"vocab_size": 1500}, False),
        ({"vocab_size": 1500}, {"vocab_size": 49152}, True),
        ({"digest": "a"}, {"digest": "b"}, True),
    ],
)
def test_scores_per_token_over_different_tokens_have_a_warning(tmp_path, first, second, warned):
    parsed = evaluated(tmp_path, x=measured(1.5, **first), y=measured(2.5, **second))
    found = ["did not score the same tokens" in text for text in parsed.sections.values()]
    assert found == [warned, warned]


def test_scores_over_different_key_tokens_have_a_warning(tmp_path):
    first, second = (
        measured(1.5, digest="a", key_tokens={"books/0": tokens}) for tokens in ([1, 2], [1])
    )
    assert "own key tokens" in evaluated(tmp_path, x=first, y=second).sections["Context gain"]
    assert "own key tokens" not in evaluated(tmp_path, x=first, y=first).sections["Context gain"]


def test_settings_without_effect_on_scores_have_no_warning(tmp_path):
    def shiny(batch_size, data, digest, *, dtype="fp32", **others):
        given = {"samples": 1, "batch_size": batch_size, "data": data, **others}
        return {
            "tasks": {
                "shiny": task([score()], settings=given, data={data: digest * 64}, dtype=dtype)
            }
        }

    page = evaluated(tmp_path, x=shiny(1, "a/x", "0"), y=shiny(2, "b/y", "0", newer=1))
    assert "comparable" not in page.sections["Shiny"]
    page = evaluated(tmp_path, x=shiny(1, "a/x", "0"), y=shiny(1, "a/x", "1", dtype="bf16"))
    assert "may not be comparable: data, dtype." in page.sections["Shiny"]


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
    first = task([score(value=10.0, low=9.0, high=10.5)], data={"text.jsonl": "0" * 64})
    other = task([score(value=12.0, **second)], data={"text.jsonl": digest * 64})
    page = evaluated(tmp_path, x={"tasks": {"shiny": first}}, y={"tasks": {"shiny": other}})
    assert [cell.get("data-column") for cell in page.root.xpath("//td[b]")] == bold
    assert page.root.findtext(".//h1") == page.root.findtext(".//title") == "Evaluation of x and y"
    leads = "x leads in 1" in page.root.xpath("string(//body/p[2])")
    assert leads == bool(bold)


def test_rows_with_only_zeros_are_collapsed_into_one_line(tmp_path):
    scores = [score("exact match", 0.0, "higher", group=group) for group in "abc"]
    scores += [score("recall", 0.0, "higher"), score("accuracy", 0.5, "higher", group="a")]
    page = evaluated(tmp_path, **dict.fromkeys("xy", {"tasks": {"shiny": task(scores)}}))
    (folded,) = page.root.iter("details")
    arrow = "\N{UPWARDS ARROW}"
    assert (
        folded.findtext("summary")
        == f"Every model has 0 in exact match {arrow} (a, b and c) and recall {arrow}."
    )
    assert [row[0].text.split()[0] for row in page.root.xpath("//section/div/table/tbody/tr")] == [
        "accuracy"
    ]


def test_lengths_of_a_metric_follow_each_other(tmp_path):
    scores = [
        score(metric, length=length) for length in (64, 128) for metric in ("loss", "perplexity")
    ]
    rows = evaluated(tmp_path, x={"tasks": {"shiny": task(scores)}}).tables["Shiny"][1:]
    assert [(row[0].split()[0], row[1]) for row in rows] == [
        ("loss", "64"),
        ("loss", "128"),
        ("perplexity", "64"),
        ("perplexity", "128"),
    ]


def test_the_first_sentences_name_the_best_model_or_say_that_none_leads(tmp_path):
    def losses(*values, spread):
        lengths = zip((64, 128), values)
        of = [
            score("loss", x, length=n, low=x - spread, high=x + spread, unit="nats per token")
            for n, x in lengths
        ]
        return {"tasks": {"perplexity": task(of)}}

    apart = evaluated(tmp_path, x=losses(3.0, 2.0, spread=0.1), y=losses(3.5, 2.5, spread=0.1))
    found = (
        "Perplexity: x has the lowest loss: 3.000 at 64 tokens and 2.000 at 128 tokens; y has 3.500"
        " at 64 tokens and"
    )
    paragraphs = apart.root.xpath("//p[@class='outcome']")
    assert paragraphs[0].text.startswith(found) and "x leads in 2" in paragraphs[1].text
    near = evaluated(tmp_path, x=losses(3.0, 2.0, spread=1), y=losses(3.5, 2.5, spread=1))
    paragraphs = near.root.xpath("//p[@class='outcome']")
    assert paragraphs[0].text.startswith("No model leads clearly: in none of 2 scores")
    assert paragraphs[1].text.startswith(found)


def test_scores_without_intervals_are_not_said_to_have_some(tmp_path):
    models = {
        label: {"tasks": {"shiny": task([score(value=value)])}}
        for label, value in (("x", 1.0), ("y", 2.0))
    }
    paragraphs = [
        one.text_content()
        for one in evaluated(tmp_path, **models).root.xpath("//p[@class='outcome']")
    ]
    assert (
        paragraphs[0].replace("\xa0", " ")
        == "No model leads clearly: no score has a 95 % interval to judge a difference by."
    )
    assert "Intervals reflect" not in " ".join(paragraphs)


def test_scores_that_count_other_things_share_a_row(tmp_path):
    tasks = [{"shiny": task([score(count=2, counted=noun)])} for noun in ("document", "window")]
    page = evaluated(tmp_path, x={"tasks": tasks[0]}, y={"tasks": tasks[1]})
    assert len(page.tables["Shiny"]) == 2 and page.tables["Shiny"][1][1:] == [
        "10|2 documents",
        "10|2 windows",
    ]


def test_a_page_has_no_empty_list(tmp_path, compared):
    run = write_run(tmp_path / "run", steps=20)
    for shown in (
        Page(compared),
        page_of(tmp_path, run),
        evaluated(tmp_path, x={}),
        Page(page({}, {})),
    ):
        assert not [element for element in shown.root.iter("ul", "nav") if not len(element)]


def test_groups_of_a_synthetic_task_are_named_by_their_sizes_in_tables_and_pictures(tmp_path):
    blanks = {"IID": 16, "dense": 8}
    scores = [score("accuracy", 0.5, "higher", group=group) for group in blanks]
    given = {"tasks": {"selective_copy": task(scores, settings={"blanks": blanks, "samples": 5})}}
    page = evaluated(tmp_path, x=given)
    assert [row[1] for row in page.tables["Selective copy"][1:]] == [
        "8 blanks",
        "16 blanks (as trained)",
    ]
    assert (
        "0.5 8 blanks accuracy, 0.5 16 blanks (as trained) accuracy"
        in page.pictures["Selective copy"][0]
    )


def test_losses_at_different_lengths_come_with_a_warning(tmp_path):
    short, long = (
        write_run(tmp_path / str(n), config=settings(model__seq_length=n)) for n in (256, 1024)
    )
    warning = (
        "Losses of these runs may not be comparable: model.seq_length is 256 in 256 and 1024 in"
        " 1024."
    )
    assert warning in page_of(tmp_path, short, long).sections["Training"]
    assert "comparable" not in page_of(tmp_path, short).sections["Training"]


def test_equal_labels_are_distinguished_by_path(tmp_path):
    a = write_run(tmp_path / "a" / "tape")
    b = write_run(tmp_path / "b" / "tape")
    for step in (100, 300):
        write_results(a / "evaluation" / f"step-{step:08}", results("tape", digest=str(step)))
    runs, models = read([a, b, a])
    assert list(runs) == ["tape", f"tape ({b})"]
    assert list(models) == ["tape", f"tape ({a / 'evaluation' / 'step-00000300'})"]


def test_a_run_without_settings_or_a_curve_is_shown(tmp_path):
    run = write_run(tmp_path / "tape", steps=10)
    (run / "config.yaml").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 60, "train/loss"')  # it is being written
    page = page_of(tmp_path, run)
    assert (
        page.tables["Training"][1][1:3] == ["10|of unknown", "20,480"]
        and page.pictures["Training"] == []
    )


def test_evaluations_during_training_are_drawn_with_a_panel_for_each_length(tmp_path):
    rows = [
        {
            "step": step,
            "train/loss": 3.0,
            "evaluation/perplexity/loss/books/512": 5.0 - step,
            "evaluation/x/accuracy": 0.5,
        }
        | {"evaluation/perplexity/loss/books/1024": 4.0 - step}
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = tmp_path.name
    assert page_of(tmp_path, tmp_path).pictures["Training"][1:] == [
        (
            f"Perplexity, loss, books by step; at the end, {name} 2 at 1,024 tokens and {name} 3 at"
            " 512 tokens."
        ),
        f"X, accuracy by step; at the end, {name} 0.5.",
    ]


def test_long_curves_are_thinned_evenly(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", interval=1)
    whole = read_run(run).curve("train/loss")
    monkeypatch.setattr(curves, "MOST_POINTS", 16)
    some = read_run(run).curve("train/loss")
    assert some.last == whole.last and len(whole.values) == 300
    assert list(some.steps) == list(range(1, 301, 32)) and list(some.values) == list(
        whole.values[::32]
    )


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"{", "results.json cannot be used: it is not JSON"),
        (json.dumps({**results(), "format": 2}).encode(), "results.json cannot be used: format: "),
        (json.dumps({**results(), "tasks": {"x": {"settings": {}}}}).encode(), "tasks.x.data: "),
        (
            json.dumps(results(tasks={"x": task([score(value="one")])})).encode(),
            "tasks.x.scores.0.value: ",
        ),
        (json.dumps(results()).replace("10.0", "NaN").encode(), "NaN is not a finite number"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence_that_names_the_file(
    tmp_path, capsys, content, sentence
):
    file = tmp_path / "results.json"
    file.write_bytes(content)
    assert (
        status_of(lambda: report.main([str(tmp_path), "--output", str(tmp_path / "report.html")]))
        == 2
    )
    error = capsys.readouterr().err
    assert sentence in error and str(file) in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_paths_without_a_run_or_results_are_rejected(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=20)
    (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    (tmp_path / "empty").mkdir()
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "empty"], "contains neither metrics.jsonl nor results.json"),
        ([run], "metrics.jsonl cannot be used: line 2"),
        ([run, "--output", run / "metrics.jsonl"], "give a name that ends in .html"),
    ):
        assert status_of(partial(report.main, [*map(str, arguments)])) == 2
        assert sentence in capsys.readouterr().err


class _Drawn(Task):
    name = "shiny"
    Settings = SelectiveCopySettings

    @classmethod
    def draw(cls, results):
        figure, (left, right) = figures.new_figure(1, 2)
        look = figures.styles(results)
        for label in results:
            figures.curve(left, look[label], LENGTHS, [1, 2, None], [0.5, 2.5, None], [2, 3, None])
        figures.length_axis(left, LENGTHS)
        figures.heat_map(
            right, [[0.0, 1.0], [None, 0.25]], ["0 %", "100 %"], LENGTHS[:2], bar="share found"
        )
        figures.legend(figure)
        colors = [look[label]["color"] for label in results]
        return [Picture("drawn", f"Found by {', '.join(results)} in {', '.join(colors)}.", figure)]


def test_a_model_has_the_same_color_in_every_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(page_module.TASKS, "shiny", _Drawn)
    first = {**CONFIG, "model_type": "rope"}
    second = {**CONFIG, "model_type": "encoded", "position_encoding": "rope"}
    blunt = {"blunt": task([score()])}
    shiny = {"shiny": ours(0.5)}
    parsed = evaluated(
        tmp_path, first={"tasks": blunt, "config": first}, second={"tasks": shiny, "config": second}
    )
    assert parsed.pictures["Shiny"] == [
        f"Found by second in {figures.shade(figures.ENCODING_COLORS['rope'], 1)}."
    ]


def test_a_picture_that_cannot_be_drawn_is_a_sentence_in_its_place(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"train/loss": 1e308} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed = page_of(tmp_path, run)
    assert any(text.startswith("Learning rate") for text in parsed.pictures["Training"])
    sentence = "The picture of training loss could not be drawn ("
    assert (
        sentence in parsed.sections["Training"]
        and f"warning: {sentence}" in capsys.readouterr().err
    )


def test_styles_differ_and_accept_any_label():
    rates = [
        f"tape+increments=learned+optimizer.lr_scale_of={{position: {rate}, position.increments:"
        " 1.0}"
        for rate in "13"
    ]
    labels = ["_hidden", "$a", *rates, *map(str, range(20))]
    look = figures.styles(labels)
    assert len({(style["color"], style["marker"]) for style in look.values()}) == len(labels)
    shown = [style["label"] for style in look.values()]
    assert max(map(len, shown)) <= figures.LONGEST_LABEL and shown[:2] == [" _hidden", "$a"]
    assert len(set(shown)) == len(labels)
    with figures.model_encodings(dict.fromkeys(labels)):
        assert figures.styles([labels[3]]) == {labels[3]: look[labels[3]]}


def test_every_encoding_has_its_own_color_and_its_variants_differ_by_shade_or_line():
    assert figures.ENCODING_COLORS.keys() <= ENCODINGS.keys()
    assert len(set(figures.ENCODING_COLORS.values())) == len(figures.ENCODING_COLORS)
    variants = ["tape", "rope", *(f"tape+increments={number}" for number in range(8))]
    look = figures.variant_styles(variants)
    assert [look[name]["color"] for name in ("rope", "tape")] == [
        figures.ENCODING_COLORS[x] for x in ("rope", "tape")
    ]
    assert len({(style["color"], style["linestyle"]) for style in look.values()}) == len(variants)
    # Whatever else is in the picture, and in whatever order.
    assert figures.variant_styles(reversed(variants[:2]))["tape"]["color"] == look["tape"]["color"]
    unknown = figures.styles(["gpt2", "mine"])
    assert not {style["color"] for style in unknown.values()} & {
        look["rope"]["color"],
        look["tape"]["color"],
    }


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
    ],
)
def test_numbers_of_one_table_have_the_same_decimals(values, shown):
    assert [shown_number(value, decimals_for(values)) for value in values] == shown


def test_curves_of_evaluations_name_groups_as_tables_do(tmp_path):
    run = write_run(
        tmp_path / "run",
        config=settings(evaluation__selective_copy={"blanks": {"IID": 16, "dense": 8}}),
    )
    rows = [{"step": step, "evaluation/selective_copy/accuracy/dense": 0.5} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = page_of(tmp_path, run).pictures["Training"]
    assert shown == ["Selective copy, accuracy, 8 blanks by step; at the end, run 0.5."]
