"""Perplexity: known answers, which tokens are scored, and equality with plain loops."""

import gzip
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets_for_tests import write_dataset
from evaluation.loss_cases import ByteModel, copies, result_of, run, score, uniform, write_jsonl
from harness_cases import BYTES, bpe_tokenizer, random_llama

from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.evaluation.task import Summary
from megatron_tape.evaluation.tasks.perplexity import Perplexity

RANDOM = np.random.default_rng(0)
TEXTS = ["".join(map(chr, RANDOM.integers(32, 127, size))) for size in (150, 40, 260, 200)]


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", TEXTS)


def uniform_result(vocab_size, texts, lengths=(16, 64)):
    model = ByteModel(uniform(vocab_size))
    return run(Perplexity, model, data=texts, lengths=list(lengths), stride=8)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(texts):
    result = uniform_result(100, texts)
    for length in (16, 64):
        perplexity = score(result, "perplexity", length)
        assert [perplexity.value, perplexity.low] == pytest.approx([100, 100], rel=1e-12)
        assert perplexity.count == 3
        assert score(result, "loss", length).value == pytest.approx(math.log(100), rel=1e-12)
        # ASCII: one byte per token.
        bits = score(result, "bits_per_byte", length)
        assert bits.value == pytest.approx(math.log2(100), rel=1e-12)
    assert "192 (192 bytes), in 3 documents" in result.notes[0]
    assert result.notes[1:] == ["texts: skipped as too short: 1 document."]


def test_the_digest_of_scored_tokens_depends_on_the_longest_length_only(texts):
    scored = uniform_result(100, texts).details["scored"]
    assert scored["texts"]["count"] == scored["texts"]["bytes"] == 192
    assert uniform_result(20, texts, [32, 64]).details["scored"] == scored
    assert uniform_result(100, texts, [16, 32]).details["scored"] != scored


def test_bits_per_byte_count_the_bytes_of_the_scored_tokens(tmp_path):
    class Letters(ByteModel):
        def encode(self, text):
            return list(map(ord, text))

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    # 16 tokens of each: 8 stars of 3 bytes, the rest letters of 2.
    texts = ["\N{BLACK STAR}\N{GREEK SMALL LETTER ALPHA}" * 40, "\N{GREEK SMALL LETTER ALPHA}" * 90]
    data = write_jsonl(tmp_path / "texts.jsonl", texts)
    model = Letters(uniform(256), vocab_size=10_000)
    result = run(
        Perplexity,
        model,
        data=data,
        lengths=[40],
        stride=8,
        windows=2,
    )
    assert score(result, "bits_per_byte").value == pytest.approx(8 * 32 / (8 * 3 + 8 * 2 + 16 * 2))


@pytest.mark.parametrize("bos", [(), (7,)])
@pytest.mark.parametrize("stride", [5, 8, 50])
def test_every_length_scores_exactly_the_same_tokens_in_order(tmp_path, bos, stride):
    np.arange(1000, 1190, dtype="<u2").tofile(tmp_path / "count.bin")
    model = ByteModel(uniform(2000), vocab_size=2000, bos=bos)
    data = str(tmp_path / "count.bin")
    task = Perplexity(
        Perplexity.Settings(
            data=data,
            lengths=[2, 8, 32],
            stride=stride,
            windows=3,
        )
    )
    first = 1033 - min(stride, 8)
    expected = list(range(first, min(first + 3 * stride, 1190)))
    for unit in task.units(model):
        model.scored.clear()
        task.evaluate(unit, model)
        counted = []
        for tokens, window in zip(
            model.scored,
            task.work[unit.key].windows,
            strict=True,
        ):
            counted += tokens[-window.scored :]
        assert counted == expected
    assert model.longest == 32, "a model never reads more than the longest length"


def test_a_copying_model_has_a_low_loss_if_the_copy_is_in_the_context(tmp_path):
    period = "".join(
        map(
            chr,
            RANDOM.permutation(np.arange(32, 127))[:40],
        )
    )
    data = write_jsonl(tmp_path / "periodic.jsonl", [period * 8] * 2)
    result = run(
        Perplexity,
        ByteModel(copies(40)),
        data=data,
        lengths=[16, 128],
        stride=8,
    )
    assert score(result, "perplexity", 16).value == pytest.approx(256)
    assert score(result, "perplexity", 128).value == pytest.approx(1 / 0.99)
    curve = result.details["loss_by_position"]["periodic"]
    before = np.array(curve["tokens_before"])
    losses = np.array(curve["loss"])  # 64 pairs of positions
    assert np.allclose(losses[before > 40], -math.log(0.99))
    assert np.allclose(losses[before < 39], math.log(256))


@pytest.fixture(scope="module")
def llama():
    return random_llama(bpe_tokenizer(bos=True, rows=BYTES), 64)


@torch.no_grad()
def test_perplexity_equals_a_plain_loop_over_transformers(llama, texts):
    losses = []
    for text in TEXTS:
        ids = llama.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 65:
            continue
        for end in range(57 + 8, min(57 + 4 * 8, len(ids)) + 1, 8):
            window = torch.tensor([[0, *ids[end - 32 : end]]])
            logits = llama.model(window[:, :-1]).logits[0, -8:]
            losses.append(F.cross_entropy(logits, window[0, -8:]).item())
    result = run(
        Perplexity,
        llama,
        data=texts,
        lengths=[32, 64],
        stride=8,
        windows=4,
    )
    loss = np.mean(losses)
    assert score(result, "loss", 32).value == pytest.approx(loss, abs=1e-6)
    assert score(result, "perplexity", 32).value == pytest.approx(math.exp(loss), rel=1e-6)


@torch.no_grad()
def test_longlora_equals_the_published_program(llama, tmp_path):
    data = RANDOM.integers(1, 257, 700).astype("<u2")
    data.tofile(tmp_path / "test.bin")
    starts = list(range(0, len(data) - 48, 10))
    starts.pop()
    losses = []
    for start in starts:
        x = torch.from_numpy(data[start : start + 48].astype(np.int64))[None]
        losses.append(llama.model(input_ids=x, labels=x).loss.item())
    settings = {"data": str(tmp_path / "test.bin"), "lengths": [48], "stride": 10}
    result = run(Perplexity, llama, protocol="longlora", **settings)
    loss = score(result, "loss", 48, "test (longlora)")
    assert loss.value == pytest.approx(np.mean(losses), abs=1e-6)
    assert loss.count == len(starts)
    assert loss.low is None
    assert score(result, "perplexity").value == pytest.approx(
        math.exp(np.mean(losses)),
        rel=1e-6,
    )
    assert "across documents" in result.notes[-1]


@pytest.mark.parametrize("ending", ["", ".bin"])
def test_indexed_datasets_and_compressed_texts_are_read_by_name(tmp_path, ending):
    write_dataset(tmp_path / "tokens", documents=9)
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write('{"words": "' + "x" * 60 + '"}\n')
    data = {"numbers": f"{tmp_path}/tokens{ending}", "letters": f"{tmp_path}/more.jsonl.gz"}
    settings = {"text_key": "words", "lengths": [16], "stride": 4, "windows": 100}
    result = run(Perplexity, ByteModel(uniform(9)), data=data, **settings)
    lengths = IndexedDatasetReader(tmp_path / "tokens").document_lengths()
    numbers = score(result, "perplexity", 16, "numbers")
    assert numbers.value == pytest.approx(9)
    assert numbers.count == sum(lengths > 16)
    assert result.details["scored"]["numbers"]["count"] == sum(lengths[lengths > 16] - 13)
    assert score(result, "bits_per_byte").group == "letters", "the bytes of token ids are not known"
    assert score(result, "perplexity", 16, "letters").low is None, "one document gives no interval"


def test_a_file_of_token_ids_is_read_with_its_type(tmp_path):
    ids = np.arange(128_216, 128_256, dtype="<u4")
    ids.tofile(tmp_path / "ids.bin")
    model = ByteModel(uniform(128_256), vocab_size=128_256)
    settings = {"data": str(tmp_path / "ids.bin"), "lengths": [16], "stride": 4}
    run(Perplexity, model, token_dtype="uint32", **settings)
    assert set(sum(model.scored, [])) == set(ids[1:])


def test_default_lengths_come_from_the_models_configuration(texts, tmp_path):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    config = '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 32}'
    (tmp_path / "config.json").write_text(config)
    info = find_model(str(tmp_path)).info
    assert Perplexity(Perplexity.Settings(data=texts)).context_lengths(info) == [8, 16, 32]
    for unknown in ("-1", '"32"', "32.0"):
        (tmp_path / "config.json").write_text(config.replace("32", unknown))
        assert find_model(str(tmp_path)).info.trained_length is None


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_place(texts):
    model = ByteModel(lambda before, token: math.nan)
    with pytest.raises(ValueError, match="infinite or NaN loss in texts/0, tokens 0 to 17"):
        run(Perplexity, model, data=texts, lengths=[16], stride=4)


def test_pictures_show_every_model_and_describe_it(texts):
    results = {"nine": uniform_result(9, texts), "twenty": uniform_result(20, texts)}
    perplexity, position = Perplexity.draw(results)
    shown = "nine: 9 at 16 tokens, 9 at 64 tokens; twenty: 20 at 16 tokens"
    assert shown in perplexity.alternative_text
    (axes,) = perplexity.figure.axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([9, 9])
    assert axes.get_yscale() == "linear"
    assert len(position.figure.axes[0].lines) == 2
    results["many"] = uniform_result(100, texts)
    assert Perplexity.draw(results)[0].figure.axes[0].get_yscale() == "log"
    assert Perplexity.draw({"nine": result_of(Summary([]))}) == []


def test_a_split_selects_only_validation_documents(tmp_path):
    write_dataset(tmp_path / "tokens", documents=10)
    settings = {
        "data": str(tmp_path / "tokens"),
        "lengths": [6],
        "stride": 4,
        "windows": 1,
    }
    reader = IndexedDatasetReader(tmp_path / "tokens")
    model = ByteModel(uniform(100))
    run(Perplexity, model, split="60,30,10", **settings)
    held_out = [token for number in (6, 7, 8) for token in reader.document(number)[1:10]]
    assert [token for window in model.scored for token in window] == held_out
