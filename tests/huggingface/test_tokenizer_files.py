"""The tokenizer of an export gives the ids that the model was trained with."""

import io
import sysconfig
from pathlib import Path

import pytest

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.huggingface.tokenizer_files import write_tokenizer


@pytest.mark.parametrize("kind", ["unigram", "bpe", "user-defined", "unigram-with-rules"])
def test_sentencepiece_models_of_other_settings_convert_exactly(tmp_path, kind):
    import sentencepiece

    library = Path(sysconfig.get_path("stdlib"))
    sentences = [line for name in ("argparse", "ast") for line in (library / f"{name}.py").read_text().splitlines()]
    options = {
        "unigram": dict(model_type="unigram", byte_fallback=True, normalization_rule_name="identity"),
        "bpe": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity"),
        "user-defined": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity"),
        "unigram-with-rules": dict(model_type="unigram", byte_fallback=True, normalization_rule_name="nmt_nfkc"),
    }[kind]
    rules = dict(remove_extra_whitespaces=kind == "unigram-with-rules", add_dummy_prefix=kind != "user-defined")
    if kind == "user-defined":
        rules["user_defined_symbols"] = ["<sep>"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=700, minloglevel=2, **options, **rules
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "t.model", tmp_path / "out", 128)
    ours, theirs = load_tokenizer(tmp_path / "t.model"), load_tokenizer(tmp_path / "out" / "tokenizer.json")
    text = (library / "ast.py").read_text().replace("=" * 9, "")  # a unigram model has several ways to divide a line
    for piece in (text, "a<sep>b  <s> c"):
        assert theirs.encode(piece) == ours.encode(piece)
        assert theirs.decode(ours.encode(piece)) == ours.decode(ours.encode(piece))
    assert (theirs.vocab_size, theirs.eod, theirs.bos) == (ours.vocab_size, ours.eod, ours.bos)
