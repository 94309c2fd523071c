"""from-hf of GGUF files: the same models as those they were made from, and nothing that would compute another one."""

import json
import shutil

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from conversions import change_config, convert, refused
from gguf_files import write_gguf
from test_import import IDS, training_logits, write_source
from transformers import AutoModelForCausalLM

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports import from_gguf

TEXT = "Is it 1999? def main():\n\treturn  42.5 # don't, größer"


def imported(tmp_path, model, *arguments):
    done = convert("from-hf", "--model", model, "--output", tmp_path / "imported", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", ["llama2_gqa", "mistral", "qwen2", "qwen3"])
def test_an_imported_file_keeps_the_logits_of_its_model(tmp_path, kind):
    expected = write_source(tmp_path / "source", kind)
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", vocab_size=90)
    messages = imported(tmp_path, tmp_path / "model.gguf", "--vocab-multiple", "64")
    assert "model.gguf holds F32;" in messages
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)


def test_quantized_weights_are_what_transformers_reads_of_them(tmp_path):
    plain = write_source(tmp_path / "source", "llama2_gqa")
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "model.gguf", tmp_path / "source", gguf.GGMLQuantizationType.Q8_0, vocab_size=90)
    (tmp_path / "folder" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "holds F32, Q8_0; the checkpoint gets the fp32" in imported(tmp_path, tmp_path / "folder")
    reader = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", gguf_file="model.gguf", dtype=torch.float32)
    with torch.no_grad():
        expected = reader(IDS).logits
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)
    progress = open_weights(tmp_path / "imported").state["progress"]
    assert progress["card"] == {"license": "mit"} and progress["origin"].endswith("folder (GGUF, F32, Q8_0)")


def byte_level(tmp_path, split):
    """A tokenizer that splits text as Qwen2's does, as a function that adds it to a GGUF file, and its ids of TEXT."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_eos_token_id(0)

    return add, tokenizer.encode(TEXT).ids, len(tokens)


def test_the_tokenizer_comes_along_and_gives_the_same_ids(tmp_path):
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    add, ids, size = byte_level(tmp_path, GGUF_PRE_TOKENIZER_SPLITS["qwen2"])
    write_source(tmp_path / "source", "qwen2", vocab_size=size)
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", tokenizer=add)
    imported(tmp_path, tmp_path / "model.gguf")
    export(tmp_path / "imported", tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert tokenizer(TEXT)["input_ids"] == ids and tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_has_a_prefix_before_every_text_or_none(tmp_path, prefix):
    from sentencepiece import sentencepiece_model_pb2

    with open(tmp_path / "t.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT] * 9), model_writer=file, vocab_size=300, model_type="bpe", minloglevel=2,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            hard_vocab_limit=False, add_dummy_prefix=prefix,
        )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((tmp_path / "t.model").read_bytes())

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece.piece for piece in model.pieces])
        writer.add_token_scores([piece.score for piece in model.pieces])
        writer.add_token_types([piece.type for piece in model.pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    write_source(tmp_path / "source", vocab_size=len(model.pieces))
    change_config(tmp_path / "source", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", tokenizer=add)
    imported(tmp_path, tmp_path / "model.gguf")
    found, expected = load_tokenizer(tmp_path / "imported" / "tokenizer"), load_tokenizer(tmp_path / "t.model")
    for text in ("a b", " a", "  a  b", "\n    a\n"):
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == text


def test_a_tokenizer_that_transformers_would_change_is_left_out_or_taken_from_beside(tmp_path):
    from datasets_for_tests import write_tokenizer

    write_source(tmp_path / "source")
    change_config(tmp_path / "source", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([f"t{index}" for index in range(90)])

    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "model.gguf"
    write_gguf(path, tmp_path / "source", tokenizer=add)
    messages = imported(tmp_path, path)
    assert (
        "of the kind gpt2, smollm, which transformers cannot convert" in messages
        and "imported has no tokenizer" in messages
    )
    assert not (tmp_path / "imported" / "tokenizer").exists()
    shutil.rmtree(tmp_path / "imported")
    write_tokenizer(tmp_path / "folder" / "tokenizer.json")
    imported(tmp_path, tmp_path / "folder")
    assert (tmp_path / "imported" / "tokenizer" / "tokenizer.json").is_file()


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(name, shape):
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    "change, settings, refusal",
    [
        (None, {"rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        (None, {"rope__dimension_count": 4}, "rope.dimension_count is 4"),
        (None, {"attention__sliding_window": 16}, "attention.sliding_window is 16"),
        (None, {"expert_count": 8}, "expert_count is 8"),
        (None, {"logit_scale": 2.0}, "llama.logit_scale is 2.0"),
        (None, {"scale" * 10**4: "x" * 10**5}, "llama.scalescale"),
        (None, {"rope__scaling__type": "x" * 10**5}, "rope.scaling.type is 'xxx"),
        (None, {"rope__scaling__factor": 4.0}, "rope.scaling.factor is 4.0"),
        (add("rope_freqs.weight", 4), {}, "has (4,) as rope_freqs.weight"),
        (add("blk.0.attn_q.bias", 32), {}, "blk.0.attn_q.bias"),
        (add("blk.1.ffn_gate_exps.weight", (2, 48, 32)), {}, "ffn_gate_exps"),
        (drop("blk.2.ffn_up.weight"), {}, "has no tensor as blk.2.ffn_up.weight"),
        (drop("token_embd.weight"), {}, "has no tensor as token_embd.weight"),
        (add("blk.0.attn_norm.weight", 31), {}, "has (31,) as blk.0.attn_norm.weight"),
        (None, {"block_count": 10**9}, "tensors for 1000000000 layers"),
        (None, {"embedding_length": 10**9}, "where a model with its settings has"),
    ],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused_by_name(tmp_path, change, settings, refusal):
    write_source(tmp_path / "source", "llama2_gqa")
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", change=change, **{"vocab_size": 90} | settings)
    done = convert("from-hf", "--model", tmp_path / "model.gguf", "--output", tmp_path / "no")
    assert done.returncode == 2 and refusal in done.stderr.splitlines()[-1], done.stderr[:1000]
    assert len(done.stderr) < 1000
    assert not (tmp_path / "no").exists()


def test_files_that_are_not_one_whole_model_are_refused(tmp_path, monkeypatch):
    write_source(tmp_path / "source", "llama2_gqa")
    good = tmp_path / "model.gguf"
    write_gguf(good, tmp_path / "source")
    content = good.read_bytes()
    command = ["from-hf", "--output", tmp_path / "no", "--model"]
    for damaged in (b"", content[:2000], content[:-3000], b"GGUF" + bytes(200), content[:24] + b"\xff" * 400):
        good.write_bytes(damaged)
        refused(tmp_path, "cannot be read", *command, good)
    good.write_bytes(content.replace(b"llama", b"mamba"))
    refused(tmp_path, "architecture 'mamba'", *command, good)
    good.write_bytes(content)
    shutil.copy(good, tmp_path / "other.gguf")
    refused(tmp_path, "several GGUF files", *command, tmp_path)
    refused(tmp_path, "neither a directory nor a GGUF file", *command, tmp_path / "model.bin")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(tmp_path, "needs the package gguf", *command, good)


def test_a_directory_with_safetensors_is_read_as_before(tmp_path):
    write_source(tmp_path / "source")
    (tmp_path / "source" / "model.gguf").write_bytes(b"not read")
    assert from_gguf.find_gguf(tmp_path / "source") is None
    assert "GGUF" not in imported(tmp_path, tmp_path / "source")
