"""The tokenizer of an export gives the ids that the model was trained with."""

import io

import pytest
from datasets_for_tests import source_code

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.huggingface.tokenizer_files import write_tokenizer


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
    write_tokenizer(tmp_path / "t.model", tmp_path / "out", 128)
    ours, theirs = load_tokenizer(tmp_path / "t.model"), load_tokenizer(tmp_path / "out" / "tokenizer.json")
    text = source_code("ast").replace("=" * 9, "")  # a unigram model has several ways to divide a line
    for piece in (text, "a<sep>b  <s> c"):
        assert theirs.encode(piece) == ours.encode(piece)
        assert theirs.decode(ours.encode(piece)) == ours.decode(ours.encode(piece))
    assert (theirs.vocab_size, theirs.eod, theirs.bos) == (ours.vocab_size, ours.eod, ours.bos)
