"""Tasks of the harness by name: scores and reported truncation."""

import json
import logging
import random

import numpy as np
import pytest
import torch
import yaml
from evaluation.loss_cases import run
from harness_cases import bpe_tokenizer, info, random_llama
from lm_eval.api.instance import Instance

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks.lm_eval_tasks import LmEval, LmEvalSettings

WORDS = "push pop heap item list sort key merge left right child parent".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a multiple-choice and a generation task, whose documents have very different
    sizes.
    """
    folder = tmp_path_factory.mktemp("tasks")
    source = random.Random(0)
    rows = []
    for number in range(24):
        text = " ".join(source.choices(WORDS, k=200 if number % 4 == 0 else 5))
        rows.append({"text": text, "choices": source.sample(WORDS, 3), "answer": number % 3})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "metadata": {"version": 3},
    }
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
    }
    rolls["metric_list"] = [{"metric": "word_perplexity"}]
    for task in (chooses, writes, rolls):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


@pytest.fixture(scope="module")
def model():
    return random_llama(bpe_tokenizer(bos=True), 64)


def settings(folder, **given):
    return LmEvalSettings(**{"tasks": ["next_word"], "include_path": str(folder), **given})


def evaluated(model, folder, **given):
    return run(LmEval, model, **vars(settings(folder, **given)))


def test_scores_follow_from_the_logits_and_truncation_is_counted(model, folder, caplog):
    result = evaluated(model, folder, tasks=["next_word", "write_word", "roll"])
    (outcome,) = result.examples["next_word"]["outcomes"]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    right = []
    cut = 0
    for row in rows:
        scores = []
        truncated = False
        for choice in row["choices"]:
            context = model.tokenizer(row["text"]).input_ids
            ids = model.tokenizer(f"{row['text']} {choice}").input_ids
            truncated |= len(ids) > 65
            kept = torch.tensor([ids[-65:]])
            with torch.no_grad():
                chances = model.model(kept[:, :-1]).logits.log_softmax(-1)
            count = len(ids) - len(context)
            scores.append(chances[0].gather(-1, kept[0, 1:, None])[-count:].sum().item())
        right.append(float(np.argmax(scores) == row["answer"]))
        cut += truncated
    assert outcome["values"]["acc,none"] == right and 0 < sum(right) < 24
    assert (
        outcome["truncated"] == cut == 6 and outcome["version"] == "3" and outcome["fewshot"] == 0
    )
    by_name = {(score.group, score.metric): score for score in result.scores}
    accuracy = by_name["next_word", "acc"]
    assert (
        accuracy.value == sum(right) / 24
        and accuracy.low < accuracy.value < accuracy.high
        and accuracy.count == 24
    )
    assert by_name["write_word", "exact_match"].value == 0
    perplexity = by_name["roll", "word_perplexity"]
    assert (
        perplexity.better == "lower" and perplexity.value > 1 and perplexity.low is None
    )  # the harness knows none
    assert result.notes == [
        f"{name}: 6 of 24 documents are longer than the limit of 64 tokens and were truncated on"
        " the left."
        for name in ("next_word", "write_word")
    ]
    assert result.details["tasks"]["roll"]["truncated"] == 0
    assert not caplog.records and logging.getLogger("lm_eval").level == logging.NOTSET
    (picture,) = LmEval.draw({"a": result, "b": result})
    assert f"a: {accuracy.value:.4g} next_word acc" in picture.alternative_text
    assert [label.get_text() for label in picture.figure.axes[0].get_yticklabels()][
        0
    ] == "next_word acc"


def log_likelihoods(model, context, text):
    """Return the log-likelihoods (N,) of the token ids `text` (N,) after those of `context`, in one
    forward pass.
    """
    ids = torch.tensor([[*context, *text]])
    with torch.no_grad():
        chances = model.model(ids[:, :-1]).logits.log_softmax(-1)
    return chances[0].gather(-1, ids[0, 1:, None])[-len(text) :, 0]


@pytest.mark.parametrize("bos", [True, False])
def test_a_rolling_score_reads_one_bos_and_scores_the_text_only(folder, bos):
    model = random_llama(bpe_tokenizer(bos=bos), 64)
    result = evaluated(model, folder, tasks=["roll"])
    total = 0.0
    words = 0
    for line in (folder / "rows.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        words += len(text.split())
        ids = model.encode(text)
        # Windows of 64 tokens. The text needs a token to follow, also if the tokenizer adds none.
        read = [model.tokenizer.bos_token_id, *ids]
        for start in range(0, len(ids), 64):
            stop = min(start + 64, len(ids))
            context = read[max(0, stop - 64) : start + 1]
            total += log_likelihoods(model, context, ids[start:stop]).sum().item()
    (score,) = result.scores
    assert score.metric == "word_perplexity"
    assert score.value == pytest.approx(np.exp(-total / words), rel=1e-4)


@pytest.mark.parametrize("bos", [True, False])
def test_each_prompt_reads_one_bos(bos, monkeypatch):
    tokenizer = bpe_tokenizer(bos=bos)
    tokenizer.split_special_tokens = True  # as `load_model` sets it
    model = random_llama(tokenizer, 64)
    harness = model.harness(batch_size=2)
    before = [tokenizer.bos_token_id]
    added = before if bos else []
    # The third text starts with the characters of bos. A context of spaces becomes part of the
    # answer.
    pairs = [("push", " pop"), ("", "heap pop"), ("<s> item", " list"), (" ", "sort")]
    contexts = [added + model.encode("push"), before, added + model.encode("<s> item"), before]
    answers = [model.encode(text) for text in (" pop", "heap pop", " list", " sort")]
    scores = harness.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    expected = [
        log_likelihoods(model, *pair).sum().item() for pair in zip(contexts, answers, strict=True)
    ]
    assert [score for score, _ in scores] == pytest.approx(expected, rel=1e-4)

    read = []
    monkeypatch.setattr(
        harness, "_model_generate", lambda context, **_: read.append(context) or context
    )
    options = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    prompts = ["<s> item", "push pop"]  # the longest first, as the harness sorts them
    harness.generate_until(
        [Instance("generate_until", {}, (prompt, dict(options)), 0) for prompt in prompts]
    )
    (batch,) = read
    expected = [added + model.encode(prompt) for prompt in prompts]
    assert [row[-len(ids) :] for row, ids in zip(batch.tolist(), expected, strict=True)] == expected


def test_a_limit_takes_the_first_documents(model, folder):
    limited = evaluated(model, folder, limit=5)
    whole = evaluated(model, folder)
    few, all_of_them = (result.examples["next_word"]["outcomes"][0] for result in (limited, whole))
    assert (
        few["documents"] == all_of_them["documents"][:5]
        and len(set(all_of_them["documents"])) == 24
    )
    assert few["values"]["acc,none"] == all_of_them["values"]["acc,none"][:5]
    assert "Only the first 5 documents of each task were used." in limited.notes


def test_few_shot_examples_do_not_depend_on_earlier_tasks(model, folder):
    task = LmEval(settings(folder, num_fewshot=2, max_length=500))
    first = task.evaluate(task.units(model)[0], model)
    random.seed(99)
    np.random.seed(99)
    LmEval(settings(folder, tasks=["write_word"], limit=2)).evaluate(task.units(model)[0], model)
    assert task.evaluate(task.units(model)[0], model) == first
    assert first["outcomes"][0]["fewshot"] == 2 and first["max_length"] == 500


def test_an_unknown_task_is_refused(folder, monkeypatch):
    from megatron_tape.evaluation.tasks import harness

    # The harness's whole list takes long to read.
    monkeypatch.setattr(
        harness, "index", lambda include, defaults, read=harness.index: read(include, False)
    )
    with pytest.raises(ConfigError, match="next_wrd, which is not a task of lm_eval"):
        LmEval(settings(folder, tasks=["next_wrd"])).check(info())


def test_unavailable_data_is_reported_by_name(model, folder, tmp_path):
    task = yaml.safe_load((folder / "next_word.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(tmp_path / "gone.jsonl")
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(
        ConfigError, match="gone.yaml, which cannot be loaded: Unable to find .*gone.jsonl"
    ):
        evaluated(model, folder, tasks=[str(tmp_path / "gone.yaml")])


def test_an_answer_longer_than_the_context_is_refused(folder):
    small = random_llama(bpe_tokenizer(bos=True), 4)
    with pytest.raises(
        ConfigError,
        match="write_word, which generates up to 4 tokens, but the model reads at most 4,",
    ):
        evaluated(small, folder, tasks=["write_word"])


def test_a_tokenizer_without_an_end_token_is_refused(folder):
    model = random_llama(bpe_tokenizer(bos=True), 64)
    model.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer of random has no end-of-text token"):
        model.harness()


def test_a_tokenizer_that_ends_each_text_with_a_token_is_refused():
    from tokenizers import processors

    model = random_llama(bpe_tokenizer(bos=False), 64)
    ends = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
    )
    model.tokenizer.backend_tokenizer.post_processor = ends
    with pytest.raises(
        ConfigError, match="the tokenizer of random puts the token 1 after each text"
    ):
        model.harness()
