"""Perplexity: known answers, which tokens are scored, equality with plain loops, and what is
refused.
"""

import gzip
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets_for_tests import write_dataset, write_documents
from evaluation.loss_cases import ByteModel, copies, result_of, run, score, uniform, write_jsonl
from harness_cases import BYTES, bpe_tokenizer, random_llama

from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.evaluation.task import Summary
from megatron_tape.evaluation.tasks.perplexity import Perplexity
from megatron_tape.evaluation.tasks.text_sources import find_sources, long_documents

RANDOM = np.random.default_rng(0)
TEXTS = ["".join(map(chr, RANDOM.integers(32, 127, size))) for size in (150, 40, 260, 200)]


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", TEXTS)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(texts):
    result = run(Perplexity, ByteModel(uniform(100)), data=texts, lengths=[16, 64], stride=8)
    for length in (16, 64):
        perplexity = score(result, "perplexity", length)
        assert perplexity.value == pytest.approx(100, rel=1e-12) and perplexity.count == 3
        assert perplexity.low == pytest.approx(100, rel=1e-12) == perplexity.high
        assert score(result, "loss", length).value == pytest.approx(math.log(100), rel=1e-12)
        # ASCII: one byte per token.
        assert score(result, "bits_per_byte", length).value == pytest.approx(
            math.log2(100), rel=1e-12
        )
    assert np.allclose(
        result.details["loss_by_position"]["texts"]["loss"], math.log(100), rtol=1e-12
    )
    assert result.notes == [
        "texts: 192 tokens (192 bytes) of 3 documents are scored, the same at every length.",
        "texts: 1 document was too short and skipped.",
    ]
    other = run(Perplexity, ByteModel(uniform(100)), data=texts, lengths=[32, 64], stride=8)
    recorded = result.details["scored"]
    assert (recorded["texts"]["count"], recorded["texts"]["bytes"]) == (192, 192)
    assert other.details["scored"] == recorded
    shorter = run(Perplexity, ByteModel(uniform(100)), data=texts, lengths=[16, 32], stride=8)
    assert shorter.details["scored"]["texts"]["digest"] != recorded["texts"]["digest"]


def test_bits_per_byte_count_the_bytes_of_the_scored_tokens(tmp_path):
    texts = ["\N{BLACK STAR}\N{GREEK SMALL LETTER ALPHA}" * 40, "\N{GREEK SMALL LETTER ALPHA}" * 90]

    class Letters(ByteModel):
        def encode(self, text):
            return [ord(letter) % 256 for letter in text]

        def decode(self, tokens):
            return "".join(
                "\N{BLACK STAR}" if token == 5 else "\N{GREEK SMALL LETTER ALPHA}"
                for token in tokens
            )

    data = write_jsonl(tmp_path / "texts.jsonl", texts)
    result = run(Perplexity, Letters(uniform(256)), data=data, lengths=[40], stride=8, windows=2)
    # 16 tokens of each: 8 stars of 3 bytes, the rest letters of 2.
    assert score(result, "bits_per_byte").value == pytest.approx(8 * 32 / (8 * 3 + 8 * 2 + 16 * 2))


def record_scored(model, **settings):
    """Return the tokens that the task counts, by unit."""
    counted = {}

    class Recording(Perplexity):
        def evaluate(self, unit, model):
            model.scored.clear()
            value = super().evaluate(unit, model)
            windows = self.work[unit.key].windows
            counted[unit.key] = [
                list(all_[-w.scored :]) for all_, w in zip(model.scored, windows, strict=True)
            ]
            return value

    run(Recording, model, **settings)
    return counted


@pytest.mark.parametrize("bos", [(), (7,)])
@pytest.mark.parametrize("stride", [5, 8, 50])
def test_every_length_scores_exactly_the_same_tokens_in_order(tmp_path, bos, stride):
    np.arange(1000, 1190, dtype="<u2").tofile(tmp_path / "count.bin")
    model = ByteModel(uniform(2000), vocab_size=2000, bos=bos)
    settings = {"data": str(tmp_path / "count.bin"), "stride": stride, "windows": 3}
    counted = record_scored(model, lengths=[2, 8, 17, 32], **settings)
    assert len(counted) == 4 and model.longest == 32, (
        "a model never reads more than the longest length"
    )
    first = 1033 - min(stride, 8)
    for windows in counted.values():
        assert sum(windows, []) == list(range(first, min(first + 3 * stride, 1190)))


def test_a_copying_model_has_a_low_loss_if_the_copy_is_in_the_context(tmp_path):
    period = list(map(chr, RANDOM.permutation(np.arange(32, 127))[:40]))
    data = write_jsonl(tmp_path / "periodic.jsonl", ["".join(period) * 8] * 2)
    settings = {"data": data, "lengths": [16, 64, 128], "stride": 8}
    result = run(Perplexity, ByteModel(copies(40)), **settings)
    found = [score(result, "perplexity", length).value for length in settings["lengths"]]
    assert found == pytest.approx([256, 1 / 0.99, 1 / 0.99])
    curve = result.details["loss_by_position"]["periodic"]
    before = np.array(curve["tokens_before"])
    losses = np.array(curve["loss"])  # 64 pairs of positions
    assert np.allclose(losses[before > 40], -math.log(0.99)) and np.allclose(
        losses[before < 39], math.log(256)
    )


@pytest.fixture(scope="module")
def llama():
    return random_llama(bpe_tokenizer(bos=True, rows=BYTES), 64)


@torch.no_grad()
def test_perplexity_equals_a_plain_loop_over_transformers(llama, texts):
    length = 32
    stride = 8
    first = 57
    nats = 0.0
    tokens = 0
    size = 0
    for text in TEXTS:
        ids = llama.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 65:
            continue
        for end in range(first + stride, min(first + 4 * stride, len(ids)) + 1, stride):
            window = torch.tensor([[0, *ids[end - length : end]]])
            logits = llama.model(window[:, :-1]).logits[0, -stride:]
            nats += F.cross_entropy(logits, window[0, -stride:], reduction="sum").item()
            tokens = tokens + stride
            size = size + stride
    settings = {"data": texts, "lengths": [32, 64], "stride": stride, "windows": 4}
    result = run(Perplexity, llama, **settings)
    assert score(result, "loss", 32).value == pytest.approx(nats / tokens, abs=1e-6)
    assert score(result, "perplexity", 32).value == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    assert score(result, "bits_per_byte", 32).value == pytest.approx(
        nats / math.log(2) / size, abs=1e-6
    )
    assert score(result, "loss", 64).value != score(result, "loss", 32).value


@torch.no_grad()
def test_longlora_equals_the_published_program(llama, tmp_path):
    data = RANDOM.integers(1, 257, 700).astype("<u2")
    data.tofile(tmp_path / "test.bin")
    length = 48
    sliding_window = 10
    starts = list(range(0, len(data) - length, sliding_window))
    starts.pop()
    losses = []
    for start in starts:
        x = torch.from_numpy(data[start : start + length].astype(np.int64))[None]
        losses.append(llama.model(input_ids=x, labels=x.contiguous()).loss.item())
    settings = {"data": str(tmp_path / "test.bin"), "lengths": [length], "stride": sliding_window}
    result = run(Perplexity, llama, protocol="longlora", **settings)
    found = score(result, "loss", length, "test (longlora)")
    assert found.value == pytest.approx(np.mean(losses), abs=1e-6) and found.count == len(starts)
    assert score(result, "perplexity").value == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert found.low is None and "across documents" in result.notes[-1]


def test_indexed_datasets_and_compressed_texts_are_read_by_name(tmp_path):
    write_dataset(tmp_path / "tokens", documents=9)
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write('{"words": "' + "x" * 60 + '"}\n')
    data = {"numbers": str(tmp_path / "tokens"), "letters": str(tmp_path / "more.jsonl.gz")}
    result = run(
        Perplexity,
        ByteModel(uniform(9)),
        data=data,
        text_key="words",
        lengths=[16],
        stride=4,
        windows=100,
    )
    lengths = IndexedDatasetReader(tmp_path / "tokens").document_lengths()
    used = lengths[lengths > 16]
    numbers = score(result, "perplexity", 16, "numbers")
    assert numbers.value == pytest.approx(9) and numbers.count == len(used)
    tokens = {key: value["tokens"] for key, value in result.examples.items()}
    assert sum(count for key, count in tokens.items() if key.startswith("numbers")) == sum(
        used - 13
    )
    assert score(result, "bits_per_byte").group == "letters", "the bytes of token ids are not known"
    assert score(result, "perplexity", 16, "letters").low is None, "one document gives no interval"


@pytest.mark.parametrize("dtype, vocab_size", [("uint16", 65_536), ("uint32", 128_256)])
def test_a_file_of_token_ids_is_read_with_its_type(tmp_path, dtype, vocab_size):
    ids = np.arange(vocab_size - 40, vocab_size, dtype=np.dtype(dtype).newbyteorder("<"))
    ids.tofile(tmp_path / "ids.bin")
    model = ByteModel(uniform(vocab_size), vocab_size=vocab_size)
    settings = {"data": str(tmp_path / "ids.bin"), "lengths": [16], "stride": 4}
    run(Perplexity, model, token_dtype=dtype, **settings)
    assert set(sum(model.scored, [])) == set(ids[1:])


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_of_a_dataset_is_refused_with_the_datasets_prefix(tmp_path, ending):
    write_dataset(tmp_path / "a")
    with pytest.raises(
        ConfigError, match=f"a file of the indexed dataset {tmp_path}/a; give {tmp_path}/a, without"
    ):
        find_sources(f"{tmp_path}/a{ending}", None, "uint16", "perplexity")


def test_negative_ids_of_a_dataset_are_refused(tmp_path):
    write_documents(tmp_path / "a", [[1, 2, -1, 3]], "<i4")
    (source,) = find_sources(f"{tmp_path}/a", None, "uint16", "perplexity")
    with pytest.raises(
        FileError, match="token 2 of document 0 is -1, outside the model's vocabulary"
    ):
        long_documents(source, ByteModel(uniform), "text", 2, None)


def test_default_lengths_come_from_the_models_configuration(texts, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 32}'
    )
    (tmp_path / "tokenizer.json").touch()
    info = find_model(str(tmp_path), "gpt2").info
    task = Perplexity(Perplexity.Settings(data=texts))
    task.check(info)
    assert task.lengths(info) == [8, 16, 32] and info.config["model_type"] == "gpt2"


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_place(texts):
    with pytest.raises(ValueError, match="infinite or NaN loss in texts/0, tokens 0 to 17"):
        run(
            Perplexity,
            ByteModel(lambda before, token: math.nan),
            data=texts,
            lengths=[16],
            stride=4,
        )


def test_pictures_show_every_model_and_describe_it(texts):
    results = {
        label: run(Perplexity, ByteModel(uniform(size)), data=texts, lengths=[16, 64], stride=8)
        for label, size in (("nine", 9), ("twenty", 20))
    }
    perplexity, position = Perplexity.draw(results)
    assert [perplexity.name, position.name] == ["perplexity", "perplexity-by-position"]
    assert (
        "nine: 9 at 16 tokens, 9 at 64 tokens; twenty: 20 at 16 tokens"
        in perplexity.alternative_text
    )
    drawn = {line.get_label(): list(line.get_ydata()) for line in perplexity.figure.axes[0].lines}
    assert drawn["nine"] == pytest.approx([9, 9]) and drawn["twenty"] == pytest.approx([20, 20])
    assert (
        len(position.figure.axes[0].lines) == 2
        and perplexity.figure.axes[0].get_yscale() == "linear"
    )
    results["many"] = run(
        Perplexity, ByteModel(uniform(100)), data=texts, lengths=[16, 64], stride=8
    )
    assert Perplexity.draw(results)[0].figure.axes[0].get_yscale() == "log"
    assert Perplexity.draw({"nine": result_of(Summary([]))}) == []


def test_a_split_selects_only_validation_documents(tmp_path):
    write_dataset(tmp_path / "tokens", documents=10)
    settings = {"data": str(tmp_path / "tokens"), "lengths": [6], "stride": 4, "windows": 1}
    reader = IndexedDatasetReader(tmp_path / "tokens")
    model = ByteModel(uniform(100))
    run(Perplexity, model, split="60,30,10", **settings)
    held_out = [token for number in (6, 7, 8) for token in reader.document(number)[1:10]]
    assert [token for window in model.scored for token in window] == held_out
