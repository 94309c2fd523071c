import base64
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from report_cases import CONFIG, results, score, settings, task, write_results, write_run

from megatron_tape.command_line import status_of
from megatron_tape.errors import FileError
from megatron_tape.evaluation import figures
from megatron_tape.evaluation.base import Picture, Task
from megatron_tape.evaluation.report import models as models_module
from megatron_tape.evaluation.report import page as page_module
from megatron_tape.evaluation.report import scores as scores_module
from megatron_tape.evaluation.report import time_spent, training_curves
from megatron_tape.evaluation.report.models import Model, clean, read_models
from megatron_tape.evaluation.report.page import embedded, page
from megatron_tape.evaluation.report.tables import decimals_for, shown_number
from megatron_tape.evaluation.report.training_curves import evaluation_seconds
from megatron_tape.evaluation.results import TaskResult
from pretrain import report

NASTY = '<script>alert("x")</script>&amp;"\' onload=$x$ \u202e\x07\ud800'


class Page:
    """A page, which must be well-formed: its elements, the texts of sections, and tables as lists of rows of texts."""

    def __init__(self, content):
        content = re.sub(r"(?is)<!doctype.*?>|(?<=<script>).*?(?=</script>)|(?<=<style>).*?(?=</style>)", "", content)
        content = re.sub("<((?:meta|img) [^>]*)>", r"<\1/>", content).replace("&nbsp;", "\N{NO-BREAK SPACE}")
        root = ElementTree.fromstring(content)
        self.elements = [(element.tag, element.attrib) for element in root.iter()]
        self.texts = list(root.itertext())
        self.pictures = [picture.get("alt") for picture in root.iter("img")]
        self.marked = [element.text for element in root.iter("strong")]
        self.sections, self.tables = {}, {}
        for section in root.iter("section"):
            name = section.get("aria-labelledby")
            self.sections[name] = "".join(section.itertext())
            captions = {paragraph.get("id"): paragraph.text for paragraph in section.iter("p")}
            for table in section.iter("table"):
                rows = [[self.text_of(cell) for cell in row] for row in table.iter("tr")]
                self.tables[name, captions[table.get("aria-labelledby")]] = rows

    @staticmethod
    def text_of(cell):
        """The text of a cell, and behind a bar what is smaller."""
        return "".join("|" * (part.tag == "small") + (part.text or "").strip() for part in cell.iter())

    def table(self, caption, section=None):
        """Return the rows of the only table whose caption contains a text."""
        found = [
            rows
            for (where, what), rows in self.tables.items()
            if caption.lower() in what.lower() and section in (None, where)
        ]
        assert len(found) == 1, (caption, list(self.tables))
        return found[0]


def page_of(tmp_path, *paths):
    output = tmp_path / "report.html"
    report.main([*map(str, paths), "--output", str(output)])
    return Page(output.read_text(encoding="utf-8"))


def evaluated(tmp_path, **models):
    """Return the page of models by their labels, of which each has the `results` given here."""
    files = [write_results(tmp_path / label, results(label, **given)) for label, given in models.items()]
    return Page(page(read_models(files)))


LENGTHS = (256, 512, 1024)


def ours(value, *, count=8, notes=(), **others):
    known = {"low": 0.1, "high": 0.95, "counted": "prompt"}
    scores = [
        score("accuracy", value - index / 10, "higher", length=length, count=count + index, **known)
        for index, length in enumerate(LENGTHS)
    ]
    return task(scores, settings={"samples": count}, notes=notes, **others)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page of two runs with an evaluation each, and a third model that has only results, with a nasty label."""
    root = tmp_path_factory.mktemp("compared")
    for name, value in (("tape", 0.9), ("rope", 0.8)):
        given = settings(model__position_encoding=name)
        run = write_run(root / name, config=given, offset=1 - value)
        tasks = {"shiny": ours(value, notes=["All of them.", f"Only {name}."]), "blunt": task([score(value=value)])}
        made = results(name, tasks, run={"settings": given, "step": 300}, config={**CONFIG, "model_type": name})
        write_results(run / "evaluation" / "step-00000300", made)
    other = {"shiny": ours(0.7, count=9, notes=["All of them.", NASTY])}
    file = write_results(root / "other", results(NASTY, other, config={**CONFIG, "model_type": NASTY}))
    output = root / "report.html"
    report.main([str(root / "tape"), str(root / "rope"), str(file), "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def parsed(compared):
    return Page(compared.read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_its_ids_are_unique(parsed):
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = [a["href"] for _, a in parsed.elements if a.get("href", "").startswith("#")]
    references += ["#" + a["aria-labelledby"] for _, a in parsed.elements if "aria-labelledby" in a]
    assert len(references) > 20 and {reference[1:] for reference in references} <= set(ids)


def test_the_page_refers_to_nothing_outside(compared, parsed):
    for name, attributes in parsed.elements:
        assert name not in ("link", "iframe", "object", "embed", "base", "form"), name
        for key in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert attributes.get(key, "#").startswith(("#", "data:image/svg+xml;base64,")), (name, attributes)
    content = compared.read_text(encoding="utf-8")
    assert "@import" not in content and re.search(r"https?://", content) is None
    assert set(re.findall(r"url\((.)", content)) <= {"#"}


def test_the_page_may_load_nothing_and_a_nasty_label_is_shown_as_text(parsed):
    (policy,) = (a["content"] for name, a in parsed.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert not [a for _, a in parsed.elements for key in a if key.startswith("on")]
    shown = clean(NASTY)
    assert shown.startswith('<script>alert("x")</script>&amp;') and "\x07" not in shown
    assert [name for name, _ in parsed.elements].count("script") == 1
    assert any(shown in text for text in parsed.texts)
    assert "\N{REPLACEMENT CHARACTER}" in shown and "\u202e" not in "".join(parsed.texts)
    assert shown in parsed.table("Models, by their config.json")[0]


def test_pictures_have_alternative_text(parsed):
    assert len(parsed.pictures) >= 6 and all(len(text) > 20 for text in parsed.pictures)
    assert any("tape: 0.9 at 256 tokens" in text for text in parsed.pictures)


def test_sections_come_in_order_and_are_in_the_table_of_contents(parsed):
    order = [attributes["id"] for name, attributes in parsed.elements if name == "h2"]
    assert order == ["scores", "training", "tasks", "settings", "speeds"]
    links = [a["href"] for name, a in parsed.elements if name == "a"]
    assert [link for link in links if "-" not in link] == [f"#{name}" for name in order]


def test_scores_are_shown_by_length_and_model_with_interval_and_count(parsed):
    rows = parsed.table("accuracy", "scores")
    assert rows[0] == ["length (tokens)", "tape", "rope", clean(NASTY)]
    assert [row[0] for row in rows[1:]] == ["256", "512", "1,024"]
    assert rows[1][1] == "0.900|0.100 \N{EN DASH} 0.950 \N{MIDDLE DOT} 8\N{NO-BREAK SPACE}prompts"
    assert rows[3][2].startswith("0.600|") and rows[3][3].endswith("11\N{NO-BREAK SPACE}prompts")
    best = parsed.table("perplexity", "scores")
    assert best[1][1:] == ["0.900", "0.800"] and "lower is better" in parsed.sections["scores"]


def test_thousands_of_metrics_and_groups_are_sorted_into_their_tables_once(tmp_path, monkeypatch):
    asked, kind_of = [], scores_module.kind_of
    monkeypatch.setattr(scores_module, "kind_of", lambda score: asked.append(score) or kind_of(score))
    measured = [score(f"metric {number}", 0.5, group=f"group {number}") for number in range(40)]
    models = read_models([write_results(tmp_path, results("x", {"shiny": task(measured)}))])
    tables = scores_module.score_tables(models, "shiny", lambda score: True)
    assert [table.rows[0][0].text for table in tables] == [f"group {number}" for number in range(40)]
    assert len(asked) == 40


@pytest.mark.parametrize("character", "\u061c\u200e\u200f\u2028\u2029\u202e\x07\ud800\uffff")
def test_characters_that_a_terminal_may_not_have_are_not_in_pages_or_pictures(character):
    assert clean(f"a{character}b") == figures.plain(f"a{character}b") == "a\N{REPLACEMENT CHARACTER}b"


def test_a_single_group_is_named_once_and_what_judges_nothing_has_no_best_value(tmp_path):
    def shiny(value):
        loss = [score("loss", value, length=length, group="books", unit="nats") for length in LENGTHS]
        distances = [score("distance", value, "neither", group=f"layer {layer}") for layer in (0, 1)]
        return {"tasks": {"shiny": task(loss + distances)}}

    parsed = evaluated(tmp_path, x=shiny(1.5), y=shiny(2.5))
    assert parsed.table("Loss (nats), books".lower(), "scores")[0] == ["length (tokens)", "x", "y"]
    assert [row[0] for row in parsed.table("distance", "scores")] == ["group", "layer 0", "layer 1"]
    assert parsed.marked == ["1.500"] * 3
    assert not any("distance" in caption and "better" in caption for _, caption in parsed.tables)


KEYS = {"books/0": [1, 2]}
INTERVAL = {"low": 1.0, "high": 3.0}


@pytest.mark.parametrize(
    "name, first, second, marked, warning",
    [
        ("shiny", task([score(value=1.5)]), task([score(value=2.5)]), ["1.500"], None),
        # Other settings are warned of, and there is no best value.
        ("shiny", task([score(value=1.5)], settings={"samples": 1}), task([score(value=2.5)], settings={"samples": 2}),
         [], "different settings (samples)"),
        # What is measured on samples is judged only if every value has an interval.
        ("shiny", task([score(value=1.5, count=9, **INTERVAL)]), task([score(value=2.5, count=9, **INTERVAL)]),
         ["1.500"], None),
        ("shiny", task([score(value=1.5, count=1)]), task([score(value=2.5, count=9, **INTERVAL)]), [], None),
        # The model that chose the key tokens is compared with those that use them, and not with others.
        ("context_gain",
         task([score("key_gain", 1.5, "higher")], settings={"key_tokens_from": None}, details={"key_tokens": KEYS}),
         task([score("key_gain", 2.5, "higher")], settings={"key_tokens_from": "x"}, details={"key_tokens": KEYS}),
         ["2.500"], None),
        ("context_gain",
         task([score("key_gain", 1.5, "higher"), score("gain", 1, "higher")], details={"key_tokens": KEYS}),
         task([score("key_gain", 2.5, "higher"), score("gain", 2, "higher")], details={"key_tokens": {"books/0": [1]}}),
         ["2"], "different key tokens: figures of key tokens cannot be compared"),
    ],
)  # fmt: skip
def test_the_best_value_is_marked_where_values_can_be_compared(tmp_path, name, first, second, marked, warning):
    parsed = evaluated(tmp_path, x={"tasks": {name: first}}, y={"tasks": {name: second}})
    assert parsed.marked == marked
    assert warning in parsed.sections["scores"] if warning else "compar" not in parsed.sections["scores"][200:]


def test_values_say_what_they_are_measured_on(tmp_path):
    def shiny(tokens):
        scores = [score(count=32, counted="document"), score("gain", count=tokens, counted="token")]
        return {"tasks": {"shiny": task(scores)}}

    parsed = evaluated(tmp_path, x=shiny(4096), y=shiny(1))
    assert parsed.table("each value is measured on 32\N{NO-BREAK SPACE}documents")[1][1] == "10"
    cells = parsed.table("gain; lower is better; below each value what it is measured on")[1][1:]
    assert cells == ["10|4,096\N{NO-BREAK SPACE}tokens", "10|1\N{NO-BREAK SPACE}token"]


def measured(value, *, vocab_size=None, digest=None):
    """Return the results of tasks that measure losses, with what is recorded of the scored tokens if `digest`."""
    place = {"length": 512, "group": "books"}
    scores = [score("loss", value, unit="nats per token", **place), score("perplexity", 10 * value, **place)]
    scores += [score("bits_per_byte", value / 2, unit="bits per byte", **place)]
    gains = [score("gain", value, "higher", unit="nats per token", **place)]
    gains += [score("key_perplexity", 10 * value, **place)]
    details = {} if digest is None else {"scored": {"books": {"count": 512, "digest": digest}}}
    tasks = {"perplexity": task(scores, details=details), "context_gain": task(gains, details=details)}
    return {"tasks": tasks, "config": CONFIG if vocab_size is None else {**CONFIG, "vocab_size": vocab_size}}


@pytest.mark.parametrize(
    "first, second, sentence",
    [
        ({"digest": "a"}, {"digest": "a", "vocab_size": 9}, None),
        ({"vocab_size": 1500}, {"vocab_size": 1500}, None),
        ({}, {"vocab_size": 1500}, None),
        ({"vocab_size": 1500, "digest": "a"}, {"vocab_size": 1500}, None),
        ({"vocab_size": 1500}, {"vocab_size": 49152}, "(vocabularies: 1,500 tokens of x and 49,152 tokens of y)"),
        ({"vocab_size": 1500, "digest": "a"}, {"vocab_size": 49152}, "their tokenizers differ (vocabularies"),
        ({"digest": "a"}, {"digest": "b"}, "their tokenizers, longest contexts or data differ"),
    ],
)
def test_figures_per_token_of_different_tokens_are_warned_of_and_have_no_best_value(tmp_path, first, second, sentence):
    parsed = evaluated(tmp_path, x=measured(1.5, **first), y=measured(2.5, **second))
    if sentence is None:
        assert len(parsed.marked) == 5 and "same tokens" not in parsed.sections["scores"]
        return
    assert parsed.marked == ["0.750"] and parsed.sections["scores"].count(sentence) == 2
    assert parsed.sections["scores"].count("cannot be compared between them. Bits per byte, which the task") == 2
    assert sentence in parsed.sections["tasks"]  # beside the pictures, too


def test_names_are_written_as_their_owners_write_them(tmp_path):
    tasks = {name: task([score("acc_norm", 0.5, "higher")]) for name in ("lm_eval", "ruler", "scrolls", "positions")}
    parsed = evaluated(tmp_path, x={"tasks": tasks})
    headings = [text for text in parsed.texts if text in ("RULER", "lm-evaluation-harness", "SCROLLS", "Positions")]
    assert headings[:4] == ["RULER", "lm-evaluation-harness", "SCROLLS", "Positions"]
    captions = [caption for where, caption in parsed.tables if where == "scores"]
    assert [caption.partition(";")[0] for caption in captions] == ["Acc norm", "acc_norm"]


def test_what_was_logged_once_is_no_curve(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "tape", steps=10))
    assert page.table("How far each run is")[1][1] == "10|of 300"
    assert page.pictures == []


def test_notes_name_the_models_that_they_are_about(parsed):
    tasks = parsed.sections["tasks"]
    assert "All of them." in tasks and tasks.count("All of them.") == 1
    assert re.search(r"tape:\s+Only tape\.", tasks) and re.search(r"rope:\s+Only rope\.", tasks)
    assert "does not know the task shiny" in tasks


def test_the_time_of_an_evaluation_that_was_interrupted_says_what_it_is_without():
    done = TaskResult(**task([]))
    models = [Model("m", {"perplexity": dataclasses.replace(done, parts_before=count)}) for count in (0, 2)]
    before, after = (evaluation_seconds([model]).rows[0][1].detail for model in models)
    assert after == f"{before} \N{MIDDLE DOT} without 2 parts done before an interruption"


def test_runs_are_shown_with_losses_and_speeds(parsed):
    how_far = parsed.table("How far each run is")
    assert [row[0] for row in how_far] == ["run", "tape", "rope"]
    assert how_far[1][1:3] == ["300", "614,400"]
    rows = parsed.table("Training: medians")
    assert rows[1] == ["tape", "1,155", "0.0250", "30"]
    seconds = parsed.table("Evaluation: time taken")
    assert seconds[1][1] == "12.5 s|1 process \N{MIDDLE DOT} fp32" and seconds[1][3] == "\N{EN DASH}"
    assert "a CPU of 2 cores" in parsed.sections["speeds"]
    by = parsed.pictures
    for beginning in ("Training loss (nats per token) by step", "Training loss (nats per token) by tokens"):
        assert sum(text.startswith(beginning) for text in by) == 1
    assert sum(text.startswith("Validation loss") for text in by) == 2
    assert sum(text.startswith("Learning rate by step; tape and rope up to 0.00203") for text in by) == 1


def test_only_settings_that_differ_are_listed(parsed):
    rows = parsed.table("Training runs")
    assert rows == [["setting", "tape", "rope"], ["model.position_encoding", "tape", "rope"]]
    rows = parsed.table("Evaluations")
    assert [row[0] for row in rows] == ["setting", "shiny.samples"] and rows[1][1:] == ["8", "8", "9"]


def test_what_changes_no_score_is_not_warned_of(tmp_path):
    def shiny(batch_size, data, digest, *, dtype="fp32", **others):
        given = {"samples": 1, "batch_size": batch_size, "data": data, **others}
        return {"tasks": {"shiny": task([score()], settings=given, data={data: digest * 64}, dtype=dtype)}}

    page = evaluated(tmp_path, x=shiny(1, "a/x", "0"), y=shiny(2, "b/y", "0", newer=1))
    assert "comparable" not in page.sections["scores"]
    assert page.table("Evaluations")[1:] == [["shiny.batch_size", "1", "2"]]
    page = evaluated(tmp_path, x=shiny(1, "a/x", "0"), y=shiny(1, "a/x", "1", dtype="bf16"))
    assert "evaluated with different data and different precision: the scores" in page.sections["scores"]


def test_results_of_another_model_that_a_task_reads_are_not_its_data(tmp_path):
    def shiny(data, **others):
        return {"tasks": {"shiny": task([score()], settings={"data": "x", **others}, data=data)}}

    chosen = {"x": "0" * 64, "a/results.json": "1" * 64}
    for setting in ({"key_tokens_from": "a"}, {"before": "a/results.json"}):
        page = evaluated(tmp_path, x=shiny({"x": "0" * 64}), y=shiny(chosen, **setting))
        assert "comparable" not in page.sections["scores"]
    page = evaluated(tmp_path, x=shiny({"x": "0" * 64}), y=shiny(chosen))
    assert "different data" in page.sections["scores"]


def test_a_setting_that_one_run_does_not_have_is_not_compared(tmp_path):
    old, new = settings(), settings(train__deterministic=False, optimizer__lr=0.001)
    page = page_of(tmp_path, write_run(tmp_path / "old", config=old), write_run(tmp_path / "new", config=new))
    assert page.table("Training runs")[1:] == [["optimizer.lr", "0.002", "0.001"]]


def test_a_setting_within_one_that_is_null_in_another_run_differs(tmp_path):
    plain, average = settings(train__average=None), settings(train__average={"kind": "ema", "decay": 0.9})
    page = page_of(tmp_path, write_run(tmp_path / "plain", config=plain), write_run(tmp_path / "ema", config=average))
    assert page.table("Training runs")[1:] == [
        ["train.average.kind", "null", "ema"],
        ["train.average.decay", "null", "0.9"],
    ]


def test_equal_labels_of_equal_weights_are_one_model_and_others_are_told_apart(tmp_path):
    made = {
        "a": results("x", {"shiny": task([score(value=1.5)])}, digest="1"),
        "b": results("x", {"other": task([score(value=2.5)])}, digest="1"),
        "c": results("x", {"shiny": task([score(value=3.5)])}, digest="1", created=2.0),
        "d": results("x", {"shiny": task([score(value=4.5)], settings={"lengths": [64]})}, digest="1"),
        "e": results("x", digest="2"),
    }
    models = read_models([*(write_results(tmp_path / name, one) for name, one in made.items()), tmp_path / "e"])
    assert [model.label for model in models] == ["x (a)", "x (d)", "x (e)"]
    assert models[0].tasks["shiny"].scores[0].value == 3.5 and "other" in models[0].tasks


def test_checkpoints_of_one_run_are_told_apart_by_their_step_and_the_run_belongs_to_the_newest(tmp_path):
    run = write_run(tmp_path / "tape")
    for step in (100, 300):
        made = results("tape", digest=str(step), run={"settings": settings(), "step": step})
        write_results(run / "evaluation" / f"step-{step:08}", made)
    models = read_models([run])
    assert [model.label for model in models] == ["tape (step 100)", "tape (step 300)"]
    assert [model.run is not None for model in models] == [False, True]


def test_results_outside_a_run_belong_to_it_if_their_weights_lie_in_it(tmp_path):
    run = write_run(tmp_path / "tape")
    inside, outside = results("mine"), results("another", digest="2")
    inside["model"]["path"] = str(run / "checkpoints" / "step-00000300")
    models = read_models([run, write_results(tmp_path / "1", inside), write_results(tmp_path / "2", outside)])
    assert [(model.label, model.run is not None) for model in models] == [("mine", True), ("another", False)]


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path):
    models = read_models([write_run(tmp_path / "a" / "tape"), write_run(tmp_path / "b" / "tape")])
    assert [model.label for model in models] == ["tape (a/tape)", "tape (b/tape)"]


def test_a_run_without_results_and_a_run_without_settings_are_shown(tmp_path):
    run = write_run(tmp_path / "tape", steps=50)
    (run / "config.yaml").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 60, "loss"')  # it is being written
    page = page_of(tmp_path, run)
    assert list(page.sections) == ["training", "speeds"]
    assert page.table("How far each run is")[1][1:3] == ["50", "102,400"]


def test_evaluations_during_training_are_drawn_with_a_panel_for_each_length(tmp_path):
    rows = [
        {"step": step, "loss": 3.0, "evaluation/perplexity/loss/books/512": 5.0 - step, "evaluation/x/accuracy": 0.5}
        | {"evaluation/perplexity/loss/books/1024": 4.0 - step}
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = tmp_path.name
    assert page_of(tmp_path, tmp_path).pictures[1:] == [
        f"During training, perplexity, loss, books by step; at the end, {name} 3 at 512 tokens and {name} 2 at 1,024 "
        "tokens.",
        f"During training, x, accuracy by step; at the end, {name} 0.5.",
    ]


def test_metrics_beyond_what_is_read_and_drawn_are_said_to_be_missing(tmp_path, monkeypatch):
    (run := tmp_path / "run").mkdir()
    row = {"loss": 3.0} | {f"evaluation/{name}/accuracy": 0.5 for name in "abc"}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in (1, 2)))
    for module in (models_module, training_curves):
        monkeypatch.setattr(module, "MOST_CURVES", 3)
    monkeypatch.setattr(training_curves, "_MOST_DURING", 1)
    monkeypatch.setattr(scores_module, "_MOST_DRAWN", 1)
    shiny = task([score(metric, 0.5, "higher", length=length) for metric in "xyz" for length in LENGTHS])
    parsed = page_of(tmp_path, run, write_results(tmp_path / "other", results(tasks={"shiny": shiny})))
    read = "Of run, only the first 3 metrics are read."
    drawn = "Pictures show the first 1 of 2 metrics of evaluations."
    assert f"{read} {drawn}" in parsed.sections["training"] and len(parsed.pictures) == 3
    assert "Pictures show the first 1 of 3 metrics." in parsed.sections["tasks"]


def test_the_time_of_runs_is_shown_by_phase_by_attempt_and_as_shares(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"seconds/forward": 2.0, "seconds/backward": 4.0} | ({"seconds/save": 3.0} if row["step"] > 150 else {})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    beat = {"stage": "training", "hang_timeout": None, "stages": {"training": 60.0}}
    for number, started in ((1, 1000), (2, 1200)):
        directory = run / "attempts" / f"{number:06d}"
        directory.mkdir(parents=True)
        times = {"time": started + 80, "since": started + 80, "began": started + 20}
        steps = {"from_step": 100 * (number - 1), "step": 150 * number}
        (directory / "attempt.json").write_text(json.dumps({"started": started}))
        (directory / "heartbeat.json").write_text(json.dumps(beat | times | steps))
        spike = {"step": 77 * number, "loss": 9.25, "grad_norm": 31.5, "action": "skip", "number": number}
        (directory / "spikes.jsonl").write_text(json.dumps(spike) + "\n")
    content = page(read_models([run, write_run(tmp_path / "plain")]))
    assert "forward 2, backward 4 and save 1.5" in content
    assert "Attempts of run on a time line: 1 from 0:00:00 to 0:01:20 and 2 from 0:03:20 to 0:04:40." in content
    table = content[content.index("What the time since the first attempt became") :]
    shares = re.findall(r"\d+\.\d(?=<| *<|$)", table[: table.index("</table>")])
    assert shares == ["35.7", "7.1", "14.3", "42.9"]  # of 280 s: kept, repeated, start, between attempts
    table = content[content.index("Spikes (train.spikes)") :]
    found = re.findall(r">([\d.]+|skip)<", table[: table.index("</table>")])
    assert found == ["1", "77", "9.2500", "31.5000", "skip", "2", "154", "9.2500", "31.5000", "skip"]

    for name in ("MOST_ATTEMPTS", "MOST_SPIKES"):
        monkeypatch.setattr(time_spent, name, 1)
    content = page(read_models([run]))
    assert "Attempts of run on a time line, the last 1 of 2 attempts: 2 from 0:03:20 to 0:04:40." in content
    assert "Spikes (train.spikes), the last 1 of each run" in content
    monkeypatch.setattr(page_module, "MOST_MODELS", 0)
    assert "Time lines show the first 0 of 1 runs." in page(read_models([run]))


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"{", "results.json cannot be used: it is not JSON"),
        (b"[]", "results.json cannot be used: it is a list"),
        (json.dumps({**results(), "format": 2}).encode(), "results.json cannot be used: it has the format 2"),
        (json.dumps({**results(), "tasks": {"x": {"settings": {}}}}).encode(), "tasks.x.data: "),
        (json.dumps(results(tasks={"x": task([score(value="one")])})).encode(), "tasks.x.scores.0.value: "),
        (json.dumps(results(tasks={"x": task([]) | {"seconds": "inf"}})).encode(), "tasks.x.seconds: "),
        (json.dumps(results()).replace("10.0", "NaN").encode(), "NaN is not a finite number"),
        (json.dumps(results(config=functools.reduce(lambda x, _: [x], range(99), 1))).encode(), "nested too deeply"),
        (b'{"x": [' + b"{}," * 16_000_000 + b"{}]}", "results.json cannot be used: it holds too many values"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence_that_names_the_file(tmp_path, capsys, content, sentence):
    file = tmp_path / "results.json"
    file.write_bytes(content)
    assert status_of(lambda: report.main([str(tmp_path), "--output", str(tmp_path / "report.html")])) == 2
    error = capsys.readouterr().err
    assert sentence in error and str(file) in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_what_is_neither_a_run_nor_results_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=20)
    (run / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    (tmp_path / "empty").mkdir()
    for arguments, sentence in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "empty"], "holds neither metrics.jsonl nor results.json"),
        ([run], "metrics.jsonl cannot be used: line 2"),
        ([run, "--output", run / "metrics.jsonl"], "give a name that ends in .html"),
    ):
        assert status_of(partial(report.main, [*map(str, arguments)])) == 2
        assert sentence in capsys.readouterr().err


class _Drawn(Task):
    @classmethod
    def draw(cls, results):
        figure, (left, right) = figures.new_figure(1, 2)
        look = figures.styles(results)
        for label in results:
            figures.curve(left, look[label], LENGTHS, [1, 2, None], [0.5, 2.5, None], [2, 3, None])
        figures.length_axis(left, LENGTHS)
        figures.heat_map(right, [[0.0, 1.0], [None, 0.25]], ["0 %", "100 %"], LENGTHS[:2], bar="share found")
        figures.legend(figure)
        return [Picture("drawn", f"Found by {', '.join(results)}.", figure)]


class _Fragile(_Drawn):
    @classmethod
    def draw(cls, results):
        return super().draw({label: result.details["losses"] for label, result in results.items()})


def test_tasks_draw_all_models_with_the_same_style_everywhere(tmp_path, monkeypatch):
    monkeypatch.setitem(page_module.TASKS, "shiny", _Drawn)
    parsed = evaluated(tmp_path, first={"tasks": {"blunt": task([score()])}}, second={"tasks": {"shiny": ours(0.5)}})
    assert parsed.pictures == ["Found by second."]
    (address,) = (attributes["src"] for name, attributes in parsed.elements if name == "img")
    svg = base64.b64decode(address.partition(",")[2]).decode()
    # The second model of the page has its second colour, also where the first one is missing.
    assert "stroke: var(--series-1)" in svg and "stroke: var(--series-0)" not in svg
    assert ">0.25<" in svg and ">share found<" in svg and "var(--ink)" in svg
    assert svg.count("<image") == 2  # the cells, and the colour bar


def test_models_that_cannot_be_drawn_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(page_module.TASKS, "shiny", _Fragile)
    bad, good = {"tasks": {"shiny": ours(0.5)}}, {"tasks": {"shiny": ours(0.5, details={"losses": []})}}
    by_length = "Accuracy by context length. bad: 0.5 at 256 tokens"
    for models, drawn_text in (({"bad": bad, "good": good}, "Found by good."), ({"bad": bad}, by_length)):
        parsed = evaluated(tmp_path, **models)
        sentence = "The pictures of shiny could not be drawn for bad (KeyError: 'losses')."
        assert sentence in parsed.sections["tasks"] and sentence in capsys.readouterr().err
        (text,) = parsed.pictures
        assert text.startswith(drawn_text)


def drawn_texts(parsed):
    addresses = (attributes["src"] for name, attributes in parsed.elements if name == "img")
    return [base64.b64decode(address.partition(",")[2]).decode() for address in addresses]


ODD = ["$\\frac{$", "a\nb " * 20, "\u202e\u05d0\x1b[31m\u65e5\U0001f389 %s {} &<script>"]


def test_any_name_is_shown_in_pictures_as_it_is(tmp_path):
    paths = []
    for number, name in enumerate([*ODD, "_" + "x" * 100_000]):
        scores = [score(name, 0.5, "higher", length=length, group=name, unit=name) for length in LENGTHS]
        losses = [score("perplexity", length**3, length=length, group=name) for length in LENGTHS]
        tasks = {name: task(scores, notes=[name]), "perplexity": task(losses)}
        paths.append(write_results(tmp_path / str(number), results(name, tasks)))
        run = write_run(tmp_path / "runs" / re.sub(r"\s", "_", name)[:100], steps=20)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(row | {f"evaluation/{name}/512": 1.0}) + "\n" for row in rows)
        (run / "metrics.jsonl").write_text(text)
        paths.append(run)
    content = page(read_models(paths))
    assert "could not be drawn" not in content and len(content) < 2_000_000
    svgs = drawn_texts(Page(content))
    assert len(svgs) == 12 and any("$\\frac{$" in svg for svg in svgs)
    assert not any("mathdefault" in svg for svg in svgs)  # numbers at logarithmic axes are no formulas


@pytest.mark.parametrize("value", [1e308, -1e308, -5.0, 0.0, 5e-324])
def test_a_picture_that_cannot_be_drawn_is_a_sentence_in_its_place(tmp_path, capsys, value):
    run = write_run(tmp_path / "run", steps=20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"loss": value, "step": 10**18 + number} for number, row in enumerate(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = task([score("perplexity", value, length=length) for length in (-5, 0, 2**63 - 1)])
    parsed = page_of(tmp_path, run, write_results(tmp_path / "x", results(tasks={"perplexity": losses})))
    assert len(parsed.tables) >= 4 and any(text.startswith("Learning rate") for text in parsed.pictures)
    if abs(value) > 1e300:
        sentence = "The picture of training loss by step could not be drawn (ValueError: "
        assert sentence in parsed.sections["training"] and f"warning: {sentence}" in capsys.readouterr().err


def test_what_a_drawing_raises_costs_no_other_picture(capsys):
    def fail():
        raise RecursionError

    good = embedded(Picture("x", "good", figures.new_figure()[0]))
    found = page_module._embedded([("a", fail), ("b", lambda: Picture("x", "good", figures.new_figure()[0]))])
    assert [one.address for one in found] == ["", good.address]
    assert found[0].alternative_text == "The picture of a could not be drawn (RecursionError: )."


def test_a_logarithmic_axis_of_base_2_has_exact_numbers():
    figure, (axes,) = figures.new_figure()
    axes.plot([1, 2**17], [0, 1])
    figures.log_scale(axes, "x", 2)
    figure.canvas.draw()
    ticks = {text.get_text() for text in axes.get_xticklabels()}
    assert ticks >= {"32,768", "131,072"} or ticks >= {"16,384", "65,536"}


def test_titles_of_panels_fit_over_them(tmp_path):
    name = "long" * 20
    run = write_run(tmp_path / name, steps=20)
    rows = [json.loads(line) | {"seconds/forward": 1.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = drawn_texts(page_of(tmp_path, run))
    assert len(texts) == 4 and not any(name in text for text in texts)


def test_more_panels_than_can_be_laid_out_are_refused():
    with pytest.raises(ValueError, match="at most 120 are drawn"):
        figures.panels(5000)


def test_of_many_rows_means_are_kept_and_figures_are_of_all(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", interval=1)
    whole = read_models([run])[0].run.curve("loss")
    monkeypatch.setattr(models_module, "MOST_POINTS", 16)
    some = read_models([run])[0].run.curve("loss")
    for facts in ("count", "total", "last", "lowest", "highest"):
        assert getattr(some, facts) == getattr(whole, facts)
    assert (len(whole.values), list(some.steps)) == (300, [1 + 32 * number for number in range(10)])
    assert len(some.tokens) == len(some.values) == 10
    assert some.recent == pytest.approx(whole.recent, rel=0.1)
    assert list(some.values[:9]) == pytest.approx(np.reshape(whole.values[:288], (9, 32)).mean(1))
    assert some.values[9] == pytest.approx(np.mean(whole.values[288:]))
    content = page_of(tmp_path, run)
    assert content.table("How far each run is")[1][1:3] == ["300", "614,400"]


def test_what_is_logged_in_turns_is_drawn_and_averaged_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(models_module, "MOST_POINTS", 16)
    rows = [
        {"step": step, "tokens_per_second": 10 if step % 2 else 100, "seconds/forward": 1.0}
        | ({"seconds/save": 60.0} if step % 8 == 0 else {})
        for step in range(1, 257)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_models([tmp_path])[0].run
    assert run.curve("tokens_per_second").median == 55
    assert set(run.curve("seconds/save").values) == {7.5}
    assert "forward 1 and save 7.5" in page_of(tmp_path, tmp_path).pictures[0]


def test_pictures_show_as_many_runs_as_look_different_and_tables_show_all(tmp_path, monkeypatch):
    monkeypatch.setattr(models_module, "MOST_MODELS", 2)
    runs = [write_run(tmp_path / name, steps=50) for name in ("a", "b", "c")]
    before = read_models(runs[2:])[0].run.curve("loss")
    parsed = page_of(tmp_path, *runs)
    assert "Pictures show the first 2 of 3 runs." in parsed.sections["training"]
    assert all("a " in text and "c " not in text for text in parsed.pictures)
    rows = parsed.table("How far each run is")
    assert [row[0] for row in rows] == ["run", "a", "b", "c"] and rows[3][3] == f"{before.recent:.4f}"
    assert not read_models(runs)[2].run.curve("loss").values


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"step": 3, "x": "' + b"y" * 2_000_000 + b'"}', "line 2: it has more than 1,048,576 bytes"),
        (b"[" * 500_000, "line 2: it is nested too deeply"),
        (b"\xff\xfe", "line 2: "),
        (b'{"step": 1e400}', "line 2: "),
        (b'{"step": true}', "line 2: step is True"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_its_line(tmp_path, line, problem):
    run = write_run(tmp_path / "run", steps=10)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n" + b'{"step": 4}\n')
    with pytest.raises(FileError, match=problem) as caught:
        read_models([run])
    assert caught.value.subject == str(run / "metrics.jsonl") and len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["tasks", "versions"])
def test_a_long_key_is_cut_in_the_message(tmp_path, key):
    path = write_results(tmp_path, results("x", {"shiny": task([score()])}))
    content, long = json.loads(path.read_text()), "x" * 10**5
    part = content if key == "tasks" else content["tasks"]["shiny"]
    part[key] = {long: 1}
    path.write_text(json.dumps(content))
    with pytest.raises(FileError) as caught:
        read_models([path])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name, make",
    [(name, make) for name in ("metrics.jsonl", "config.yaml") for make in (Path.mkdir, os.mkfifo)]
    + [("results.json", make) for make in (Path.mkdir, os.mkfifo)],
)
def test_what_is_no_file_is_refused_by_name(tmp_path, capsys, name, make):
    run = write_run(tmp_path / "run", steps=10)
    (run / name).unlink(missing_ok=True)
    make(run / name)
    assert status_of(lambda: report.main([str(run), "--output", str(tmp_path / "report.html")])) == 2
    error = capsys.readouterr().err
    assert f"{run / name} " in error and "not a regular file" in error and error.count("\n") == 1


def test_a_picture_is_an_image_of_its_own_that_follows_light_and_dark_pages():
    figure, (axes,) = figures.new_figure()
    axes.set_title(figures.plain("a <b> & $c$ \x01"))
    picture = embedded(Picture("x", 'said "so"\x01', figure))
    kind, _, content = picture.address.partition(",")
    svg = base64.b64decode(content).decode()
    assert kind == "data:image/svg+xml;base64" and picture.width == 442
    assert picture.alternative_text == 'said "so"\N{REPLACEMENT CHARACTER}'
    root = ElementTree.fromstring(svg)
    assert any(element.text == "a <b> & $c$ \N{REPLACEMENT CHARACTER}" for element in root.iter())
    assert "#000000" not in svg and "var(--ink)" in svg and "prefers-color-scheme: dark" in svg


def test_styles_differ_and_survive_any_label():
    labels = ["_hidden", "$a", "x" * 50 + "1" + "y" * 50, "x" * 50 + "2" + "y" * 50, *map(str, range(20))]
    look = figures.styles(labels)
    assert len({(style["color"], style["marker"]) for style in look.values()}) == len(labels)
    shown = [style["label"] for style in look.values()]
    assert len(set(shown)) == len(labels) and max(map(len, shown)) <= figures.LONGEST_LABEL
    assert shown[:2] == [" _hidden", "$a"]
    with figures.in_order(labels):
        assert figures.styles([labels[3]]) == {labels[3]: look[labels[3]]}


# How those see linear RGB who lack the green or the red receptor (Machado, Oliveira and Fernandes, 2009).
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def cielab(rgb):
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(color):
    return TO_XYZ[1] @ linear(color)


def test_colours_of_models_differ_for_everyone_and_are_seen_on_their_background():
    style = (page_module.HERE / "colors.css").read_text(encoding="utf-8")
    papers, series = re.findall(r"--paper: (#\w{6})", style), re.findall(r"--series-\d: (#\w{6})", style)
    assert tuple(series[:8]) == figures.COLORS and len(series) == 16
    for paper, colors in zip(papers, (series[:8], series[8:])):
        for color in colors:
            dark, light = sorted((luminance(paper), luminance(color)))
            assert (light + 0.05) / (dark + 0.05) >= 3, color  # as WCAG asks of graphics
        for sight in (np.eye(3), DEUTERANOPIA, PROTANOPIA):
            seen = [cielab(np.array(sight) @ linear(color)) for color in colors]
            distances = [[np.linalg.norm(a - b) for b in seen[:at]] for at, a in enumerate(seen)]
            assert min(min(row) for row in distances[1:]) > 15 and min(min(row) for row in distances[1:4]) > 35


def test_a_picture_is_saved_as_png(tmp_path):
    figure, (axes,) = figures.new_figure()
    figures.save(Picture("x", "", figure), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.png"]


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


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_sorts_tables_by_their_titles(compared, tmp_path):
    content = compared.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", content, re.S)
    clicked = script + (
        'const title = document.querySelectorAll("table")[1].rows[0].cells[2];'
        'for (let count = 0; count < 4; count++) title.querySelector("button").click();'
    )
    path = tmp_path / "clicked.html"
    path.write_text(content.replace(script, clicked), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60)
    after = Page(done.stdout)
    (sorted_by,) = [a for name, a in after.elements if name == "th" and "aria-sort" in a]
    assert sorted_by["aria-sort"] == "ascending"
    values = [row[2].partition("|")[0] for row in after.table("accuracy", "scores")[1:]]
    assert values == sorted(values) and len(values) == 3
    assert [name for name, _ in after.elements].count("button") > 10
