"""Tasks of the harness by name: scores and reported truncation."""

import json
import random

import numpy as np
import pytest
import torch
import yaml
from evaluation.loss_cases import run, score
from harness_cases import bpe_tokenizer, random_llama
from lm_eval.api.instance import Instance
from tokenizers import processors

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks import harness
from megatron_tape.evaluation.tasks.lm_eval_tasks import LmEval

WORDS = "push pop heap item list sort key merge left right child parent".split()


def write_task(folder, task):
    """Write a YAML file of a task on the documents of `rows.jsonl`."""
    data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    common |= {"doc_to_text": "{{text}}", "metadata": {"version": 3}}
    (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a multiple-choice, a generation and a rolling task, whose documents have
    very different sizes.
    """
    folder = tmp_path_factory.mktemp("tasks")
    generator = random.Random(0)
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(24):
            text = " ".join(
                generator.choices(
                    WORDS,
                    k=200 if number % 4 == 0 else 5,
                )
            )
            row = {"text": text, "choices": generator.sample(WORDS, 3), "answer": number % 3}
            file.write(json.dumps(row) + "\n")
    chooses = {
        "task": "next_word",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    writes = {
        "task": "write_word",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    rolls = {
        "task": "roll",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    for task in (chooses, writes, rolls):
        write_task(folder, task)
    return folder


def documents(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model():
    return random_llama(bpe_tokenizer(bos=True), 64)


def evaluated(model, folder, *tasks, **given):
    given = {"tasks": list(tasks) or ["next_word"], "include_path": str(folder), **given}
    return run(LmEval, model, **given)


def log_likelihood(model, context, text):
    """Return the log-likelihood of the token ids `text` after those of `context`, in one forward
    pass.
    """
    ids = torch.tensor([[*context, *text]])
    with torch.no_grad():
        chances = model.model(ids[:, :-1]).logits.log_softmax(-1)
    return chances[0].gather(-1, ids[0, 1:, None])[-len(text) :].sum().item()


def test_scores_follow_from_the_logits_and_truncation_is_counted(model, folder, caplog):
    result = evaluated(model, folder, "next_word", "write_word", "roll")
    right = []
    truncated = 0
    for row in documents(folder):
        context = model.tokenizer(row["text"]).input_ids
        texts = [model.tokenizer(f"{row['text']} {choice}").input_ids for choice in row["choices"]]
        scores = []
        for ids in texts:
            answer = ids[len(context) :]
            scores.append(log_likelihood(model, ids[-65 : -len(answer)], answer))
        right.append(float(np.argmax(scores) == row["answer"]))
        truncated += max(map(len, texts)) > 65
    (outcome,) = result.examples["next_word"]["outcomes"]
    assert outcome["values"]["acc,none"] == right
    assert outcome["truncated"] == truncated == 6
    assert outcome["version"] == "3"

    accuracy = score(result, "acc")
    assert accuracy.value == sum(right) / 24
    assert accuracy.count == 24
    assert accuracy.low < accuracy.value < accuracy.high
    assert score(result, "exact_match").value == 0
    perplexity = score(result, "word_perplexity")
    assert perplexity.better == "lower"
    assert perplexity.low is None, "the harness knows none"
    next_word, _ = result.notes
    said = "next_word: 6 of 24 documents are longer than the limit of 64 tokens"
    assert next_word.startswith(said)
    assert not caplog.records
    (picture,) = LmEval.draw({"a": result, "b": result})
    assert f"a: {accuracy.value:.4g} next_word acc" in picture.alternative_text


@pytest.mark.parametrize("bos", [True, False])
def test_a_rolling_score_reads_one_bos_and_scores_the_text_only(folder, bos):
    model = random_llama(bpe_tokenizer(bos=bos), 64)
    total = 0.0
    words = 0
    for row in documents(folder):
        words += len(row["text"].split())
        ids = model.encode(row["text"])
        # Windows of 64 tokens. The text needs a token to follow, also if the tokenizer adds none.
        read = [model.tokenizer.bos_token_id, *ids]
        for start in range(0, len(ids), 64):
            stop = min(start + 64, len(ids))
            context = read[max(0, stop - 64) : start + 1]
            total += log_likelihood(model, context, ids[start:stop])
    perplexity = score(evaluated(model, folder, "roll"), "word_perplexity")
    assert perplexity.value == pytest.approx(np.exp(-total / words), rel=1e-4)


@pytest.mark.parametrize("bos", [True, False])
def test_each_prompt_reads_one_bos(bos, monkeypatch):
    tokenizer = bpe_tokenizer(bos=bos)
    tokenizer.split_special_tokens = True  # as `load_model` sets it
    model = random_llama(tokenizer, 64)
    harness = model.harness(batch_size=2)
    before = [tokenizer.bos_token_id]
    added = before if bos else []
    # The second text starts with the characters of bos. A context of spaces becomes part of the
    # answer.
    expected = {
        ("", "heap pop"): (before, "heap pop"),
        ("<s> item", " list"): (added + model.encode("<s> item"), " list"),
        (" ", "sort"): (before, " sort"),
    }
    for pair, (context, answer) in expected.items():
        ((likelihood, _),) = harness.loglikelihood([Instance("loglikelihood", {}, pair, 0)])
        expected_likelihood = log_likelihood(model, context, model.encode(answer))
        assert likelihood == pytest.approx(expected_likelihood, rel=1e-4)

    read = []
    monkeypatch.setattr(
        harness, "_model_generate", lambda context, **_: read.append(context) or context
    )
    options = {"until": ["\n"], "max_gen_toks": 4}
    harness.generate_until([Instance("generate_until", {}, ("<s> item", options), 0)])
    assert read[0].tolist() == [added + model.encode("<s> item")]


def test_few_shot_examples_do_not_depend_on_earlier_tasks(model, folder):
    def evaluate():
        return evaluated(model, folder, num_fewshot=2, max_length=500, limit=5)

    first = evaluate()
    random.seed(99)
    np.random.seed(99)
    evaluated(model, folder, "write_word", limit=2)
    assert evaluate().examples == first.examples
    value = first.examples["next_word"]
    (outcome,) = value["outcomes"]
    assert outcome["fewshot"] == 2
    assert len(outcome["documents"]) == 5
    assert value["max_length"] == 500
    assert first.notes == ["Only the first 5 documents of each task were used."]


def test_an_unknown_task_is_refused(folder, monkeypatch):
    # The harness's whole list takes long to read.
    monkeypatch.setattr(
        harness,
        "task_index",
        lambda include, defaults, read=harness.task_index: read(include, False),
    )
    with pytest.raises(ConfigError, match="next_wrd") as error:
        evaluated(random_llama(bpe_tokenizer(bos=True), 64), folder, "next_wrd")
    assert error.value.key == "lm_eval.tasks"


def test_unavailable_data_is_reported_by_name(model, folder, tmp_path):
    task = yaml.safe_load((folder / "next_word.yaml").read_text())
    write_task(tmp_path, {**task, "task": "gone", "dataset_kwargs": {"data_files": "gone.jsonl"}})
    file = str(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="gone.yaml, which cannot be loaded: Unable to find"):
        evaluated(model, folder, file)


def test_an_answer_longer_than_the_context_is_refused(folder):
    small = random_llama(bpe_tokenizer(bos=True), 4)
    with pytest.raises(ConfigError, match="write_word, which generates up to 4 tokens"):
        evaluated(small, folder, "write_word")


def test_a_tokenizer_without_an_end_token_is_refused():
    model = random_llama(bpe_tokenizer(bos=True), 64)
    model.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        model.harness()


def test_a_tokenizer_that_ends_each_text_with_a_token_is_refused():
    model = random_llama(bpe_tokenizer(bos=False), 64)
    model.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
    )
    with pytest.raises(ConfigError, match="puts the token 1 after each text"):
        model.harness()
