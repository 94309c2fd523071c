import json
import re
import subprocess
import sys

import pytest
import tokenizers
from datasets_for_tests import bpe_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megatron_tape.data.tokenizer import difference, load_tokenizer, tokenizer_record, write_files
from megatron_tape.errors import FileError


@pytest.fixture(scope="module")
def byte_level(texts):
    tokenizer = bpe_tokenizer(texts, 500, ["<first>", "<last>", "</s>"])
    # As in many downloaded tokenizers: a token added before every text, truncation, and padding.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<first> $A", special_tokens=[("<first>", 0)]
    )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return tokenizer


def test_sentencepiece_gives_back_every_text(tokenizer_path, texts):
    tokenizer = load_tokenizer(tokenizer_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (800, 2, 3)
    check_round_trip(tokenizer, [*texts, "a</s>b<s>c"])


def test_hugging_face_gives_back_every_text(byte_level, tmp_path, texts):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, None, 2)
    check_round_trip(tokenizer, [*texts, "a</s>b<first>c"])


def check_round_trip(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, batch):
        assert ids.dtype == "int32"
        assert ids.tolist() == tokenizer.encode(text)
        assert 0 <= ids.min()
        assert ids.max() < tokenizer.vocab_size
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []


def test_the_tokenizer_json_of_a_directory_is_preferred(byte_level, tmp_path, tokenizer_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    tokens = {"eos_token": "<last>", "bos_token": "<first>", "chat_template": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, 0, 1)


def test_added_tokens_are_part_of_the_vocabulary(tmp_path):
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel(
            {"a": 0, "b": 7},
            unk_token="a",
        )
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert max(loaded.eod, 7) < loaded.vocab_size
    assert loaded.bos is None


def test_what_is_not_a_tokenizer_is_refused_with_a_fix(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        load_tokenizer(tmp_path / "missing.model")
    with pytest.raises(FileError, match="contains neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    for name, content in (("x.model", "{}"), ("empty.model", ""), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(content)
        with pytest.raises(FileError, match=f"{name} is not a"):
            load_tokenizer(tmp_path / name)


def test_a_panic_of_the_library_names_the_file(byte_level, tmp_path):
    content = json.loads(byte_level.to_str())
    content["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match="tokenizer.json cannot be loaded"):
        load_tokenizer(tmp_path)


def test_importing_and_loading_needs_no_torch(tokenizer_path):
    code = (
        "import sys; from megatron_tape.data.tokenizer import load_tokenizer;"
        " load_tokenizer(sys.argv[1]);sys.exit(any(name in sys.modules for name in ('torch',"
        " 'megatron', 'tokenizers', 'transformers')))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tokenizer_path)],
        check=True,
        timeout=60,
    )


END = "<|endoftext|>"
MENTIONS = [END, f"a {END} b", f"x\n{END}\n<s>", f"(<s>{END})"]
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel.alphabet()
PIECES = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(33, 127))]
SPACES = normalizers.Replace(" ", "▁")
SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def bpe(alphabet, special, in_vocabulary=True, **options):
    tokens = [*(special if in_vocabulary else []), *alphabet, "th", "the"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocabulary,
        [("t", "h"), ("th", "e")],
        **options,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(special)
    return tokenizer


def with_parts(tokenizer, pre_tokenizer, decoder, normalizer=None, bos=None):
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.normalizer = normalizer
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


LLAMA = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
FAMILIES = {
    "gpt-2": with_parts(
        bpe(BYTES, [END]), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ),
    "olmo": with_parts(
        bpe(BYTES, [END, "<|padding|>"]),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        normalizers.NFC(),
    ),
    "llama 2": with_parts(
        bpe(PIECES, ["<unk>", "<s>", "</s>"], **LLAMA),
        None,
        decoders.Sequence([*BACK, decoders.Strip(" ", 1, 0)]),
        normalizers.Sequence([normalizers.Prepend("▁"), SPACES]),
        "<s>",
    ),
    "mistral": with_parts(
        bpe(PIECES, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], **LLAMA),
        pre_tokenizers.Metaspace("▁", "first", split=False),
        decoders.Sequence([*BACK, decoders.Strip(" ", 1, 0)]),
        bos="<s>",
    ),
    "mistral nemo": with_parts(
        bpe(BYTES, ["<unk>", "<s>", "</s>", "[INST]"], ignore_merges=True),
        SPLIT,
        decoders.ByteLevel(),
        bos="<s>",
    ),
    "llama 3": with_parts(
        bpe(
            BYTES,
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
            in_vocabulary=False,
            ignore_merges=True,
        ),
        SPLIT,
        decoders.ByteLevel(),
        bos="<|begin_of_text|>",
    ),
    "qwen": with_parts(
        bpe(BYTES, [END, "<|im_start|>", "<|im_end|>"], in_vocabulary=False),
        SPLIT,
        decoders.ByteLevel(),
        normalizers.NFC(),
    ),
    "gemma": with_parts(
        bpe(PIECES, ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"], **LLAMA),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence(BACK),
        SPACES,
        "<bos>",
    ),
}
"""Tokenizers with the steps of well-known ones, and a small vocabulary."""


@pytest.mark.parametrize("family", FAMILIES)
def test_common_tokenizers_are_accepted_unchanged(tmp_path, family):
    library = FAMILIES[family]
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod is not None
    assert tokenizer.prefix_ids == ([] if tokenizer.bos is None else [tokenizer.bos])
    assert tokenizer.files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    special = library.get_added_tokens_decoder()
    for token in special.values():
        for text in (f"the {token.content} end", f"x{token.content}{token.content}"):
            ids = tokenizer.encode(text)
            assert special.keys().isdisjoint(ids)
            assert tokenizer.decode(ids) == text


REFUSED = {
    "unigram": (
        models.Unigram(
            [
                ("<unk>", 0.0),
                (END, -1.0),
                *((piece, -9.0) for piece in PIECES),
            ],
            0,
        ),
        pre_tokenizers.Metaspace(),
    ),
    "unknown token": (
        models.WordLevel(
            {END: 0, "a": 1},
            unk_token=END,
        ),
        None,
    ),
    "words": (
        models.WordLevel({END: 0, "u": 1}, unk_token="u"),
        pre_tokenizers.WhitespaceSplit(),
    ),
    "ignored merges": (
        models.BPE(
            {END: 0, **{c: i + 1 for i, c in enumerate(BYTES)}},
            [],
            ignore_merges=True,
        ),
        pre_tokenizers.WhitespaceSplit(),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_encodes_text_to_a_special_token_is_refused(tmp_path, kind):
    model, pre_tokenizer = REFUSED[kind]
    tokenizer = with_parts(tokenizers.Tokenizer(model), pre_tokenizer, None)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileError, match=r"encodes the text .* to the special token") as error:
        load_tokenizer(tmp_path)
    assert "SentencePiece model" in error.value.fix


def test_a_named_end_that_is_an_ordinary_added_token_becomes_a_special_one(byte_level, tmp_path):
    byte_level.add_tokens(["<|im_end|>", "<tool>"])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == byte_level.token_to_id("<|im_end|>")
    assert tokenizer.eod not in tokenizer.encode("a<|im_end|>b")
    assert byte_level.token_to_id("<tool>") in tokenizer.encode("a<tool>b")


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, None),
        ("<last>", 1),
        ({"content": "<first>", "lstrip": False}, 0),
    ],
)
def test_the_end_of_documents_is_the_token_that_is_named(byte_level, tmp_path, value, expected):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert load_tokenizer(tmp_path).eod == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<|eot_id|>"},
        {"eos_token": 2},
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
    ],
)
def test_a_token_that_is_named_and_does_not_exist_is_an_error(byte_level, tmp_path, settings):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FileError) as error:
        load_tokenizer(tmp_path)
    assert error.value.subject == str(tmp_path / "tokenizer_config.json")
    assert error.value.fix


def test_several_candidates_for_the_end_of_document_token_are_an_error(tmp_path):
    words = {"</s>": 0, END: 1, "a": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileError, match="several tokens that could be its eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(tmp_path).eod == 0


def sentencepiece_directory(path, tokenizer_path, config, added=None):
    path.mkdir()
    (path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if added is not None:
        (path / "added_tokens.json").write_text(json.dumps(added))
    return path


def test_the_files_next_to_a_sentencepiece_model_name_its_tokens(tmp_path, tokenizer_path):
    config = {
        "eos_token": "<s>",
        "add_bos_token": True,
        "added_tokens_decoder": {"2": {"content": "<s>"}},
    }
    loaded = load_tokenizer(sentencepiece_directory(tmp_path / "x", tokenizer_path, config))
    assert (loaded.vocab_size, loaded.eod, loaded.bos, loaded.prefix_ids) == (800, 2, 2, [2])
    assert loaded.digest == load_tokenizer(tokenizer_path).digest


@pytest.mark.parametrize(
    "config, added",
    [
        ({"eos_token": "<|eot_id|>"}, None),
        ({}, {"<|im_end|>": 5}),
        ({"added_tokens_decoder": {"5": {"content": "<s>"}}}, None),
    ],
)
def test_files_that_contradict_a_sentencepiece_model_are_refused(
    tmp_path, tokenizer_path, config, added
):
    directory = sentencepiece_directory(tmp_path / "x", tokenizer_path, config, added)
    with pytest.raises(FileError) as error:
        load_tokenizer(directory)
    assert error.value.subject == str(directory / "tokenizer_config.json")


def test_random_splits_are_refused(byte_level, tmp_path):
    settings = json.loads(byte_level.to_str())
    settings["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(FileError, match="encodes text at random"):
        load_tokenizer(tmp_path)


def changed(path, name, **changes):
    settings = json.loads(path.read_text())
    target = settings
    *parents, last = name.split(".")
    for parent in parents:
        target = target[parent]
    target[last] = changes["to"](target[last]) if "to" in changes else changes["value"]
    return settings


@pytest.mark.parametrize(
    "name, same",
    [
        ("truncation", {"value": None}),
        ("padding", {"value": None}),
        ("model.merges", {"to": lambda merges: [" ".join(merge) for merge in merges]}),
        ("model.ignore_merges", {"value": False}),
    ],
)
def test_the_digest_covers_nothing_that_does_not_matter(byte_level, tmp_path, name, same):
    path = tmp_path / "tokenizer.json"
    byte_level.save(str(path))
    digest = load_tokenizer(path).digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    path.write_text(json.dumps(changed(path, name, **same), indent=5))
    assert load_tokenizer(path).digest == digest


def test_the_digest_of_a_sentencepiece_model_covers_its_scores(tmp_path, tokenizer_path):
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer_path.read_bytes())
    model.pieces[-1].score -= 1
    (tmp_path / "x.model").write_bytes(model.SerializeToString())
    one = load_tokenizer(tokenizer_path)
    assert one.digest != load_tokenizer(tmp_path / "x.model").digest
    record = tokenizer_record(one)
    assert difference(record, record | {"vocab_size": 900}, "x") is None
    ends = record | {"eod": 9}
    assert difference(record, ends, "x") == "ends documents with the id 3, and x with 9"
    assert difference(record, ends, "x", with_eod=False) is None


def test_a_tokenizer_does_not_change_with_its_files(tmp_path, tokenizer_path):
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5], "top_p": 0.9}')
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("other")
    out = tmp_path / "out"
    out.mkdir()
    assert sorted(write_files(tokenizer.files, out)) == [
        "additional_chat_templates/tool.jinja",
        "generation_config.json",
        "tokenizer.model",
    ]
    assert load_tokenizer(out).digest == tokenizer.digest == load_tokenizer(tokenizer_path).digest


@pytest.mark.parametrize(
    "settings",
    [
        {"image_token": "<pad>"},
        {"additional_special_tokens": ["<pad>"]},
        {"added_tokens_decoder": {"500": {"content": "<pad>", "special": True}}},
    ],
)
def test_tokens_that_the_files_name_as_special_are_special(byte_level, tmp_path, settings):
    byte_level.add_tokens(["<pad>"])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    index = byte_level.token_to_id("<pad>")
    assert index in load_tokenizer(tmp_path).encode("a<pad>b")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert index not in load_tokenizer(tmp_path).encode("a<pad>b")


def test_the_configuration_has_priority_over_the_map_of_special_tokens(byte_level, tmp_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<first>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<last>"}}')
    assert load_tokenizer(tmp_path).eod == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_that_transformers_saved_again_is_the_same(tmp_path, family):
    from transformers import PreTrainedTokenizerFast

    FAMILIES[family].save(str(tmp_path / "tokenizer.json"))
    one = load_tokenizer(tmp_path)
    settings = {"eos_token": FAMILIES[family].id_to_token(one.eod)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    PreTrainedTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    records = [tokenizer_record(load_tokenizer(path)) for path in (tmp_path, tmp_path / "again")]
    assert difference(*records, "it") is None


def renamed(vocabulary):
    one, other = [token for token in vocabulary if len(token) == 4][:2]
    return vocabulary | {one: vocabulary[other], other: vocabulary[one]}


@pytest.mark.parametrize(
    "name, other",
    [
        ("pre_tokenizer.add_prefix_space", {"value": True}),
        ("normalizer", {"value": {"type": "Lowercase"}}),
        ("normalizer", {"value": {"type": "NFKC"}}),
        ("normalizer", {"value": {"type": "Strip", "strip_left": False, "strip_right": True}}),
        ("model.merges", {"to": lambda merges: merges[::-1]}),
        ("model.merges", {"to": lambda merges: merges[:-1]}),
        ("model.vocab", {"to": renamed}),
    ],
)
def test_tokenizers_of_the_same_size_that_give_other_ids_differ(byte_level, tmp_path, name, other):
    path = tmp_path / "tokenizer.json"
    byte_level.save(str(path))
    own = tokenizer_record(load_tokenizer(path))
    path.write_text(json.dumps(changed(path, name, **other)))
    found = tokenizer_record(load_tokenizer(path))
    assert found["vocab_size"] == own["vocab_size"]
    assert found["digest"] != own["digest"]
    assert difference(found, own, "x") == "encodes text in another way than x"


def test_a_record_of_an_older_version_cannot_tell_tokenizers_apart(tmp_path, byte_level):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    record = tokenizer_record(load_tokenizer(tmp_path / "tokenizer.json"))
    older = {key: value for key, value in record.items() if key != "sample"}
    assert difference(older, record, "x") is None
    other = older | {"digest": "other"}
    assert difference(record, other, "x") == "may encode text in another way than x"
    assert "another way than x (" in difference(record, other | {"vocab_size": 9}, "x")


def test_a_directory_of_both_formats_is_the_same_as_either_file_if_they_agree(
    tmp_path, tokenizer_path
):
    from megatron_tape.huggingface.tokenizer_files import write_tokenizer

    write_tokenizer(load_tokenizer(tokenizer_path), tmp_path, 128, "t")
    both = load_tokenizer(tmp_path)
    model = load_tokenizer(tmp_path / "tokenizer.model")
    assert both.equal_model_digest == model.digest != both.digest
    assert model.digest == load_tokenizer(tokenizer_path).digest
    for one, other in ((both, model), (model, both)):
        assert difference(tokenizer_record(one), tokenizer_record(other), "it") is None
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).equal_model_digest is None
