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
    assert reader.damage() is None
    assert reader.invalid_id(vocab_size=9) is None
    assert reader.invalid_id(vocab_size=8).startswith("token 8 of the dataset has the id 8, but")


@pytest.mark.parametrize("dtype", ["i1", "<i2", "<i4", "<i8"])
def test_negative_ids_are_found_without_a_tokenizer(tmp_path, dtype):
    write_documents(
        tmp_path / "data",
        [[5, 6], [], [7, -1, -100]],
        dtype,
    )
    problem = IndexedDatasetReader(tmp_path / "data").invalid_id()
    assert problem == "token 3 of the dataset has the id -1, but ids cannot be negative"


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


def write_until(prefix, documents, killed):
    """Add and mark two documents, add the others, and end like an interrupted or killed process."""
    writer = IndexedDatasetWriter(prefix, np.dtype("<u2"), source={"a": 1}, inputs=[[7, 1], None])
    add(writer, documents[:2])
    writer.mark_completed(1)
    add(writer, documents[2:])
    if killed:
        writer._bin.file.close()
        writer._idx.file.close()
    else:
        writer.__exit__()


def add(writer, documents):
    for document in documents:
        writer.add(document.astype(writer.dtype).tobytes(), np.array([len(document)]))


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("change", [None, "source", "inputs", "files", "malformed"])
def test_a_writer_continues_unfinished_files_that_fit(
    tmp_path, documents, monkeypatch, killed, change
):
    monkeypatch.setattr(indexed_dataset, "_SAVE_SECONDS", -1.0)
    write_documents(tmp_path / "whole", documents)
    write_until(tmp_path / "data", documents, killed)
    if change == "files":
        (tmp_path / "data.bin.partial").unlink()
    elif change == "malformed":
        (tmp_path / "data.progress").write_text("[]")
    with IndexedDatasetWriter(
        tmp_path / "data",
        np.dtype("<u2"),
        source={"a": 2 if change == "source" else 1},
        inputs=[[7, 2 if change == "inputs" else 1], [8, 1]],
    ) as writer:
        assert (writer.completed_files, writer.documents) == ((0, 0) if change else (1, 2))
        assert (tmp_path / "data.progress").exists() == (change is None)
        add(writer, documents[writer.documents :])
        writer.finish()
    assert read_pair(tmp_path / "data") == read_pair(tmp_path / "whole")
    assert len(list(tmp_path.iterdir())) == 4


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
    assert IndexedDatasetReader(tmp_path / "data").damage() is None


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Writing beyond the limit fails like a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError):
            write_documents(tmp_path / "data", [np.zeros(1 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "part, index, value, problem",
    [
        ("lengths", 2500, -1, "sequence 2500 has a negative length"),
        ("lengths", 2999, 7, "bytes, but its index describes"),
        ("pointers", 1000, 3, "the pointer of sequence 1000 is 3, but the previous sequence"),
        ("document_indices", 1000, 2000, "do not increase from 0 to 3000 sequences"),
        ("document_indices", 3000, 2999, "the document indices do not increase"),
    ],
)
def test_damage_is_found_in_every_block_of_an_index(
    tmp_path, monkeypatch, part, index, value, problem
):
    monkeypatch.setattr(indexed_dataset, "BLOCK", 1000)
    write_documents(tmp_path / "data", [[0]] * 3000)
    reader = IndexedDatasetReader(tmp_path / "data")
    array = np.array(getattr(reader, part))
    array[index] = value
    setattr(reader, part, array)
    assert problem in reader.damage()
