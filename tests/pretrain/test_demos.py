"""The scripts of `make demo` and `make demo-smollm2`, with few steps, and a small model in place of the download."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_runs import write_lines
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.tasks.perplexity import NATS

REPOSITORY = Path(__file__).parents[2]


def run(script, folder):
    """Run a script for a few steps, with `folder` as the root of the repository."""
    for name in ("megatron_tape", "pretrain", "tools"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", f"pretrain/{script}", "4"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_demo_draws_its_picture_and_skips_finished_steps_when_repeated(tmp_path):
    shown, _ = run("demo.sh", tmp_path)
    demo = tmp_path / "runs" / "demo"
    losses = [float(found) for found in re.findall(r"^(?:tape|rope): .*loss (?:.*256 )?([\d.]+)", shown, re.M)]
    assert len(losses) == 6 and all(6 < loss < 8.4 for loss in losses)  # log(4096) is 8.3
    assert "tape+increments=signed: copies" in shown and "\ndef main(" in shown
    page = (demo / "report.html").read_text()
    assert all(name in page for name in ("tape-1024", "perplexity", "tape+increments=signed"))
    assert (demo / "demo.png").read_bytes().startswith(b"\x89PNG")
    stamps = {path: path.stat().st_mtime_ns for path in demo.rglob("*.safetensors")}
    stamps |= {path: path.stat().st_mtime_ns for path in (demo / "data").iterdir() if path.is_file()}
    _, said = run("demo.sh", tmp_path)
    assert said.count("is finished already") == said.count("nothing to do") == 4
    assert "all runs are finished already" in said
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def write_model(folder, texts):
    """Write a small Llama whose tokenizer has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(texts[:4], trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2])
    fast.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    config = LlamaConfig(vocab_size=len(fast), **sizes, **heads, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_the_smollm2_demo_compares_both_trained_methods(tmp_path):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size)
    texts = [path.read_text(encoding="utf-8") for path in files[-40:]]
    demo = tmp_path / "runs" / "demo_smollm2"
    write_model(demo / "SmolLM2-135M-Instruct", texts)
    (demo / "data").mkdir()
    write_lines(demo / "data" / "stdlib.jsonl", texts)
    run("demo_smollm2.sh", tmp_path)
    results = [read_results(demo / "results" / name) for name in ("SmolLM2-135M-Instruct", "tape", "lora")]
    scores = [result.tasks["perplexity"].scores for result in results]
    losses = [tuple(score.value for score in model if score.unit == NATS) for model in scores]
    assert [len(model) for model in losses] == [3, 3, 3] and len(set(losses)) == 3
    assert all(5 < loss < 10 for model in losses for loss in model)  # log(400) is 6
    assert "SmolLM2" in (demo / "report.html").read_text()
    for method, kind in (("tape", "TapeForCausalLM"), ("lora", "LlamaForCausalLM")):
        assert json.loads((demo / f"{method}-hf" / "config.json").read_text())["architectures"] == [kind]
