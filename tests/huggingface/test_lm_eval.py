"""lm-evaluation-harness: what its command says about an exported model is what the model's logits say."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml


@pytest.fixture
def rows(source_text):
    """Pieces of source code, each with four pieces of which one follows it."""
    pieces = [piece.strip() for piece in re.findall(r"(?s).{120}", source_text)][:20]
    following = [pieces[i + 1 : i + 5] for i in range(len(pieces) - 4)]
    return [
        {"text": piece, "choices": choices[i % 4 :] + choices[: i % 4], "answer": -i % 4}
        for i, (piece, choices) in enumerate(zip(pieces, following))
    ]


def write_tasks(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    common = {**data, "test_split": "test", "metadata": {"version": 0}}
    tasks = {
        "next_piece": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
        "pieces": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))


def log_likelihood(model, context, continuation):
    """Of the ids `continuation` after the ids `context`, in nats."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = model(ids[:, :-1]).logits.double().log_softmax(-1).gather(-1, ids[:, 1:, None])
    return scores[0, len(context) - 1 :].sum().item()


def test_the_command_scores_a_tape_export_as_its_logits_do(exports, rows, tmp_path):
    from transformers import AutoTokenizer

    directory, model = exports["tape"].directory, exports["tape"].model
    write_tasks(tmp_path, rows)
    command = [Path(sys.executable).parent / "lm_eval", "--model", "hf", "--tasks", "next_piece,pieces"]
    command += ["--model_args", f"pretrained={directory},trust_remote_code=True", "--include_path", tmp_path]
    command += ["--device", "cpu", "--batch_size", "3", "--output_path", tmp_path / "results"]
    # Not this process's environment, in which other tests set the variables of torch.distributed.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # threads only slow down models this small
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(results.read_text())["results"]

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    nats, words, right = 0.0, 0, 0
    for row in rows:
        ids = tokenizer(row["text"]).input_ids
        assert len(ids) < model.config.max_position_embeddings
        nats -= log_likelihood(model, [tokenizer.bos_token_id], ids)
        words += len(re.split(r"\s+", row["text"]))
        continued = [tokenizer(f"{row['text']} {choice}").input_ids[len(ids) :] for choice in row["choices"]]
        scores = [log_likelihood(model, ids, choice) for choice in continued]
        right += scores.index(max(scores)) == row["answer"]
    assert 0 < right < len(rows)
    assert results["next_piece"]["acc,none"] == pytest.approx(right / len(rows))
    assert results["pieces"]["word_perplexity,none"] == pytest.approx(math.exp(nats / words), rel=1e-4)
