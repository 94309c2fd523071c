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


@pytest.mark.parametrize(
    "metric, values, combined",
    [
        ("rouge", [72.2222, 33.3333, 72.2222], 55.8136),
        ("exact_match", [33.3333], 33.3333),
        ("f1", [72.2222], 72.2222),
    ],
)
def test_scores_are_those_that_the_official_evaluator_documents(metric, values, combined):
    pairs = {
        "exact match example": ["exact match example"],
        "hello there": ["hello", "hi there"],
        "general kenobi": ["commander kenobi"],
    }
    means = np.mean(
        [scrolls.score(metric, *pair) for pair in pairs.items()],
        axis=0,
    )
    assert means == pytest.approx(values, abs=1e-4)
    assert scrolls.combine(means) == pytest.approx(combined, abs=1e-4)


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
            [
                100,
                200 * (1 / 5 * 1 / 2) / (1 / 5 + 1 / 2),
                400 / 9,
            ],
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The seven datasets, one of them as a zip; each input holds its answer after `is`."""
    folder = tmp_path_factory.mktemp("scrolls")
    files = {}
    for name, metric in METRICS.items():
        lines = []
        for number in range(6):
            answer = f"{name} says number {number} today"
            if name == "contract_nli":
                answer = CHOICES[number % 3]
            line = {"id": str(number), "pid": str(number), "input": f"Q\n\nIt is {answer}"}
            if metric == "f1":
                lines.append({**line, "output": "another"})
            lines.append({**line, "output": answer})
        files[name] = str(folder / f"{name}.jsonl")
        Path(files[name]).write_text("\n".join(map(json.dumps, lines)))
    with zipfile.ZipFile(folder / "qasper.zip", "w") as archive:
        archive.write(files["qasper"], "qasper/validation.jsonl")
    return {**files, "qasper": str(folder / "qasper.zip")}


def reads_it_off(prompt):
    return prompt.removesuffix("\n\nAnswer:").partition("It is ")[2]


def test_a_model_that_knows_the_answers_scores_100(data):
    result = run(Scrolls, Knowing(reads_it_off), data=data)
    for name, metric in METRICS.items():
        of_name = score(result, scrolls.SHOWN[metric], group=name)
        assert (of_name.value, of_name.low, of_name.high) == pytest.approx((100, 100, 100))
        assert (of_name.count, of_name.length, of_name.unit) == (6, 400, "%")
        assert score(result, "target_loss", group=name).value == 2.0
    assert score(result, "scrolls_score").value == pytest.approx(100)
    assert result.notes == []
    assert result.examples["qasper/0"]["answer"] == "qasper says number 0 today"


def test_a_failure_in_one_dataset_changes_no_other_score(data):
    fails = Knowing(lambda prompt: "wrong" if "qmsum" in prompt else reads_it_off(prompt))
    result = run(Scrolls, fails, data=data, loss=False)
    values = {one.group: one.value for one in result.scores}
    assert values.pop("") == pytest.approx(600 / 7)
    assert values.pop("qmsum") == 0
    assert list(values.values()) == pytest.approx([100] * 6)


def test_a_subset_has_no_scrolls_score(data):
    some = {name: data[name] for name in ("contract_nli", "qasper")}
    result = run(
        Scrolls,
        Knowing(lambda _: "entailment."),
        data=some,
        loss=False,
        examples=3,
    )
    assert [one.metric for one in result.scores] == ["exact_match", "f1"]
    assert score(result, "exact_match").value == pytest.approx(100 / 3)


def own_dataset(folder, *examples):
    """Settings for a dataset of pairs of an input and its target."""
    lines = [json.dumps({"input": text, "target": target}) + "\n" for text, target in examples]
    (folder / "own.jsonl").write_text("".join(lines))
    return {"data": {"own": str(folder / "own.jsonl")}, "metrics": {"own": "f1"}}


def test_truncated_inputs_and_unfinished_answers_are_counted(tmp_path):
    settings = own_dataset(tmp_path, ("short", "yes"), ("x" * 60, "a much longer answer"))
    model = Knowing(lambda prompt: "yes" if "short" in prompt else "y" * 50)
    result = run(Scrolls, model, length=40, target_tokens=8, **settings)
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


@torch.inference_mode()
def test_generation_is_greedy_and_the_loss_is_that_of_the_target_alone(llama, tmp_path):
    settings = own_dataset(tmp_path, ("Who was it?", "Ann"))
    value = run(Scrolls, llama, target_tokens=12, **settings).examples["own/0"]
    prompt = llama.encode("Who was it?\n\nAnswer:")
    answer = []
    end = llama.tokenizer.eos_token_id
    while len(answer) < 12 and end not in answer:
        logits = llama.model(torch.tensor([[*prompt, *answer]])).logits
        answer.append(int(logits[0, -1].argmax()))
    assert value["answer"] == llama.tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert value["ended"] == (end in answer)

    target = llama.encode(" Ann")
    labels = torch.tensor([[-100] * len(prompt) + target])
    loss = llama.model(torch.tensor([[*prompt, *target]]), labels=labels).loss.item()
    assert value["tokens"] == len(target)
    assert value["nats"] == pytest.approx(loss * len(target), rel=1e-5)


def test_prompts_begin_with_bos_as_in_training(llama, tmp_path, monkeypatch):
    settings = {**own_dataset(tmp_path, ("Who was it?", "Ann")), "generate": False}
    prompts = []
    losses = lambda tokens, first: prompts.append(list(tokens[:first])) or np.ones(4)  # noqa: E731
    monkeypatch.setattr(llama, "losses", losses)
    for bos in (None, False, True):
        run(Scrolls, llama, bos=bos, **settings)
    prompt = llama.encode("Who was it?\n\nAnswer:")
    assert prompts == [prompt, prompt, [llama.tokenizer.bos_token_id, *prompt]]
    monkeypatch.setattr(llama, "tokenizer", SimpleNamespace(bos_token_id=None))
    with pytest.raises(ConfigError) as error:
        run(Scrolls, llama, bos=True, **settings)
    assert error.value.key == "scrolls.bos"
