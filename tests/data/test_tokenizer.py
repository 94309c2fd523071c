import json
import re
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_tape.data.tokenizer import difference, load_tokenizer, tokenizer_record, write_files
from megatron_tape.errors import FileError


@pytest.fixture(scope="module")
def byte_level(texts):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<first>", "<last>", "</s>"],
        initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
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
    check_round_trip(tokenizer, texts)


def test_hugging_face_gives_back_every_text(byte_level, tmp_path, texts):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, None, 2)
    check_round_trip(tokenizer, texts)


def check_round_trip(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, batch):
        assert ids.dtype == "int32" and ids.tolist() == tokenizer.encode(text)
        assert 0 <= ids.min() and ids.max() < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []


def test_text_never_encodes_to_a_special_token(byte_level, tmp_path, tokenizer_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (load_tokenizer(tmp_path), load_tokenizer(tokenizer_path)):
        ids = tokenizer.encode("a</s>b<s>c")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == "a</s>b<s>c"


@pytest.mark.parametrize(
    "name, token",
    [("tokenizer_config.json", {"content": "<last>"}), ("special_tokens_map.json", "<last>")],
)
def test_special_tokens_are_named_by_the_files_of_a_directory(
    byte_level, tmp_path, tokenizer_path, name, token
):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / name).write_text(
        json.dumps({"eos_token": token, "bos_token": "<first>", "chat_template": None})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, 0, 1)


def test_added_tokens_are_part_of_the_vocabulary(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert max(loaded.eod, 7) < loaded.vocab_size
    assert loaded.bos is None


def test_an_added_token_has_the_id_that_the_library_gives_it_whatever_its_file_says(
    byte_level, tmp_path
):
    content = json.loads(byte_level.to_str())
    content["added_tokens"][1]["id"] = content["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert (
        load_tokenizer(tmp_path).encode("a")
        == byte_level.encode("a", add_special_tokens=False).ids[:1]
    )


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


@pytest.mark.parametrize("index", [2**24, 2**31, 2**40])
def test_ids_that_no_dataset_can_hold_are_refused(tmp_path, index):
    content = json.loads(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    content["model"]["vocab"]["b"] = index
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=rf"tokenizer.json .*\b({index:,}|{index})\b"):
        load_tokenizer(tmp_path)


def test_importing_and_loading_needs_no_torch(tokenizer_path):
    code = (
        "import sys; from megatron_tape.data.tokenizer import load_tokenizer;"
        " load_tokenizer(sys.argv[1]);sys.exit(any(name in sys.modules for name in ('torch',"
        " 'megatron', 'tokenizers', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tokenizer_path)], check=True, timeout=60)


END = "<|endoftext|>"


def trained(core, trainer, pre_tokenizer, texts, **options):
    tokenizer = tokenizers.Tokenizer(core)
    tokenizer.pre_tokenizer = pre_tokenizer
    for name, value in options.items():
        setattr(tokenizer, name, value)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


KINDS = {
    "unigram": lambda texts: trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=[END, "<s>", "<unk>"], unk_token="<unk>"
        ),
        pre_tokenizers.Metaspace(),
        texts,
    ),
    "word level": lambda texts: trained(
        models.WordLevel(unk_token="[UNK]"),
        trainers.WordLevelTrainer(special_tokens=[END, "<s>", "[UNK]"]),
        pre_tokenizers.WhitespaceSplit(),
        texts,
    ),
    "word piece, lower case": lambda texts: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(special_tokens=[END, "<s>", "[UNK]"], vocab_size=300),
        pre_tokenizers.WhitespaceSplit(),
        texts,
        normalizer=normalizers.Lowercase(),
    ),
    "bpe that ignores merges": lambda texts: trained(
        models.BPE(ignore_merges=True),
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[END, "<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(r"\s"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        texts,
    ),
}
MENTIONS = [
    END,
    f"a{END}b",
    f"a {END} b",
    f"{END}{END}",
    f"x\n{END}\n<s>",
    END.upper(),
    f"<{END}>",
    "<s><s>",
]
MENTIONS += [f"({END})", f'"{END}",', f"1{END}2"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_encodes_to_a_special_token_that_the_vocabulary_for_text_holds(
    kind, texts, tmp_path
):
    texts = texts[:40]
    KINDS[kind](texts).save(str(tmp_path / "tokenizer.json"))
    library = tokenizers.Tokenizer.from_file(
        str(tmp_path / "tokenizer.json")
    )  # which rounds the scores once more
    loaded = load_tokenizer(tmp_path)
    library.encode_special_tokens = True
    special = {library.token_to_id(END), library.token_to_id("<s>")}
    assert {loaded.eod, loaded.bos} == special
    assert any(
        special & set(library.encode(text, add_special_tokens=False).ids) for text in MENTIONS
    )
    for text, ids in zip(MENTIONS, loaded.encode_batch(MENTIONS)):
        assert ids.tolist() == loaded.encode(text) and special.isdisjoint(ids.tolist())
    for text in texts:
        assert loaded.encode(text) == library.encode(text, add_special_tokens=False).ids
    # What is written is loaded unchanged.
    again = tmp_path / "again"
    again.mkdir()
    write_files(loaded.files, again)
    assert (
        load_tokenizer(again).files == loaded.files
        and load_tokenizer(again).digest == loaded.digest
    )


def test_a_named_end_that_is_an_ordinary_added_token_becomes_a_special_one(byte_level, tmp_path):
    byte_level.add_tokens(["<|im_end|>", "<tool>"])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == byte_level.token_to_id("<|im_end|>")
    assert tokenizer.eod not in tokenizer.encode("a<|im_end|>b")
    assert byte_level.token_to_id("<tool>") in tokenizer.encode("a<tool>b")


def test_a_special_token_that_text_encodes_to_is_refused(tmp_path):
    tokenizers.Tokenizer(models.WordLevel({END: 0, "a": 1}, unk_token=END)).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(FileError, match="as the unknown token"):
        load_tokenizer(tmp_path)
    one = tokenizers.Tokenizer(models.WordLevel({"|": 0, "a": 1, "u": 2}, unk_token="u"))
    one.pre_tokenizer = pre_tokenizers.Whitespace()
    one.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "|"}')
    with pytest.raises(FileError, match="encodes text that mentions | to the special token 0"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, "</s>"),
        ({"eos_token": None}, None),
        ({"eos_token": "<last>"}, "<last>"),
        ({"eos_token": {"content": "<first>", "lstrip": False}}, "<first>"),
    ],
)
def test_the_end_of_documents_is_the_token_that_is_named(byte_level, tmp_path, settings, expected):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).eod == (
        None if expected is None else byte_level.token_to_id(expected)
    )


@pytest.mark.parametrize(
    "settings, problem",
    [
        (
            {"eos_token": "<|eot_id|>"},
            "names '<|eot_id|>' as eos_token, but tokenizer.json has no such token",
        ),
        ({"bos_token": 3}, "names 3 as bos_token"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "the added token '<x>' with id 'x'"),
    ],
)
def test_a_token_that_is_named_and_does_not_exist_is_an_error(
    byte_level, tmp_path, settings, problem
):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FileError) as error:
        load_tokenizer(tmp_path)
    assert problem in str(error.value) and error.value.subject == str(
        tmp_path / "tokenizer_config.json"
    )


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
    assert (loaded.vocab_size, loaded.eod, loaded.bos, loaded.prefix) == (800, 2, 2, [2])
    assert loaded.digest == load_tokenizer(tokenizer_path).digest


@pytest.mark.parametrize(
    "config, added, problem",
    [
        (
            {"eos_token": "<|eot_id|>"},
            None,
            "names '<|eot_id|>' as eos_token, but tokenizer.model has no such token",
        ),
        ({}, {"<|im_end|>": 5}, "'<|im_end|>' with id 5, but tokenizer.model does not have it"),
        (
            {"added_tokens_decoder": {"5": {"content": "<s>"}}},
            None,
            "'<s>' with id 5, but tokenizer.model has it with id 2",
        ),
        ({"sp_model_kwargs": {"enable_sampling": True}}, None, "encodes text at random"),
    ],
)
def test_files_that_contradict_a_sentencepiece_model_are_refused(
    tmp_path, tokenizer_path, config, added, problem
):
    with pytest.raises(FileError) as error:
        load_tokenizer(sentencepiece_directory(tmp_path / "x", tokenizer_path, config, added))
    assert problem in str(error.value)


def test_random_splits_are_refused(byte_level, tmp_path):
    settings = json.loads(byte_level.to_str())
    settings["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(
        FileError, match="encodes text at random .model.dropout.; set model.dropout to null"
    ):
        load_tokenizer(tmp_path)


def changed(path, name, **changes):
    settings = json.loads(path.read_text())
    target = settings
    *parents, last = name.split(".")
    for parent in parents:
        target = target[parent]
    target[last] = changes["to"](target[last]) if "to" in changes else changes["value"]
    return settings


def test_the_digest_covers_how_text_is_split_and_nothing_that_does_not_matter(byte_level, tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level.save(str(path))
    own = load_tokenizer(path).digest
    assert re.fullmatch("[0-9a-f]{64}", own)
    for name, other in {
        "pre_tokenizer.add_prefix_space": {"value": True},
        "normalizer": {"value": {"type": "Lowercase"}},
        "model.merges": {"to": lambda merges: [merges[1], merges[0], *merges[2:]]},
    }.items():
        (tmp_path / "other.json").write_text(json.dumps(changed(path, name, **other)))
        assert load_tokenizer(tmp_path / "other.json").digest != own, name
    for name, same in {
        "truncation": {"value": None},
        "padding": {"value": None},
        "model.merges": {"to": lambda merges: [" ".join(merge) for merge in merges]},
        "model.ignore_merges": {"value": False},
    }.items():
        (tmp_path / "same.json").write_text(json.dumps(changed(path, name, **same), indent=5))
        assert load_tokenizer(tmp_path / "same.json").digest == own, name


def test_the_digest_of_a_sentencepiece_model_covers_its_scores(tmp_path, tokenizer_path):
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer_path.read_bytes())
    model.pieces[-1].score -= 1
    (tmp_path / "x.model").write_bytes(model.SerializeToString())
    one = load_tokenizer(tokenizer_path)
    other = load_tokenizer(tmp_path / "x.model")
    assert one.digest != other.digest
    record = tokenizer_record(one)
    assert difference(record, record | {"vocab_size": 900}, "x") is None
    assert (
        difference(record, record | {"eod": 9}, "x") == "ends documents with the id 3, and x with 9"
    )
    assert difference(record, record | {"eod": 9}, "x", with_eod=False) is None


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
    "key", ["image_token", "additional_special_tokens", "added_tokens_decoder"]
)
def test_tokens_that_the_files_name_as_special_are_special(byte_level, tmp_path, key):
    byte_level.add_tokens(["<pad>"])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    index = byte_level.token_to_id("<pad>")
    assert index in load_tokenizer(tmp_path).encode("a<pad>b")
    decoder = {index: {"content": "<pad>", "special": True}}
    values = {"additional_special_tokens": ["<pad>"], "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: values.get(key, "<pad>")}))
    assert index not in load_tokenizer(tmp_path).encode("a<pad>b")


def test_files_that_name_different_ends_of_documents_are_refused(byte_level, tmp_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    other = tmp_path / "special_tokens_map.json"
    other.write_text('{"eos_token": {"content": "<last>"}}')
    for named, said in (("</s>", "'</s>'"), (None, "null")):
        config.write_text(json.dumps({"eos_token": named}))
        with pytest.raises(
            FileError,
            match=f"names {said} as eos_token, but special_tokens_map.json names '<last>'",
        ):
            load_tokenizer(tmp_path)
    config.write_text('{"eos_token": "<last>"}')
    assert load_tokenizer(tmp_path).eod == 1


@pytest.mark.parametrize("kind", ["byte level", *KINDS])
def test_a_tokenizer_that_transformers_saved_again_is_the_same(byte_level, tmp_path, texts, kind):
    from transformers import PreTrainedTokenizerFast

    if kind == "byte level":
        library = byte_level
    else:
        library = KINDS[kind](texts[:40])
    library.save(str(tmp_path / "tokenizer.json"))
    end = "</s>" if kind == "byte level" else END
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": end, "pad_token": end})
    )
    PreTrainedTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    one = tokenizer_record(load_tokenizer(tmp_path))
    other = tokenizer_record(load_tokenizer(tmp_path / "again"))
    assert difference(one, other, "it") is None


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
    assert difference(found, own, "x") == "encodes text in another way than x"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_of_the_same_pieces_with_other_scores_differ(tmp_path, texts, kind):
    from huggingface.test_tokenizer_files import sentencepiece_model
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model(model_type=kind))
    (tmp_path / "one.model").write_bytes(model.SerializeToString())
    for piece in model.pieces:
        if piece.type == piece.NORMAL:
            piece.score = -1000 - piece.score
        else:
            piece.score = piece.score
    (tmp_path / "other.model").write_bytes(model.SerializeToString())
    one, other = (
        tokenizer_record(load_tokenizer(tmp_path / f"{name}.model")) for name in ("one", "other")
    )
    assert difference(other, one, "x") == "encodes text in another way than x"


def test_a_record_of_an_older_version_cannot_tell_tokenizers_apart(tmp_path, byte_level):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    record = tokenizer_record(load_tokenizer(tmp_path / "tokenizer.json"))
    older = {key: value for key, value in record.items() if key != "sample"}
    assert difference(older, record, "x") is None
    assert (
        difference(record, older | {"digest": "other"}, "x")
        == "may encode text in another way than x"
    )
    sizes = older | {"digest": "other", "vocab_size": 9}
    assert "another way than x (" in difference(record, sizes, "x")


def test_a_directory_of_both_formats_is_the_same_as_either_file_if_they_agree(
    tmp_path, tokenizer_path
):
    from megatron_tape.huggingface.tokenizer_files import write_tokenizer

    write_tokenizer(load_tokenizer(tokenizer_path), tmp_path, 128, "t")
    both = load_tokenizer(tmp_path)
    model = load_tokenizer(tmp_path / "tokenizer.model")
    assert both.same_as == model.digest == load_tokenizer(tokenizer_path).digest != both.digest
    for one, other in ((both, model), (model, both)):
        assert difference(tokenizer_record(one), tokenizer_record(other), "it") is None
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).same_as is None


def test_settings_of_the_wrong_type_are_one_sentence(tmp_path, tokenizer_path):
    config = {
        "sp_model_kwargs": "x",
        "added_tokens_decoder": [],
        "tokenizer_class": 3,
        "additional_special_tokens": 5,
    }
    assert load_tokenizer(sentencepiece_directory(tmp_path / "x", tokenizer_path, config)).eod == 3
