"""`make demo-smollm2` with a tiny stand-in for its model: nothing is downloaded."""

import difflib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_runs import write_lines
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.tasks.perplexity import NATS
from megatron_tape.io.strict_yaml import read_recipe
from pretrain import demo_smollm2
from pretrain.evaluate import read_command

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
    arguments += ["--steps", 2, "--processes", 1, "--documents", 2, "--ruler-samples", 0]
    first = demo(*arguments)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    results = [read_results(tmp_path / "demo" / "results" / name) for name in ("before", "tape-2", "lora-2")]
    scores = [result.tasks["perplexity"].scores for result in results]
    losses = [[score.value for score in model if score.unit == NATS] for model in scores]
    assert [len(model) for model in losses] == [3, 3, 3]
    assert all(5 < loss < 10 for model in losses for loss in model)  # log(400) is 6
    assert len({tuple(model) for model in losses}) == 3
    assert "before" in (tmp_path / "demo" / "report.html").read_text()
    for method, kind in (("tape", "TapeForCausalLM"), ("lora", "LlamaForCausalLM")):
        settings = json.loads((tmp_path / "demo" / f"{method}-2-hf" / "config.json").read_text())
        assert settings["architectures"] == [kind]

    again = demo(*arguments)
    assert again.returncode == 0 and again.stdout.count("exists already") == 7


def test_ruler_may_have_no_samples_but_not_fewer():
    assert demo_smollm2.parser().parse_args(["--ruler-samples", "0"]).ruler_samples == 0
    for samples in ("-1", "\N{ARABIC-INDIC DIGIT THREE}"):
        with pytest.raises(ConfigError, match="--ruler-samples"):
            demo_smollm2.parser().parse_args([f"--ruler-samples={samples}"])


def test_the_commands_that_evaluate_are_those_of_pretrain_evaluate():
    arguments = demo_smollm2.parser().parse_args(["--ruler-samples", "3", "--directory", "demo"])
    stages = [stage.command for stage in demo_smollm2.evaluation(arguments, Path("smollm2"))]
    evaluations = [command for command in stages if "pretrain.evaluate" in command]
    read = [read_command(command[command.index("pretrain.evaluate") + 1 :]) for command in evaluations]
    assert [options.model for options, _ in read] == ["smollm2", "demo/tape", "demo/lora"]
    for options, (perplexity, ruler) in read:
        assert (perplexity.settings.data, perplexity.settings.documents) == ("demo/data/stdlib", 16)
        assert (ruler.settings.lengths, ruler.settings.samples) == ([1024, 2048], 3)
        assert options.output in stages[-1]
    assert stages[-1][stages[-1].index("--output") + 1] == "demo/report.html"


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
    evaluated = {item.key: item.value for item in read_recipe(str(REPOSITORY / demo_smollm2.EVALUATION))}
    assert given["data.split"] == evaluated["perplexity.split"]
    assert given["model.seq_length"] == evaluated["ruler.trained_length"] == max(evaluated["perplexity.lengths"])
