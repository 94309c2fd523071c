"""SCROLLS: scores equal to those of the official evaluator, and answers and losses of known
models.
"""

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation.loss_cases import ByteModel, run, score
from harness_cases import BYTES, bpe_tokenizer, random_llama
from transformers import GenerationConfig

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks import scrolls
from megatron_tape.evaluation.tasks.scrolls import METRICS, Scrolls

CHOICES = ("Entailment", "Contradiction", "Not mentioned")


def official(metric, predictions, references):
    parts = np.array([scrolls.score(metric, *pair) for pair in zip(predictions, references)]).mean(
        0
    )
    return [*parts.tolist(), float(scrolls.combine(parts))]


def test_scores_are_those_that_the_official_evaluator_documents():
    predictions = ["exact match example", "hello there", "general kenobi"]
    references = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
    expected = {
        "rouge": [72.2222, 33.3333, 72.2222, 55.8136],
        "exact_match": [33.3333, 33.3333],
        "f1": [72.2222, 72.2222],
    }
    for metric, values in expected.items():
        assert official(metric, predictions, references) == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    "metric, prediction, references, values",
    [
        ("exact_match", " The answer,  is: YES! ", ["answer is yes"], [100]),
        # Words in common 2, of 3 and of 4: precision 2/3, recall 1/2; the better reference counts.
        ("f1", "the red red cat", ["a red dog and cat", "nothing"], [100 * 4 / 7]),
        # Without stemming: "cats" is not "cat". The longest common subsequence is "sat on mat".
        ("rouge", "the cats sat on mat", ["the cat sat on the mat"], [800 / 11, 200 / 9, 800 / 11]),
        # Each part is the best over the references, which need not be the same one.
        (
            "rouge",
            "a b c",
            ["c b a", "a b x x x x"],
            [100, 200 * (1 / 5 * 1 / 2) / (1 / 5 + 1 / 2), 400 / 9],
        ),
    ],
)
def test_scores_equal_hand_computed_cases(metric, prediction, references, values):
    assert scrolls.score(metric, prediction, references) == pytest.approx(values)


class Knowing(ByteModel):
    """A byte-level model whose answer is a function of the prompt."""

    def __init__(self, answer):
        super().__init__(lambda before, token: 2.0, trained_length=400)
        self._answer = answer

    def answer(self, prompt, count):
        answer = self._answer(bytes(prompt).decode()).encode()
        return answer[:count].decode(), len(answer) < count


def write_all(folder, number=6):
    """Write the seven datasets, as files and zips; each input holds its answer behind `is`."""
    files = {}
    for i, (name, metric) in enumerate(METRICS.items()):
        lines = []
        for j in range(number):
            if name == "contract_nli":
                answer = CHOICES[j % 3]
            else:
                answer = f"{name} says number {j} today"
            for target in ["another", answer] if metric == "f1" else [answer]:
                lines.append(
                    {
                        "id": f"{name}{j}",
                        "pid": f"{j}",
                        "input": f"Q\n\nIt is {answer}",
                        "output": target,
                    }
                )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        files[name] = str(folder / f"{name}.{('jsonl', 'zip')[i % 2]}")
        if i % 2 == 0:
            Path(files[name]).write_text(text)
        else:
            with zipfile.ZipFile(files[name], "w") as archive:
                archive.writestr(f"{name}/validation.jsonl", text)
    return files


def reads_it_off(prompt):
    return prompt.removesuffix("\n\nAnswer:").partition("It is ")[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("scrolls"))


@pytest.fixture(scope="module")
def known(data):
    """Results of a model with all answers right, and of one that fails only in qmsum."""
    fails = Knowing(lambda prompt: "wrong" if "qmsum" in prompt else reads_it_off(prompt))
    return {
        "all": run(Scrolls, Knowing(reads_it_off), data=data),
        "not qmsum": run(Scrolls, fails, data=data),
    }


def test_a_model_that_knows_the_answers_scores_100(known):
    result = known["all"]
    for name, metric in METRICS.items():
        found = score(result, scrolls.SHOWN[metric], group=name)
        assert (found.value, found.low, found.high) == pytest.approx((100, 100, 100))
        assert (found.count, found.length, found.unit) == (6, 400, "%")
        assert score(result, "target_loss", group=name).value == 2.0
    assert score(result, "scrolls_score").value == pytest.approx(100)
    assert result.notes == []
    assert result.examples["qasper/0"]["answer"] == "qasper says number 0 today"


def test_a_failure_in_one_dataset_changes_no_other_score(known):
    result = known["not qmsum"]
    values = {one.group: one.value for one in result.scores if one.metric in scrolls.SHOWN.values()}
    assert values.pop("qmsum") == 0 and list(values.values()) == pytest.approx([100] * 6)
    assert score(result, "scrolls_score").value == pytest.approx(600 / 7)


def test_the_mean_of_a_subset_is_not_called_the_scrolls_score(data):
    some = {name: data[name] for name in ("contract_nli", "qasper")}
    result = run(Scrolls, Knowing(lambda _: "entailment."), data=some, loss=False, examples=3)
    mean = score(result, "mean_score")
    assert mean.group == "of contract_nli, qasper only" and mean.count == 6
    assert mean.value == pytest.approx(100 / 3 / 2)
    assert not any(one.metric == "scrolls_score" for one in result.scores)


def test_truncated_inputs_and_unfinished_answers_are_counted(tmp_path):
    path = tmp_path / "own.jsonl"
    texts = [("short", "yes"), ("x" * 60, "a much longer answer")]
    path.write_text(
        "".join(json.dumps({"input": text, "target": answer}) + "\n" for text, answer in texts)
    )
    settings = {
        "data": {"own": str(path)},
        "metrics": {"own": "f1"},
        "length": 40,
        "target_tokens": 8,
    }
    result = run(
        Scrolls, Knowing(lambda prompt: "yes" if "short" in prompt else "y" * 50), **settings
    )
    assert result.notes == [
        "own: 1 of 2 inputs were truncated at the end.",
        "own: 1 of 2 first targets were truncated for the loss.",
        "own: 1 of 2 answers did not end within the maximum length.",
    ]
    assert result.examples["own/1"]["tokens"] == 8
    assert score(result, "f1").value == 50


@pytest.fixture(scope="module")
def llama():
    """A random byte-level model whose generation settings enable sampling and a repetition
    penalty.
    """
    llama = random_llama(bpe_tokenizer(bos=False, rows=BYTES), 128)
    llama.model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        repetition_penalty=3.0,
        max_length=3,
        eos_token_id=llama.tokenizer.eos_token_id,
    )
    return llama


def test_generation_is_greedy_and_the_loss_is_that_of_the_target_alone(llama, tmp_path):
    (tmp_path / "own.jsonl").write_text(
        json.dumps({"input": "Who was it?", "target": "Ann"}) + "\n"
    )
    data = {
        "data": {"own": str(tmp_path / "own.jsonl")},
        "metrics": {"own": "f1"},
        "target_tokens": 12,
    }
    found = run(Scrolls, llama, **data).examples["own/0"]
    prompt = llama.encode("Who was it?\n\nAnswer:")
    answer = []
    end = llama.tokenizer.eos_token_id
    while len(answer) < 12 and end not in answer:
        with torch.inference_mode():
            answer.append(
                int(llama.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].argmax())
            )
    assert found["answer"] == llama.tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert found["ended"] == (end in answer)
    target = llama.encode(" Ann")
    labels = torch.tensor([[-100] * len(prompt) + target])
    loss = llama.model(torch.tensor([[*prompt, *target]]), labels=labels).loss.item()
    assert found["tokens"] == len(target) and found["nats"] == pytest.approx(
        loss * len(target), rel=1e-5
    )


def test_prompts_begin_with_bos_as_in_training(llama, tmp_path, monkeypatch):
    (tmp_path / "own.jsonl").write_text(
        json.dumps({"input": "Who was it?", "target": "Ann"}) + "\n"
    )
    data = {
        "data": {"own": str(tmp_path / "own.jsonl")},
        "metrics": {"own": "f1"},
        "generate": False,
    }
    prompts = []
    monkeypatch.setattr(
        llama, "losses", lambda tokens, first: prompts.append(list(tokens[:first])) or np.ones(4)
    )
    for bos in (None, False, True):
        run(Scrolls, llama, bos=bos, **data)
    prompt = llama.encode("Who was it?\n\nAnswer:")
    assert prompts == [prompt, prompt, [llama.tokenizer.bos_token_id, *prompt]]
    monkeypatch.setattr(llama, "tokenizer", SimpleNamespace(bos_token_id=None))
    with pytest.raises(
        ConfigError, match="^scrolls.bos is true, but the tokenizer has no beginning-of-text token"
    ):
        run(Scrolls, llama, bos=True, **data)
