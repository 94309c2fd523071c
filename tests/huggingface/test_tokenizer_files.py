"""The tokenizer of an export gives the ids that the model was trained with."""

import io

import pytest
from datasets_for_tests import source_code

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.huggingface.tokenizer_files import files_beside, write_tokenizer


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


def test_links_lead_out_of_a_directory_only_in_the_hubs_cache(tmp_path):
    blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/1"))
    for directory in (blobs, snapshot, tmp_path / "model"):
        directory.mkdir(parents=True)
    (blobs / "0").touch()
    (tmp_path / "secret").touch()
    (snapshot / "chat_template.jinja").symlink_to(blobs / "0")
    assert files_beside(snapshot) == ["chat_template.jinja"]
    (tmp_path / "model" / "tokenizer.json").symlink_to("chat_template.jinja")
    (tmp_path / "model" / "chat_template.jinja").touch()
    assert files_beside(tmp_path / "model") == ["tokenizer.json", "chat_template.jinja"]
    (tmp_path / "model" / "chat_template.jinja").unlink()
    for directory in (tmp_path / "model", snapshot):
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        (directory / "chat_template.jinja").symlink_to(tmp_path / "secret")
        with pytest.raises(FileError, match="is a link to a file elsewhere"):
            files_beside(directory)
