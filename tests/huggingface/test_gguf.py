"""Imports of GGUF files equal their source models, and unsupported files are refused."""

import json

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from conversions import change_config, convert, refused
from datasets_for_tests import write_tokenizer
from safetensors.torch import load_file
from test_import import IDS, training_logits, write_source
from transformers import AutoModelForCausalLM

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.huggingface.export.saved_weights import open_weights

TEXT = "Is it 1999? def main():\n\treturn  42.5 # don't, größer"

F32 = gguf.GGMLQuantizationType.F32


def permuted(weights, heads):
    """Reorder the rows of queries and keys as llama.cpp's converter does."""
    return weights.reshape(heads, 2, -1, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path, source, kind=F32, change=None, tokenizer=None, **more):
    """Write the model of transformers in `source` as llama.cpp's converter does.

    `change` may change the tensors, a dictionary by name; `more` are further settings of the
    architecture.
    """
    config = json.loads((source / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, groups, layers = (
        config[f"num_{x}"] for x in ("attention_heads", "key_value_heads", "hidden_layers")
    )
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("a model")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if (dim := config.get("head_dim")) is not None:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_rope_dimension_count(more.pop("rope__dimension_count", dim))
    for key, value in more.items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        weights = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weights = permuted(weights, heads if "q_proj" in name else groups)
        tensors[f"{names.get_name(base)}.{suffix}"] = weights
    if change is not None:
        change(tensors)
    for name, weights in tensors.items():
        if weights.ndim == 2 and weights.shape[-1] % 32 == 0:
            blocks = kind
        else:
            blocks = F32
        writer.add_tensor(name, gguf.quantize(weights, blocks), raw_dtype=blocks)
    if tokenizer is not None:
        tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def imported(tmp_path, model, *arguments):
    done = convert("from-hf", "--model", model, "--output", tmp_path / "imported", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", ["llama2_gqa", "qwen2", "qwen3"])
def test_imported_gguf_files_keep_the_logits(tmp_path, kind):
    expected = write_source(tmp_path / "source", kind)
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", vocab_size=90)
    messages = imported(tmp_path, tmp_path / "model.gguf", "--vocab-multiple", "64")
    assert "model.gguf contains F32 weights;" in messages
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)


def test_quantized_weights_equal_those_of_transformers(tmp_path):
    plain = write_source(tmp_path / "source", "llama2_gqa")
    (tmp_path / "folder").mkdir()
    write_gguf(
        tmp_path / "folder" / "model.gguf",
        tmp_path / "source",
        gguf.GGMLQuantizationType.Q8_0,
        vocab_size=90,
    )
    (tmp_path / "folder" / "README.md").write_text("---\nlicense: mit\n---\n")
    file = tmp_path / "folder" / "model.gguf"
    assert "contains F32, Q8_0 weights; the checkpoint stores them in fp32" in imported(
        tmp_path, file
    )
    reader = AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", gguf_file="model.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        expected = reader(IDS).logits
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(training_logits(tmp_path / "imported"), expected, atol=1e-5, rtol=0)
    progress = open_weights(tmp_path / "imported").state["progress"]
    assert progress["card"] == {"license": "mit"} and progress["origin"].endswith(
        "model.gguf (GGUF, F32, Q8_0)"
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_prepends_a_space_to_every_text_or_to_none(tmp_path, prefix):
    from sentencepiece import sentencepiece_model_pb2

    with open(tmp_path / "t.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT] * 9),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            minloglevel=2,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            add_dummy_prefix=prefix,
        )
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
    change_config(
        tmp_path / "source", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", tokenizer=add)
    imported(tmp_path, tmp_path / "model.gguf")
    found = load_tokenizer(tmp_path / "imported" / "tokenizer")
    expected = load_tokenizer(tmp_path / "t.model")
    for text in ("a b", " a", "  a  b", "\n    a\n"):
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == text


def test_a_tokenizer_that_transformers_would_change_is_replaced_by_the_file_next_to_it_or_omitted(
    tmp_path,
):
    write_source(tmp_path / "source")
    change_config(
        tmp_path / "source", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([f"t{index}" for index in range(90)])

    write_gguf(tmp_path / "model.gguf", tmp_path / "source", tokenizer=add)
    command = ["from-hf", "--model", tmp_path / "model.gguf", "--output"]
    done = convert(*command, tmp_path / "without")
    assert (
        done.returncode == 0
        and "a gpt2 tokenizer with the pre-tokenizer smollm; put" in done.stderr
    )
    assert not (tmp_path / "without" / "tokenizer").exists()
    write_tokenizer(tmp_path / "tokenizer.json")
    assert convert(*command, tmp_path / "with").returncode == 0
    assert (tmp_path / "with" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "change, settings, refusal",
    [
        (None, {"rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        (None, {"rope__dimension_count": 4}, "rope.dimension_count is 4"),
        (None, {"logit_scale": 2.0}, "llama.logit_scale is 2.0"),
        (
            lambda tensors: tensors.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            {},
            "transformers reads",
        ),
        (
            lambda tensors: tensors.pop("blk.2.ffn_up.weight"),
            {},
            "lacks the parameter model.layers.2.mlp.up_proj",
        ),
        (None, {"block_count": 10**9}, "tensors for 1000000000 layers"),
        (None, {"embedding_length": 64}, "cannot be read"),
    ],
)
def test_unsupported_gguf_settings_are_refused(tmp_path, change, settings, refusal):
    write_source(tmp_path / "source", "llama2_gqa")
    write_gguf(
        tmp_path / "model.gguf", tmp_path / "source", change=change, **{"vocab_size": 90} | settings
    )
    done = convert("from-hf", "--model", tmp_path / "model.gguf", "--output", tmp_path / "no")
    assert done.returncode == 2 and refusal in done.stderr.splitlines()[-1], done.stderr[:1000]
    assert not (tmp_path / "no").exists()


def test_incomplete_gguf_files_are_refused(tmp_path):
    write_source(tmp_path / "source", "llama2_gqa")
    good = tmp_path / "model.gguf"
    write_gguf(good, tmp_path / "source")
    content = good.read_bytes()
    command = ["from-hf", "--output", tmp_path / "no", "--model"]
    for damaged in (b"", content[:2000], content[:-3000], content[:24] + b"\xff" * 400):
        good.write_bytes(damaged)
        refused(tmp_path, "cannot be read", *command, good)
    good.write_bytes(content.replace(b"llama", b"mamba"))
    refused(tmp_path, "architecture 'mamba'", *command, good)
