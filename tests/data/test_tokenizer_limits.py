"""What a tokenizer's file may ask of the library, and that known tokenizers ask for less."""

import base64
import json
import struct

import pytest
from datasets_for_tests import write_tokenizer
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from megatron_tape.data import tokenizer_limits
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError


def replace(pattern, content):
    pattern = {"String": pattern} if isinstance(pattern, str) else pattern
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind, *steps):
    return {"type": "Sequence", kind: list(steps)}


def rules(text):
    """Return compiled rules that put in this text."""
    return struct.pack("<I", 1024) + bytes(1024) + text.encode()


def precompiled(text):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules(text)).decode()}


def load(tmp_path, change):
    write_tokenizer(tmp_path / "tokenizer.json")
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    change(settings)
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    return load_tokenizer(tmp_path)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CHINESE = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
NFKD, TENFOLD = {"type": "NFKD"}, replace("a", "a" * 10)
TEMPLATE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
DOUBLE = {"type": "TemplateProcessing", "single": TEMPLATE, "pair": TEMPLATE, "special_tokens": {}}


@pytest.mark.parametrize(
    "key, value, problem",
    [
        ("normalizer", {"prepend": "a" * 1001}, "is not a Hugging Face tokenizer.json"),  # it has no type
        ("normalizer", sequence("normalizers", ["a"]), "is not a Hugging Face tokenizer.json"),
        ("normalizer", replace("a", "a" * 129), "text 129 times longer"),
        ("normalizer", replace("", "a" * 128), "text 129 times longer"),
        ("normalizer", replace({"Regex": "(?=[a-z])"}, "a" * 128), "text 129 times longer"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 129}, "text 129 times longer"),
        ("normalizer", sequence("normalizers", *4 * [sequence("normalizers", *2 * [TENFOLD])]), "times longer"),
        ("normalizer", sequence("normalizers", *8 * [NFKD, replace(" ", "\ufdfa")]), "times longer"),
        ("normalizer", sequence("normalizers", *8 * [CHINESE, replace(" ", "中")]), "times longer"),
        ("normalizer", sequence("normalizers", *4 * [precompiled("a" * 18)]), "times longer"),
        ("normalizer", precompiled("a" * 129), "rules that make 129 characters of one"),
        ("pre_tokenizer", sequence("pretokenizers", *4 * [BYTES]), "text 625 times longer"),
        ("pre_tokenizer", sequence("pretokenizers", *8 * [SPACES, {"type": "UnicodeScripts"}]), "times longer"),
        ("decoder", sequence("decoders", *3 * [TENFOLD]), "text 1,000 times longer"),
        ("decoder", sequence("decoders", *5 * [{"type": "BPEDecoder", "suffix": ""}]), "times longer"),
        ("post_processor", sequence("processors", *8 * [DOUBLE]), "text 256 times longer"),
    ],
)  # fmt: skip
def test_steps_that_make_text_much_longer_are_refused(tmp_path, key, value, problem):
    with pytest.raises(FileError, match=problem) as refused:
        load(tmp_path, lambda settings: settings.update({key: value}))
    assert refused.value.subject == str(tmp_path / "tokenizer.json")


def test_a_normalizer_and_a_pre_tokenizer_count_together(tmp_path):
    steps = {"normalizer": replace("a", "a" * 100), "pre_tokenizer": BYTES}
    for key, step in steps.items():
        load(tmp_path, lambda settings: settings.update({key: step}))  # noqa: B023
    with pytest.raises(FileError, match="text 500 times longer"):
        load(tmp_path, lambda settings: settings.update(steps))


@pytest.mark.parametrize("place", ["vocabulary", "added"])
def test_an_id_that_no_vocabulary_has_is_refused(tmp_path, place):
    def change(settings, index):
        if place == "vocabulary":
            settings["model"]["vocab"]["big"] = index
        else:
            settings["added_tokens"].append(settings["added_tokens"][0] | {"content": "big", "id": index})

    load(tmp_path, lambda settings: change(settings, 1000))
    for index in (20_000_000, 2**31 - 1):
        with pytest.raises(FileError, match=f"has the id {index:,}"):
            load(tmp_path, lambda settings: change(settings, index))  # noqa: B023


def test_tokens_that_take_much_memory_are_refused(tmp_path, monkeypatch):
    long = {"id": 64, "content": "b" * 10_001, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * 10_001, -1.0]]}
    for change in ({"added_tokens": [], "model": unigram}, {"added_tokens": [long]}):
        with pytest.raises(FileError, match="has tokens of up to 10,001"):
            load(tmp_path, lambda settings: settings.update(change))  # noqa: B023
    monkeypatch.setattr(tokenizer_limits, "_VOCABULARY_CHARACTERS", 100)
    with pytest.raises(FileError, match="in all [0-9]+ characters"):
        load(tmp_path, lambda settings: None)


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    content = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content.rstrip()[:-1] + ', "normalizer": null}')
    with pytest.raises(FileError, match="gives a key twice"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_has_the_same_limits(tmp_path, tokenizer_path):
    from sentencepiece import sentencepiece_model_pb2

    for change, problem in (
        (lambda model: setattr(model.pieces[-1], "piece", "a" * 10_001), "has tokens of up to 10,001"),
        (lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", rules("a" * 129)), "rules that make 129"),
        (lambda model: setattr(model.denormalizer_spec, "precompiled_charsmap", rules("a" * 129)), "rules that make"),
    ):
        model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer_path.read_bytes())
        change(model)
        (tmp_path / "x.model").write_bytes(model.SerializeToString())
        with pytest.raises(FileError, match=problem):
            load_tokenizer(tmp_path / "x.model")


META = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
LLAMA = (normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"))
LLAMA_BACK = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
RULES = precompiled("a" * 18)  # as long as what NFKC makes of U+FDFA
TWICE = normalizers.Replace(Regex(" {2,}"), "▁")
KNOWN = {
    "Llama 2": (LLAMA, (), LLAMA_BACK),
    "Gemma": (LLAMA[1:], (pre_tokenizers.Split(" ", "merged_with_previous"),), LLAMA_BACK[:3]),
    "GPT-2": ((), (pre_tokenizers.ByteLevel(),), (decoders.ByteLevel(),)),
    "Qwen": (
        (normalizers.NFC(),),
        (pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), pre_tokenizers.ByteLevel()),
        (decoders.ByteLevel(),),
    ),
    "DeepSeek": ((), (*3 * [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")], pre_tokenizers.ByteLevel()), ()),
    "Falcon": ((), (pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(), pre_tokenizers.Digits()), ()),
    "CLIP": (
        (normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()),
        (pre_tokenizers.Split(Regex(r"[\p{N}]"), "removed"), pre_tokenizers.ByteLevel()),
        (decoders.BPEDecoder("</w>"),),
    ),
    "BERT": ((normalizers.BertNormalizer(),), (pre_tokenizers.BertPreTokenizer(),), (decoders.WordPiece(),)),
    "T5": ((RULES, normalizers.Strip(), TWICE), (pre_tokenizers.WhitespaceSplit(), META), (decoders.Metaspace(),)),
    "ALBERT": (
        (normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
         normalizers.Lowercase(), RULES, TWICE),
        (META,),
        (decoders.Metaspace(),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_known_tokenizers_do_is_accepted(tmp_path, name):
    normal, pre, back = KNOWN[name]

    def change(settings):
        for key, parts in zip(("normalizer", "pre_tokenizer", "decoder"), (normal, pre, back)):
            inner = [part if part == RULES else json.loads(part.__getstate__()) for part in parts]
            settings[key] = sequence(f"{key.replace('_', '')}s", *inner) if inner else None

    load(tmp_path, change)
