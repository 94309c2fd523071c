"""The tokenizer of an export gives the same ids as in training."""

import io
import json
import sys

import pytest
from data.test_tokenizer import FAMILIES, MENTIONS
from datasets_for_tests import source_code

from megatron_tape.data.tokenizer import difference, find_files, load_tokenizer, tokenizer_record
from megatron_tape.errors import FileError
from megatron_tape.huggingface.tokenizer_files import (
    export_problem,
    read_tokenizer,
    write_tokenizer,
)

NO_RULES = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)


def sentencepiece_model(sentences=(), **options):
    """Train on these sentences, or on source code, and return the bytes of the model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences or source_code("argparse").splitlines()),
        model_writer=model,
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=2,
        byte_fallback=True,
        **options,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        dict(model_type="bpe", **NO_RULES),
        dict(model_type="unigram", **NO_RULES),
        dict(model_type="bpe", add_dummy_prefix=False, **NO_RULES),
        dict(model_type="bpe"),
        dict(model_type="unigram"),  # SentencePiece's defaults, with rules for normalization
    ],
    ids=str,
)
def test_sentencepiece_models_convert_to_the_same_ids(tmp_path, options):
    (tmp_path / "t.model").write_bytes(sentencepiece_model(**options))
    exported(tmp_path / "t.model", tmp_path / "out")
    ours = load_tokenizer(tmp_path / "t.model")
    theirs = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    code = source_code("ast").replace(
        "=" * 9, ""
    )  # a unigram model has several ways to split a line of them
    for text in (
        code,
        "<s> c",
        "a <0x41>",
        "a\n\n b\n",
        "▁ ▁",
        "größer カガ 한글 ﾊﾟ ﬁ² \u200b\x01 👩\u200d👧",
    ):
        assert theirs.encode(text) == ours.encode(text), ascii(text)
    assert theirs.decode(ours.encode(code)) == ours.decode(ours.encode(code))
    assert (theirs.vocab_size, theirs.eod, theirs.bos) == (ours.vocab_size, ours.eod, ours.bos)
    assert theirs.equal_model_digest == ours.digest


@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ m.content }}{% endfor %}"])
@pytest.mark.parametrize(
    "options",
    [
        dict(model_type="bpe", **NO_RULES),
        dict(model_type="unigram", **NO_RULES),
        dict(model_type="unigram"),
    ],
    ids=str,
)
def test_an_export_whose_tokenizer_transformers_saved_again_is_the_same(
    tmp_path, options, template
):
    """save_pretrained, which transformers' and trl's trainers call, drops the SentencePiece
    model.
    """
    source = tmp_path / "source"
    again = tmp_path / "again"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    if template:
        (source / "chat_template.jinja").write_text(template)
    exported(source, tmp_path / "out")
    read_tokenizer(tmp_path / "out").save_pretrained(again)
    assert not (again / "tokenizer.model").exists()
    record = tokenizer_record(load_tokenizer(again))
    for original in (source, tmp_path / "out"):
        assert difference(record, tokenizer_record(load_tokenizer(original)), "") is None


def test_a_conversion_with_different_ids_is_refused_with_the_text(tmp_path):
    symbols = dict(model_type="bpe", user_defined_symbols=["<sep>"])
    (tmp_path / "t.model").write_bytes(sentencepiece_model(**symbols, **NO_RULES))
    problem = export_problem(load_tokenizer(tmp_path / "t.model"), 128)
    assert "would give different ids for the text '" in problem
    with pytest.raises(FileError, match="--tokenizer none"):
        exported(tmp_path / "t.model", tmp_path / "out")


def test_a_conversion_without_transformers_names_the_package_to_install(
    tmp_path, tokenizer_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers.convert_slow_tokenizer", None)
    with pytest.raises(FileError, match="pip install transformers"):
        exported(tokenizer_path, tmp_path / "out")


END = "<|endoftext|>"
TEXT = "List:\n\n1.  x =   25"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_tokenizer_follows_its_file_regardless_of_the_named_class(tmp_path, kind):
    """transformers would drop the first of these steps for GPT2Tokenizer, and use Qwen's tokenizer
    for Qwen2.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    output = tmp_path / "out"
    output.mkdir()
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    tokenizer = save_bpe(source, END, pre_tokenizer=digits)
    settings = {"tokenizer_class": "GPT2Tokenizer", "pad_token": END, "model_max_length": 7}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert write_tokenizer(load_tokenizer(source), output, 128, "source").special_ids == {
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    (output / "config.json").write_text(json.dumps({"model_type": kind}))
    found = read_tokenizer(output)
    assert (
        found(TEXT)["input_ids"]
        == load_tokenizer(source).encode(TEXT)
        == tokenizer.encode(TEXT).ids
    )
    assert (found.eos_token, found.pad_token, found.model_max_length) == (END, END, 7)
    automatic = (
        AutoTokenizer.from_pretrained(output)(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids
    )
    assert automatic == (kind == "llama")


def test_links_out_of_a_directory_are_allowed_only_in_the_hubs_cache(tmp_path):
    blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/1"))
    for directory in (blobs, snapshot):
        directory.mkdir(parents=True)
    (blobs / "0").touch()
    (tmp_path / "secret").touch()
    link = snapshot / "chat_template.jinja"
    link.symlink_to(blobs / "0")
    assert find_files(snapshot) == ["chat_template.jinja"]
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(FileError, match="is a link to a file elsewhere"):
        find_files(snapshot)


def exported(source, output, context=128):
    output.mkdir()
    return write_tokenizer(load_tokenizer(source), output, context, str(source))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_tokenizer_gives_the_ids_of_training(family, tmp_path, texts):
    """Also for text that mentions special tokens which the vocabulary of text contains."""
    source = tmp_path / "source"
    source.mkdir()
    FAMILIES[family].save(str(source / "tokenizer.json"))
    exported(source, tmp_path / "out")
    ours = load_tokenizer(source)
    theirs = read_tokenizer(tmp_path / "out")
    for text in [*MENTIONS, *texts[:20]]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    again = load_tokenizer(tmp_path / "out")
    assert (again.digest, again.eod, again.bos) == (ours.digest, ours.eod, ours.bos)


def test_special_tokens_in_text_are_matched_only_with_a_chat_template(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    control = ["<|im_start|>", "<|im_end|>"]
    (source / "tokenizer.model").write_bytes(
        sentencepiece_model(model_type="bpe", control_symbols=control, **NO_RULES)
    )
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    (source / "tokenizer_config.json").write_text(
        '{"eos_token": "<|im_end|>", "add_bos_token": true}'
    )
    found = exported(source, tmp_path / "out")
    assert (found.special_ids["eos_token_id"], found.special_ids["bos_token_id"]) == (4, 1)
    ours = load_tokenizer(source)
    theirs = read_tokenizer(tmp_path / "out")
    ids = theirs.apply_chat_template([{"content": "hello"}], tokenize=True, return_dict=False)
    assert ids == [3, *ours.encode("hello"), 4]
    assert theirs("a b")["input_ids"] == [1, *ours.encode("a b")]
    assert load_tokenizer(tmp_path / "out").prefix_ids == [1]
    text = "a<|im_end|>b <s> c"
    assert theirs(text, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ] == ours.encode(text)
    assert (
        difference(tokenizer_record(load_tokenizer(tmp_path / "out")), tokenizer_record(ours), "")
        is None
    )


def save_bpe(directory, *special, pre_tokenizer=None):
    """Save a BPE tokenizer of bytes with these special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 9], trainer)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


FLAGS = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)


def write_source(source, kind, tokenizer_path):
    """Write a tokenizer.json or a tokenizer.model to the directory `source`."""
    if kind == "json":
        save_bpe(source, END, "<|im_end|>")
    else:
        source.mkdir()
        (source / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())


@pytest.mark.parametrize(
    "kind, eos, other", [("json", END, "<|im_end|>"), ("model", "</s>", "<s>")]
)
def test_an_export_omits_tokens_that_the_tokenizer_lacks(
    tmp_path, tokenizer_path, kind, eos, other, capsys
):
    """transformers would add ids beyond the model's rows for tokens named in files next to
    tokenizer.json.
    """
    source = tmp_path / "source"
    write_source(source, kind, tokenizer_path)
    if kind == "json":
        (source / "added_tokens.json").write_text(json.dumps({"import": 999}))
    settings = {
        "eos_token": {"content": eos, **FLAGS},
        "pad_token": "[PAD]",
        "padding_side": "left",
        "model_max_length": 9,
        "additional_special_tokens": [other, "<|x|>"],
        "chat_template": "{{ messages[0].content }}",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    named = {"cls_token": "[CLS]", "sep_token": other}
    (source / "special_tokens_map.json").write_text(json.dumps(named))
    found = exported(source, tmp_path / "out")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(token in said for token in ("'[PAD]'", "'[CLS]'", "'<|x|>'"))
    ours = load_tokenizer(source)
    theirs = read_tokenizer(tmp_path / "out")
    text = f"import [PAD] [CLS] <|x|> {other}"
    ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == ours.encode(text)
    assert len(theirs) == ours.vocab_size == found.vocab_size
    assert (theirs.eos_token, theirs.sep_token, theirs.cls_token) == (eos, other, None)
    assert (theirs.padding_side, theirs.model_max_length) == ("left", 9)
    assert found.special_ids["eos_token_id"] == theirs.eos_token_id == ours.eod
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names <= {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}


@pytest.mark.parametrize("kind", ["json", "model"])
@pytest.mark.parametrize("template", ["", "{{ messages[0].content }}"])
@pytest.mark.parametrize("split", [True, False])
def test_switches_are_kept_and_not_taken_for_tokens(
    tmp_path, tokenizer_path, capsys, kind, template, split
):
    source = tmp_path / "source"
    write_source(source, kind, tokenizer_path)
    if template:
        (source / "chat_template.jinja").write_text(template)
    switches = {"split_special_tokens": split, "add_bos_token": False, "chat_template": None}
    others = {}
    if kind == "json":
        others = {"uses_image_token": True, "seconds_per_audio_token": 0.5, "scale_of_token": 2}
    (source / "tokenizer_config.json").write_text(json.dumps(switches | others))
    for name in ("out", "again"):
        exported(source, tmp_path / name)
        assert capsys.readouterr().err == ""
        settings = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        # Without a chat template, text never becomes a special token, as in training.
        assert settings["split_special_tokens"] is (split or not template)
        assert settings.items() >= others.items()
        if template:
            assert (tmp_path / name / "chat_template.jinja").read_text() == template
        source = tmp_path / name
    assert read_tokenizer(source).split_special_tokens is (split or not template)


def test_invalid_ids_in_generation_settings_are_omitted_and_named(tmp_path, tokenizer_path, capsys):
    source = tmp_path / "source"
    write_source(source, "model", tokenizer_path)
    generation = {
        "eos_token_id": [3, 99999],
        "pad_token_id": 99999,
        "decoder_start_token_id": -1,
        "top_p": 0.9,
    }
    (source / "generation_config.json").write_text(json.dumps(generation))
    found = exported(source, tmp_path / "out")
    assert found.generation == {
        "eos_token_id": [3],
        "pad_token_id": 0,
        "bos_token_id": 2,
        "top_p": 0.9,
    }
    named = "eos_token_id 99999, pad_token_id 99999, decoder_start_token_id -1"
    assert capsys.readouterr().err.strip().endswith(named)
