"""`make demo-smollm2` with a tiny stand-in for its model: nothing is downloaded."""

import difflib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_runs import write_lines
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tape.data.indexed_dataset import IndexedDatasetWriter
from megatron_tape.io.strict_yaml import read_recipe
from pretrain import demo_smollm2
from pretrain.evaluate import read_command
from pretrain.held_out import averaged, held_out_windows, loss_by_position

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def texts():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size)
    return [path.read_text(encoding="utf-8") for path in files[-40:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(texts[:4], trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    config = LlamaConfig(vocab_size=len(fast), **sizes, **heads, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def demo(*arguments):
    command = [sys.executable, "-m", "pretrain.demo_smollm2", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_demo_compares_what_both_methods_trained(tmp_path, model, texts):
    write_lines(tmp_path / "text.jsonl", texts)
    arguments = ["--directory", tmp_path / "demo", "--model", model, "--corpus", tmp_path / "text.jsonl"]
    arguments += ["--steps", 2, "--processes", 1, "--sequences", 2, "--ruler-samples", 0]
    first = demo(*arguments)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "demo" / "results").iterdir()}
    assert set(results) == {"before-2", "tape-2-2", "lora-2-2"}
    losses = {name: np.array(result["loss"]) for name, result in results.items()}
    assert all(len(loss) == 1024 and 5 < loss.mean() < 10 for loss in losses.values())  # log(400) is 6
    assert abs(losses["tape-2-2"] - losses["before-2"]).max() > 1e-4
    assert abs(losses["lora-2-2"] - losses["before-2"]).max() > 1e-4
    summary = (tmp_path / "demo" / "summary.md").read_text()
    for name, steps, loss in (("nothing", 0, "before-2"), ("TAPE's", 2, "tape-2-2"), ("LoRA", 2, "lora-2-2")):
        (row,) = [line for line in summary.splitlines() if line.startswith(f"| {name}")]
        assert f"| {steps} | {losses[loss].mean():.4f} |" in row
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")
    for method, kind in (("tape", "TapeForCausalLM"), ("lora", "LlamaForCausalLM")):
        settings = json.loads((tmp_path / "demo" / f"{method}-2-hf" / "config.json").read_text())
        assert settings["architectures"] == [kind]

    again = demo(*arguments)
    assert again.returncode == 0 and again.stdout.count("exists already") == 7
    assert (tmp_path / "demo" / "summary.md").read_text() == summary


def test_the_commands_that_evaluate_are_those_of_pretrain_evaluate():
    arguments = demo_smollm2.parser().parse_args(["--ruler-samples", "3", "--directory", "demo"])
    *models, (_, page) = demo_smollm2.evaluation(arguments, Path("smollm2"))
    read = [read_command(command[command.index("pretrain.evaluate") + 1 :]) for _, command in models]
    assert [options.model for options, _ in read] == ["smollm2", "demo/tape", "demo/lora"]
    for options, (task,) in read:
        assert (task.name, task.settings.lengths, task.settings.samples) == ("ruler", [1024, 2048], 3)
        assert options.output in page
    assert page[page.index("--output") + 1] == "demo/report.html"


def test_the_recipes_differ_only_in_the_method_and_agree_with_the_demo():
    paths = [REPOSITORY / demo_smollm2.RECIPES / f"{name}.yaml" for name in demo_smollm2.METHODS.values()]
    lines = [path.read_text().splitlines()[3:] for path in paths]
    changed = [line for line in difflib.ndiff(*lines) if line[:2] in ("- ", "+ ")]
    assert changed == [
        "-   position_encoding: tape",
        "+   position_encoding: rope",
        "-   trains: [tape]",
        "+   trains: [lora]",
    ]
    given = {item.key: item.value for item in read_recipe(str(paths[0]))}
    assert (given["data.split"], given["model.seq_length"]) == (demo_smollm2.SPLIT, demo_smollm2.SEQ_LENGTH)


def test_text_is_held_out_by_document(tmp_path):
    lengths = [9, 20, 5, 30, 12, 40, 11, 3, 50, 60]
    with IndexedDatasetWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        writer.add(np.repeat(np.arange(10, dtype="<u2"), lengths).tobytes(), np.array(lengths))
        writer.finish()
    windows = held_out_windows(tmp_path / "data", "50,50,0", 10, 99)
    assert windows.shape == (4, 11) and windows[:, 0].tolist() == [5, 6, 8, 9]
    assert held_out_windows(tmp_path / "data", "50,40,10", 10, 2)[:, 5].tolist() == [5, 8]
    with pytest.raises(ValueError, match="of the 5 documents .* none has more than 99 tokens; use more text"):
        held_out_windows(tmp_path / "data", "50,50,0", 99, 4)


def test_the_loss_by_position_is_the_models(model):
    loaded = LlamaForCausalLM.from_pretrained(model)
    windows = np.random.RandomState(0).randint(0, 400, (3, 33))
    loss = loss_by_position(loaded, windows)
    assert loss.shape == (3, 32)
    ids = torch.from_numpy(windows)
    assert loss.mean() == pytest.approx(loaded(ids, labels=ids).loss.item(), rel=1e-5)
    assert not np.allclose(loss[0], loss[1])


def test_positions_are_averaged_in_equal_parts():
    centres, means = averaged(np.arange(8.0), 4)
    assert centres.tolist() == means.tolist() == [0.5, 2.5, 4.5, 6.5]
