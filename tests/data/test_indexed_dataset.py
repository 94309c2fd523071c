import resource
import tracemalloc

import numpy as np
import pytest
import torch
from datasets_for_tests import write_documents
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tool_runs import read_pair

from megatron_tape.data import indexed_dataset
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, IndexedDatasetWriter
from megatron_tape.errors import FileError


@pytest.fixture
def documents():
    random = np.random.default_rng(0)
    return [random.integers(0, 60000, size) for size in (1, 700, 3, 0, 64)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("block", [2, 1 << 18])
def test_bytes_equal_what_megatrons_builder_writes(tmp_path, documents, dtype, block, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "BLOCK", block)
    write_documents(tmp_path / "ours", documents, dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert read_pair(tmp_path / "ours") == read_pair(tmp_path / "theirs")


def test_documents_of_several_sequences_are_read(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.int32)
    builder.add_document(torch.arange(5), [2, 3])
    builder.add_document(torch.arange(5, 9), [4])
    builder.finalize(str(tmp_path / "data.idx"))
    reader = IndexedDatasetReader(tmp_path / "data")
    assert [reader.document(i).tolist() for i in range(len(reader))] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
    ]
    assert reader.document_lengths().tolist() == [5, 4]
    assert list(reader.problems()) == []
    assert reader.invalid_id(vocab_size=9) is None
    assert (
        reader.invalid_id(vocab_size=8)
        == "token 8, in document 1, has the id 8, but the tokenizer has 8 ids"
    )


@pytest.mark.parametrize("dtype", ["i1", "<i2", "<i4", "<i8"])
def test_negative_ids_are_found_without_a_tokenizer(tmp_path, dtype):
    write_documents(tmp_path / "data", [[5, 6], [], [7, -1, -100]], dtype)
    assert (
        IndexedDatasetReader(tmp_path / "data").invalid_id()
        == "token 3, in document 2, has the id -1, but ids cannot be negative"
    )


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_numbers_that_are_not_integers_are_refused(tmp_path, dtype):
    write_documents(tmp_path / "data", [[5, 6]], dtype)
    with pytest.raises(FileError, match=f"{np.dtype(dtype).name}, but token ids are integers"):
        IndexedDatasetReader(tmp_path / "data")


def test_new_and_old_files_never_make_a_pair(tmp_path, documents, monkeypatch):
    write_documents(tmp_path / "data", documents)

    def killed(file):
        raise SystemExit

    monkeypatch.setattr(indexed_dataset.PartialFile, "publish", killed)
    with pytest.raises(SystemExit):
        write_documents(tmp_path / "data", documents[:2], overwrite=True)
    assert not (tmp_path / "data.idx").exists()
    monkeypatch.undo()
    with pytest.raises(FileError, match="data.bin exists"):
        write_documents(tmp_path / "data", documents[:2])
    write_documents(tmp_path / "data", documents[:2], overwrite=True)
    assert len(IndexedDatasetReader(tmp_path / "data")) == 2


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path):
    lengths = np.ones(10000, dtype=np.int32)
    tokens = np.zeros(10000, dtype="<u2").tobytes()
    with IndexedDatasetWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        tracemalloc.start()
        for _ in range(200):
            writer.add(tokens, lengths)
        writing = tracemalloc.get_traced_memory()[1]
        writer.finish()
        finishing = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # Two million documents take 40 MB of index.
    assert writing < 1e6
    assert finishing < 12e6
    assert (tmp_path / "data.idx").stat().st_size > 39e6
    assert list(IndexedDatasetReader(tmp_path / "data").problems()) == []


SOURCE = {"inputs": ["a", "b", "c"]}
INPUTS = [(7, 1), (7, 2), None]


def mark(*inputs):
    return {
        "inputs": list(inputs),
        "text_bytes": 7,
        "problems": {"empty text": 2},
        "places": {"empty text": ["a:1"]},
    }


def add(writer, documents):
    writer.add(
        np.concatenate(documents).astype("<u2").tobytes(),
        np.array([len(each) for each in documents]),
    )


def write_until(path, documents, killed, source=SOURCE):
    """Add two documents, mark them, add the others, and end like an interrupted or a killed
    process.
    """
    writer = IndexedDatasetWriter(path, np.dtype("<u2"), source=source)
    add(writer, documents[:2])
    writer.mark(mark([7, 1]))
    add(writer, documents[2:])
    if killed:
        writer._bin.leave()
        writer._idx.leave()
    else:
        writer.__exit__(None, None, None)


@pytest.mark.parametrize("killed", [False, True])
def test_the_next_writer_continues_after_the_last_mark(tmp_path, documents, monkeypatch, killed):
    monkeypatch.setattr(indexed_dataset, "_SAVE_SECONDS", -1.0)
    write_documents(tmp_path / "whole", documents)
    write_until(tmp_path / "data", documents, killed)
    assert not (tmp_path / "data.idx").exists() and (tmp_path / "data.progress").exists()
    with IndexedDatasetWriter(
        tmp_path / "data", np.dtype("<u2"), source=SOURCE, inputs=INPUTS
    ) as writer:
        assert writer.restored == mark([7, 1])
        assert (writer.documents, writer.tokens) == (2, 701)
        add(writer, documents[2:])
        writer.finish()
    assert read_pair(tmp_path / "data") == read_pair(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.glob("data.*")) == ["data.bin", "data.idx"]


@pytest.mark.parametrize(
    "change", ["source", "inputs", "dtype", "cut", "malformed", "negative", "lost"]
)
def test_unfinished_files_that_do_not_fit_are_replaced(tmp_path, documents, change):
    write_documents(tmp_path / "whole", documents, np.int32 if change == "dtype" else np.uint16)
    write_until(tmp_path / "data", documents, killed=False)
    progress = tmp_path / "data.progress"
    if change == "cut":
        (tmp_path / "data.bin.partial").write_bytes(b"")
    elif change == "malformed":
        progress.write_text("[]")
    elif change == "negative":
        progress.write_text(progress.read_text().replace('"documents": 2', '"documents": -2'))
    elif change == "lost":
        progress.unlink()
    source = {"inputs": ["a"]} if change == "source" else SOURCE
    dtype = np.dtype("<i4" if change == "dtype" else "<u2")
    inputs = [(7, 9), *INPUTS[1:]] if change == "inputs" else INPUTS
    with IndexedDatasetWriter(tmp_path / "data", dtype, source=source, inputs=inputs) as writer:
        assert (writer.restored, writer.documents, writer.tokens) == (None, 0, 0)
        writer.add(
            np.concatenate(documents).astype(dtype).tobytes(),
            np.array([len(each) for each in documents]),
        )
        writer.finish()
    assert read_pair(tmp_path / "data") == read_pair(tmp_path / "whole")


@pytest.mark.parametrize("between", ["other source", "no source"])
def test_documents_of_another_source_are_never_continued(tmp_path, documents, monkeypatch, between):
    """A killed writer must leave nothing that looks like the interrupted writer before it."""
    monkeypatch.setattr(indexed_dataset, "_SAVE_SECONDS", -1.0)
    write_until(tmp_path / "data", documents, killed=True)
    monkeypatch.undo()
    other = None if between == "no source" else {"inputs": ["another"]}
    second = IndexedDatasetWriter(tmp_path / "data", np.dtype("<u2"), source=other)
    add(second, [np.zeros(5000), np.ones(3)])
    second._bin.leave()
    second._idx.leave()
    with IndexedDatasetWriter(
        tmp_path / "data", np.dtype("<u2"), source=SOURCE, inputs=INPUTS
    ) as writer:
        assert (writer.restored, writer.documents, writer.tokens) == (None, 0, 0)


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_full_disk_keeps_the_documents_of_the_last_mark(
    tmp_path, documents, monkeypatch, is_marked
):
    monkeypatch.setattr(indexed_dataset, "_SAVE_SECONDS", -1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        pytest.raises(OSError),
        IndexedDatasetWriter(
            tmp_path / "data", np.dtype("<u2"), source=SOURCE, inputs=INPUTS
        ) as writer,
    ):
        add(writer, documents[:2])
        if is_marked:
            writer.mark(mark([7, 1]))
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (1 << 20, hard)
        )  # writing beyond it fails like a full disk
        try:
            add(writer, [np.zeros(1 << 18)])
            add(writer, [np.zeros(1 << 20)])
            writer._bin.sync()
        finally:
            # Leave the writer under the limit, too.
            writer.__exit__(None, None, None)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if not is_marked:
        assert list(tmp_path.iterdir()) == []
        return
    write_documents(tmp_path / "whole", documents)
    with IndexedDatasetWriter(
        tmp_path / "data", np.dtype("<u2"), source=SOURCE, inputs=INPUTS
    ) as writer:
        assert writer.restored == mark([7, 1])
        add(writer, documents[2:])
        writer.finish()
    assert read_pair(tmp_path / "data") == read_pair(tmp_path / "whole")


def test_without_a_mark_nothing_is_left(tmp_path, documents):
    with IndexedDatasetWriter(
        tmp_path / "data", np.dtype("<u2"), source=SOURCE, inputs=INPUTS
    ) as writer:
        add(writer, documents)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(indexed_dataset, "BLOCK", 1000)


@pytest.mark.parametrize(
    "part, index, value, problem",
    [
        ("lengths", 2500, -1, "sequence 2500 has a negative length"),
        ("lengths", 2999, 7, "bytes, but its index describes"),
        (
            "pointers",
            1000,
            3,
            "the pointer of sequence 1000 is 3, but the previous sequence does not end there",
        ),
        ("document_indices", 1000, 2000, "do not increase from 0 to the number of sequences, 3000"),
        ("document_indices", 3000, 2999, "the document indices do not increase"),
    ],
)
def test_damage_is_found_in_every_block_of_an_index(
    tmp_path, small_blocks, part, index, value, problem
):
    with IndexedDatasetWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        writer.add(bytes(2 * 3000), np.ones(3000, np.int32))
        writer.finish()
    reader = IndexedDatasetReader(tmp_path / "data")
    array = np.array(getattr(reader, part))
    array[index] = value
    setattr(reader, part, array)
    assert problem in next(reader.problems())
