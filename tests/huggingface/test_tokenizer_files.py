"""The tokenizer of an export gives the ids that the model was trained with."""

import io
import json

import pytest
from datasets_for_tests import source_code

from megatron_tape.data.tokenizer import find_files, load_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.huggingface.tokenizer_files import _QWENS_SPLIT as QWENS
from megatron_tape.huggingface.tokenizer_files import is_qwens, read_tokenizer, write_tokenizer


@pytest.mark.parametrize(
    "options",
    [
        dict(model_type="unigram", normalization_rule_name="identity", remove_extra_whitespaces=False),
        dict(model_type="unigram", normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
        dict(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False),
        dict(
            model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, user_defined_symbols=["<sep>"],
        ),
    ],
    ids=["unigram", "unigram-with-rules", "bpe", "user-defined"],
)  # fmt: skip
def test_sentencepiece_models_of_other_settings_convert_exactly(tmp_path, options):
    import sentencepiece

    sentences, model = source_code("argparse").splitlines() + source_code("ast").splitlines(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=700, minloglevel=2, byte_fallback=True,
        **options,
    )  # fmt: skip
    (tmp_path / "t.model").write_bytes(model.getvalue())
    (tmp_path / "out").mkdir()
    write_tokenizer(load_tokenizer(tmp_path / "t.model"), tmp_path / "out", 128, "t.model")
    ours, theirs = load_tokenizer(tmp_path / "t.model"), load_tokenizer(tmp_path / "out" / "tokenizer.json")
    text = source_code("ast").replace("=" * 9, "")  # a unigram model has several ways to divide a line
    for piece in (text, "a<sep>b  <s> c"):
        assert theirs.encode(piece) == ours.encode(piece)
        assert theirs.decode(ours.encode(piece)) == ours.decode(ours.encode(piece))
    assert (theirs.vocab_size, theirs.eod, theirs.bos) == (ours.vocab_size, ours.eod, ours.bos)


END = "<|endoftext|>"
TEXT = "List:\n\n1.  x =   25"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_tokenizer_takes_the_steps_of_its_file_whatever_class_and_model_are_named(tmp_path, kind):
    """transformers makes a tokenizer without the first of these steps for GPT2Tokenizer, and Qwen's for every Qwen2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 9], trainer)
    source, output = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    output.mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<|endoftext|>", "model_max_length": 7}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert write_tokenizer(load_tokenizer(source), output, 128, "source").special_ids == {
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps({"model_type": kind}))
    found = read_tokenizer(output)
    assert found(TEXT)["input_ids"] == load_tokenizer(source).encode(TEXT) == tokenizer.encode(TEXT).ids
    assert (found.eos_token, found.pad_token, found.model_max_length) == ("<|endoftext|>", "<|endoftext|>", 7)
    automatic = AutoTokenizer.from_pretrained(output)(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids
    assert automatic == (kind == "llama") and not is_qwens(output)


@pytest.mark.parametrize("split, special, same", [(QWENS, END, True), (QWENS, "<s>", False), (r"\p{N}", END, False)])
def test_qwens_tokenizers_are_known(tmp_path, split, special, same):
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=[special], show_progress=False)
    tokenizer.train_from_iterator([TEXT * 9], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    automatic = AutoTokenizer.from_pretrained(tmp_path)
    unchanged = automatic(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids and len(automatic) == len(
        tokenizer.get_vocab()
    )
    assert is_qwens(tmp_path) == unchanged == same
    read_tokenizer(tmp_path).save_pretrained(tmp_path)  # under another name of the class
    assert read_tokenizer(tmp_path)(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids


def test_links_lead_out_of_a_directory_only_in_the_hubs_cache(tmp_path):
    blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/1"))
    for directory in (blobs, snapshot, tmp_path / "model"):
        directory.mkdir(parents=True)
    (blobs / "0").touch()
    (tmp_path / "secret").touch()
    (snapshot / "chat_template.jinja").symlink_to(blobs / "0")
    assert find_files(snapshot) == ["chat_template.jinja"]
    (tmp_path / "model" / "tokenizer.json").symlink_to("chat_template.jinja")
    (tmp_path / "model" / "chat_template.jinja").touch()
    assert find_files(tmp_path / "model") == ["tokenizer.json", "chat_template.jinja"]
    (tmp_path / "model" / "chat_template.jinja").unlink()
    for directory in (tmp_path / "model", snapshot):
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        (directory / "chat_template.jinja").symlink_to(tmp_path / "secret")
        with pytest.raises(FileError, match="is a link to a file elsewhere"):
            find_files(directory)
