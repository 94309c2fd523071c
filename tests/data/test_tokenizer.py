import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megatron_tape.data.tokenizer import load_tokenizer
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
    # What a downloaded tokenizer brings along: a beginning added to every text, truncation, padding.
    tokenizer.post_processor = processors.TemplateProcessing(single="<first> $A", special_tokens=[("<first>", 0)])
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
    "name, token", [("tokenizer_config.json", {"content": "<last>"}), ("special_tokens_map.json", "<last>")]
)
def test_special_tokens_are_named_by_the_files_of_a_directory(byte_level, tmp_path, tokenizer_path, name, token):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / name).write_text(json.dumps({"eos_token": token, "bos_token": "<first>", "chat_template": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (500, 0, 1)


def test_added_tokens_are_part_of_the_vocabulary(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert max(loaded.eod, 7) < loaded.vocab_size
    assert loaded.bos is None


def test_directory_with_only_a_sentencepiece_model(tmp_path, tokenizer_path):
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_path.read_bytes())
    assert load_tokenizer(tmp_path).vocab_size == 800


def test_what_is_not_a_tokenizer_is_refused_with_a_fix(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        load_tokenizer(tmp_path / "missing.model")
    with pytest.raises(FileError, match="holds neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    for name in ("x.model", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(FileError, match=f"{name} is not a"):
            load_tokenizer(tmp_path / name)


def test_importing_and_loading_needs_no_torch(tokenizer_path):
    code = (
        "import sys; from megatron_tape.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'tokenizers', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tokenizer_path)], check=True, timeout=60)
