"""`data.long_documents`: the documents of the samples, their order, and the epochs."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from datasets_for_tests import write_documents
from megatron.core.datasets.indexed_dataset import IndexedDataset
from models import small_model

from megatron_tape.config.data import DataConfig, LongDocumentSettings
from megatron_tape.config.schema import RunConfig, replace_settings
from megatron_tape.config.train import TrainConfig
from megatron_tape.data.batches import build_batches
from megatron_tape.data.megatron_datasets import DocumentWindows, divide_documents
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.layout import initialize_distributed

LENGTH = 32
EOD = 0
NAMES = ("books", "web", "notes")


def write(prefix, lengths, first_token):
    """Write documents that count upwards from `first_token`, with EOD at the end of each."""
    tokens = np.arange(first_token, first_token + sum(lengths), dtype="<i4")
    tokens[np.cumsum(lengths) - 1] = EOD
    write_documents(
        prefix,
        np.split(tokens, np.cumsum(lengths)[:-1]),
        "<i4",
    )


@pytest.fixture(scope="module")
def lengths():
    random = np.random.RandomState(0)
    return {
        "books": random.randint(20, 150, 200).tolist(),
        "web": random.randint(2, 60, 400).tolist(),
        "notes": random.randint(2, 30, 300).tolist(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("data")
    for index, name in enumerate(NAMES):
        write(folder / name, lengths[name], 100_000 * index + 1)
    return folder


@pytest.fixture
def configure(folder, tmp_path):
    def make(names, minimum, share, steps=50, weights=None, **data):
        prefixes = [str(folder / name) for name in names]
        return RunConfig(
            model=small_model(seq_length=LENGTH, vocab_size=10**6),
            data=DataConfig(
                prefix=prefixes if weights is None else dict(zip(prefixes, weights)),
                split="90,10,0",
                cache_directory=str(tmp_path / "cache"),
                reset_attention_mask=True,
                long_documents=LongDocumentSettings(minimum=minimum, share=share),
                **data,
            ),
            train=TrainConfig(
                steps=steps, global_batch_size=4, eval_interval=5, eval_steps=2, precision="fp32"
            ),
        )

    return make


def build(config, *place):
    return build_batches(config, initialize_distributed(1), EOD, *place)


def origins(rows, lengths):
    """Return each sequence's dataset, and the index and length of each token's document."""
    found = []
    for row in rows:
        index, position = np.divmod(row[row != EOD] - 1, 100_000)
        name = NAMES[index[0]]
        documents = np.searchsorted(np.cumsum(lengths[name]), position, side="right")
        found.append((name, documents, np.array(lengths[name])[documents]))
    return found


def tokens_of(batches):
    return [row.numpy() for batch in batches.training() for row in batch["tokens"]]


def test_the_share_comes_from_long_documents_and_the_rest_from_the_others(configure, lengths):
    config = configure(["books", "web"], 64, 0.6)
    rows = tokens_of(build(config))
    assert len(rows) == 200
    long = [bool((sizes >= 64).all()) for _, _, sizes in origins(rows, lengths)]
    short = [bool((sizes < 64).all()) for _, _, sizes in origins(rows, lengths)]
    assert all(a != b for a, b in zip(long, short))
    assert sum(long) == 120
    assert all(abs(sum(long[: i + 1]) - 0.6 * (i + 1)) <= 1 for i in range(200))  # spread evenly
    # The last tenth of the documents is for validation, which data.long_documents does not affect.
    training = {"books": 180, "web": 360}
    assert all((documents < training[name]).all() for name, documents, _ in origins(rows, lengths))
    validation = [batch["tokens"].tolist() for batch in build(config).evaluation()]
    config = replace_settings(config, {"data.long_documents": None})
    assert validation == [batch["tokens"].tolist() for batch in build(config).evaluation()]


def test_datasets_keep_their_proportions_among_long_documents_and_among_the_others(
    configure, lengths
):
    names = ["books", "web", "notes"]
    config = configure(names, 40, 0.5, 100, weights=[0.2, 0.2, 0.6])
    counts = {name: [0, 0] for name in names}
    for name, _, sizes in origins(tokens_of(build(config)), lengths):
        counts[name][int(sizes.max() < 40)] += 1
    # notes has no document of 40 tokens, so the other two datasets provide all long documents.
    assert counts == {
        "books": [100, 40],
        "web": [100, 40],
        "notes": [0, 120],
    }

    found = origins(
        tokens_of(build(configure(["books", "web"], 40, 0.5, 100))),
        lengths,
    )
    long = {}
    for name in ("books", "web"):
        training = np.array(lengths[name][: len(lengths[name]) * 9 // 10])
        long[name] = training[training >= 40].sum()
    drawn = sum(name == "books" and sizes.min() >= 40 for name, _, sizes in found)
    assert drawn == pytest.approx(
        200 * long["books"] / sum(long.values()),
        abs=1,
    )


def test_the_order_depends_on_the_seed_alone_and_is_exact_on_resume(configure):
    config = configure(["books", "web"], 64, 0.6)
    whole = tokens_of(build(config))
    config = replace_settings(config, {"data.num_workers": 2, "train.micro_batch_size": 2})
    assert np.array_equal(
        np.array(tokens_of(build(config, 20, 80))),
        np.array(whole[80:]),
    )
    config = replace_settings(config, {"train.seed": config.train.seed + 1})
    other = tokens_of(build(config))
    assert not np.array_equal(np.array(other), np.array(whole))


def test_an_epoch_has_every_token_once_and_windows_begin_with_their_documents(folder, lengths):
    dataset = IndexedDataset(str(folder / "books"))
    documents = np.flatnonzero(np.array(lengths["books"]) >= 30)
    divided = divide_documents(np.array(lengths["books"]), documents, LENGTH)
    windows = DocumentWindows(dataset, divided, LENGTH, seed=5)
    starts = np.cumsum(lengths["books"]) - lengths["books"] + 1
    used = np.concatenate(
        [np.arange(starts[d], starts[d] + lengths["books"][d] - 1) for d in documents]
    )
    orders = []
    per_epoch = windows.samples_per_epoch
    for epoch in range(2):
        samples = [windows[i] for i in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        for sample in samples:
            assert len(sample["tokens"]) == len(sample["labels"]) == LENGTH
            ends = sample["tokens"] == EOD
            assert torch.equal(
                sample["tokens"][1:][~ends[:-1]],
                sample["labels"][:-1][~ends[:-1]],
            )
            # After the end of a document, the label is the beginning of another one.
            assert set(sample["labels"][ends].tolist()) <= set(starts.tolist())
        inputs = torch.cat([sample["tokens"] for sample in samples]).numpy()
        inputs = inputs[inputs != EOD]
        assert len(set(inputs)) == len(inputs)
        assert set(inputs) <= set(used)
        # The last label of a window can be a token that is no input elsewhere; the last incomplete
        # window is dropped.
        assert len(used) - len(inputs) < LENGTH + len(documents)
        whole = [
            int(sample["tokens"][0]) for sample in samples if (sample["tokens"].diff() == 1).all()
        ]
        expected = [
            int(starts[d]) + LENGTH * k
            for d in documents
            for k in range((lengths["books"][d] - 1) // LENGTH)
        ]
        assert len(whole) >= len(expected)
        assert set(expected) <= set(whole)
        orders.append([int(sample["tokens"][0]) for sample in samples])
    assert orders[0] != orders[1]
    again = DocumentWindows(dataset, divided, LENGTH, seed=5)
    assert torch.equal(
        again[per_epoch + 3]["labels"],
        windows[per_epoch + 3]["labels"],
    )


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ([33], 1),
        ([65], 2),
        ([64, 20], 2),
        ([20, 13], 1),
        ([33, 33], 2),
    ],
)
def test_documents_of_borderline_lengths_fill_windows(tmp_path, sizes, expected):
    write(tmp_path / "data", sizes, 1)
    divided = divide_documents(np.array(sizes), np.arange(len(sizes)), LENGTH)
    windows = DocumentWindows(IndexedDataset(str(tmp_path / "data")), divided, LENGTH, seed=0)
    assert windows.samples_per_epoch == expected
    for index in range(2 * expected):
        assert len(windows[index]["tokens"]) == LENGTH


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def test_passes_are_those_of_the_batches(configure, lengths, caplog):
    caplog.set_level("INFO")
    rows = tokens_of(
        build(
            configure(
                ["books", "web"],
                40,
                0.5,
                100,
                weights=[0.3, 0.7],
            )
        )
    )
    drawn = Counter((name, bool(sizes.min() >= 40)) for name, _, sizes in origins(rows, lengths))
    for name in ("books", "web"):
        training = np.array(lengths[name][: len(lengths[name]) * 9 // 10])
        for kind, is_in_pool in (("long", training >= 40), ("other", training < 40)):
            pattern = rf"trains (\S+) epochs on the {kind} documents of \S*/{name}\n"
            (epochs,) = re.findall(pattern, caplog.text)
            expected = drawn[name, kind == "long"] * LENGTH / training[is_in_pool].sum()
            assert float(epochs) == pytest.approx(expected, abs=0.02)
    assert not messages(caplog, "WARNING")


@pytest.mark.parametrize(
    "name, minimum, key, problem",
    [("web", 64, "minimum", "at least 64 tokens"), ("books", 20, "share", "less than 20 tokens")],
)
def test_pools_without_a_sequence_are_refused(configure, name, minimum, key, problem):
    with pytest.raises(ConfigError) as error:
        build(configure([name], minimum, 0.6))
    assert error.value.key == f"data.long_documents.{key}"
    assert problem in error.value.problem
