"""RULER: samples that fit the length and are independent of other tasks, solvers that score 1,
effective lengths.
"""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from evaluation.loss_cases import result_of, run, score
from harness_cases import Answering, info, random_llama, word_tokenizer

from megatron_tape.command_line import Interrupted
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks.ruler import ESSAYS, OFFLINE, Ruler
from megatron_tape.evaluation.tasks.ruler_samples import make_samples


@pytest.fixture(scope="module", autouse=True)
def few_words():
    """Use few words: on import, the harness combines all adjectives and nouns into 6 million
    names.
    """
    import wonderwords

    begin = wonderwords.RandomWord.__init__

    def small(self, *arguments, **options):
        begin(self, *arguments, **options)
        self._categories = {
            name: words[:60] if name in ("nouns", "adjectives") else words
            for name, words in self._categories.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords.RandomWord, "__init__", small)
        from lm_eval.tasks.ruler import cwe_utils, prepare_niah  # noqa: F401

        yield


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


SETTINGS = {"lengths": [1024, 2048], "samples": 2}


def ruler(**given):
    return Ruler(Ruler.Settings(**{**SETTINGS, **given}))


def evaluated(model, **given):
    return run(Ruler, model, **{**SETTINGS, **given})


def samples(task, length, count, tokenizer, seed=0):
    return make_samples(task, length, count, tokenizer, Ruler.Settings(seed=seed)).rows


def solve(prompt):
    """Solve a prompt of RULER."""
    if asked := re.search(
        r"The special magic \w+ for (.*) mentioned in the provided text (?:is|are)$", prompt
    ):
        keys = re.split(r", and |, ", asked.group(1))
        found = dict.fromkeys(keys, "")
        for key, value in re.findall(r"magic \w+ for (\S+) is: (\S+)\.", prompt):
            if key in found:
                found[key] += f" {value}"
        return " ".join(found.values())
    if prompt.endswith("they are:"):
        value = re.search(r"assgined the value (\d+), they are:$", prompt).group(1)
        assigned = []
        for name, source in re.findall(
            r"VAR (\w+) = (?:VAR )?(\w+)", prompt[prompt.rindex("Memorize and track") :]
        ):
            if source == value or source in assigned:
                assigned.append(name)
        return " ".join(assigned)
    if prompt.endswith("Answer: The top 10 words that appear most often in the list are:"):
        words = Counter(re.findall(r"\d+\. (\S+)", prompt))
        return " ".join(word for word, _ in words.most_common(10))
    assert prompt.endswith("the three most frequently appeared words are:")
    text = prompt[prompt.index("coded words. ") + 13 : prompt.index("\nQuestion:")]
    return " ".join(word for word, _ in Counter(text.split()).most_common(4) if word != "...")


def test_a_solver_scores_1_in_every_offline_task_and_length(tokenizer):
    model = Answering(tokenizer, solve)
    result = evaluated(model)
    values = result.examples
    assert list(values) == [f"{task}/{length}" for length in (1024, 2048) for task in OFFLINE]
    for key, value in values.items():
        assert value["scores"] == [1.0, 1.0] and value["truncated"] == 0, key
    assert score(result, "mean of the 6 offline tasks", 1024).count == 12
    assert score(result, "effective length").value == 2048
    assert score(result, "own effective length").value == 2048
    assert "niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe" in result.notes[0]

    # The answers' beginnings, which base models need, are in the prompts, and all lie within the
    # length.
    generated = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
    for key, *prompts in zip(
        values,
        model.prompts[::2],
        model.prompts[1::2],
    ):
        task, length = key.split("/")
        room = int(length) - generated[task.split("_")[0]]
        for prompt, tokens in zip(prompts, values[key]["tokens"]):
            assert prompt.endswith((" is", " are:"))
            assert len(tokenizer(prompt).input_ids) == tokens
            assert 0.5 * room < tokens <= room
    assert model.max_lengths == [int(key.split("/")[1]) for key in values]


def test_a_failure_of_one_task_at_one_length_changes_only_its_score(tokenizer):
    def fails_at_vt_of_2048(prompt):
        if prompt.endswith("they are:") and len(tokenizer(prompt).input_ids) > 1024:
            return ""
        return solve(prompt)

    result = evaluated(Answering(tokenizer, fails_at_vt_of_2048), tasks=["vt", "cwe"])
    assert result.details["tasks"] == {"vt": [1, 0], "cwe": [1, 1]}
    assert score(result, "score", 2048, "vt").value == 0
    assert score(result, "score", 2048, "cwe").value == 1
    assert score(result, "mean of 2 chosen tasks", 2048).value == 0.5
    assert score(result, "effective length").value == 1024
    means, maps = Ruler.draw({"good": result, "other": result})
    assert "good: from 0.00 (vt, 2,048)" in maps.alternative_text
    assert "good: 1 at 1,024 tokens, 0.5 at 2,048 tokens" in means.alternative_text


def test_the_harness_passes_an_interruption_on(tokenizer):
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 12:
            raise Interrupted(15)
        return tokenizer(*arguments, **options)

    with pytest.raises(Interrupted):
        samples("vt", 1024, 8, interrupted)
    assert len(calls) < 20, "at the end of the sample at the latest"


def test_samples_do_not_depend_on_the_order_of_tasks_or_earlier_draws(tokenizer):
    names = [
        ("vt", 1024),
        ("cwe", 1024),
        ("niah_multikey_2", 1024),
        ("fwe", 1024),
        ("cwe", 2048),
    ]
    made = {name: samples(*name, 3, tokenizer) for name in names}
    random.seed(1)
    np.random.seed(1)
    state = random.getstate()
    assert {name: samples(*name, 3, tokenizer) for name in reversed(names)} == made
    assert random.getstate() == state
    fewer = samples("cwe", 1024, 1, tokenizer)
    assert fewer == made["cwe", 1024][:1]
    assert fewer != samples("cwe", 1024, 1, tokenizer, seed=1)
    assert len({row["input"] for row in made["vt", 1024]}) == 3


@pytest.mark.parametrize(
    "task, length",
    [
        ("vt", 64),
        ("cwe", 256),
        ("fwe", 100),
        ("niah_multikey_3", 200),
    ],
)
def test_a_length_that_is_too_short_is_refused(tokenizer, task, length):
    model = Answering(tokenizer, solve)
    with pytest.raises(ConfigError) as error:
        evaluated(model, tasks=[task], lengths=[length])
    assert error.value.key == "ruler.lengths"
    assert not model.prompts


def test_needles_are_hidden_in_a_given_text(tokenizer, tmp_path):
    file = tmp_path / "hay.txt"
    file.write_text("Once upon a time, there was hay. Nobody looked for anything in it! " * 80)
    given = {"tasks": list(ESSAYS), "lengths": [2048], "haystack": str(file)}
    model = Answering(tokenizer, solve)
    result = evaluated(model, **given)
    assert {score.value for score in result.scores if score.metric == "score"} == {1.0}
    assert all(prompt.count("Nobody looked") > 40 for prompt in model.prompts)
    assert ruler(**given).inputs() == [file]
    assert any("hay.txt, not in the essays" in note for note in result.notes)


def test_questions_are_read_from_files(tokenizer, tmp_path):
    squad_paragraphs = []
    hotpot = []
    for number in range(40):
        question = {"question": f"Where is person {number}?"}
        fact = f"Person {number} is in town {number}."
        answers = [{"text": f"town {number}"}]
        answered = {**question, "answers": answers, "is_impossible": False}
        squad_paragraphs.append({"context": fact + " It rains." * 12, "qas": [answered]})
        context = [[f"Person {number}", [fact, " It rains. " * 12]], ["Rain", [" It rains. " * 20]]]
        hotpot.append({**question, "answer": f"town {number}", "context": context})
    squad = {"version": "v2.0", "data": [{"paragraphs": squad_paragraphs}]}

    def knows(prompt):
        number = re.search(r"Where is person (\d+)\?\s+Answer:$", prompt).group(1)
        if f"Person {number} is in town {number}." in prompt:
            return f" town {number}"
        return ""

    files = {"squad": str(tmp_path / "squad.json"), "hotpotqa": str(tmp_path / "hotpot.json")}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    (tmp_path / "hotpot.json").write_text(json.dumps(hotpot))
    given = {"tasks": ["qa_squad", "qa_hotpot"], "lengths": [1024], **files}
    model = Answering(tokenizer, knows)
    values = evaluated(model, **given).examples
    assert [value["scores"] for value in values.values()] == [[1.0, 1.0]] * 2
    assert list(map(str, ruler(**given).inputs())) == list(files.values())
    # The first version of SQuAD has no such field.
    (tmp_path / "squad.json").write_text(json.dumps(squad).replace("is_impossible", "other"))
    with pytest.raises(ConfigError, match="ruler.squad .* dev-v2.0.json"):
        ruler(**given).units(model)


@pytest.mark.parametrize(
    "task, setting", [("niah_single_2", "ruler.haystack"), ("qa_squad", "ruler.squad")]
)
def test_missing_data_is_named_with_a_fix(tokenizer, monkeypatch, task, setting):
    def unreachable(*_, **__):
        raise ConnectionError("no network here")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr("requests.get", unreachable)
    with pytest.raises(ConfigError, match="no network here") as error:
        ruler(tasks=[task]).units(Answering(tokenizer, solve))
    assert error.value.key == setting


def test_a_model_of_transformers_sees_the_whole_prompt(tokenizer):
    model = random_llama(tokenizer, 1024)
    read = []
    layer = model.model.model.embed_tokens
    layer.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].shape[1]))
    (value,) = evaluated(model, tasks=["fwe"], lengths=[512], samples=1).examples.values()
    assert value["truncated"] == 0
    assert read[0] == value["tokens"][0] <= 512 - 50


def summary_of(curve, trained_length, **given):
    """The summary for a score in all tasks at each length of `curve`."""
    task = ruler(lengths=list(curve), **given)
    values = {
        f"{name}/{length}": {"scores": [value] * 4, "truncated": 0}
        for length, value in curve.items()
        for name in task.tasks
    }
    return task.summarize(values, info(trained_length))


@pytest.mark.parametrize(
    "curve, effective, own",
    [
        ({1024: 0.95, 2048: 0.9, 4096: 0.5}, 2048, 1024),
        ({1024: 0.5, 2048: 0.5, 4096: 0.2}, 0, 2048),
        ({1024: 0.9, 2048: 0.8, 4096: 0.9}, 4096, 4096),
        ({1024: 0.0, 2048: 0.0, 4096: 0.0}, 0, None),
    ],
)
def test_the_effective_length(curve, effective, own):
    summary = summary_of(curve, 1024)
    scores = {score.metric: score.value for score in summary.scores}
    assert scores["effective length"] == effective
    assert scores.get("own effective length") == own
    threshold = f"at least {curve[1024]:.3f}, the model's score at 1,024 tokens."
    assert any(threshold in note for note in summary.notes) == (own is not None)


def test_means_of_different_tasks_have_different_names():
    names = ("mean of all 13 tasks", "mean of the 6 offline tasks", "score of vt")
    results = {}
    for name, tasks in zip(names, ("all", "offline", ["vt"])):
        summary = summary_of({1024: 0.9}, 4096, tasks=tasks)
        assert summary.scores[0].metric == name
        results[name] = result_of(summary)
        said = any("not comparable with published figures" in note for note in summary.notes)
        assert said == (tasks != "all")
    *means, _ = Ruler.draw(results)
    assert {picture.figure.axes[0].get_ylabel() for picture in means} == set(names)
