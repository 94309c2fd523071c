import numpy as np
import pytest

from megatron_tape.data.indexed_dataset import IndexedDatasetWriter

HEADER = 34


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, tokenizer_path, run_tool):
    prefix = tmp_path_factory.mktemp("whole") / "data"
    run_tool("preprocess_data", "--input", corpus, "--tokenizer", tokenizer_path, "--output-prefix", prefix)
    return prefix


@pytest.fixture
def copy(whole, tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"data{ending}").write_bytes(whole.with_suffix(ending).read_bytes())
    return tmp_path / "data"


def test_counts_lengths_and_first_documents_are_shown(whole, tokenizer_path, run_tool, texts):
    output = run_tool(
        "inspect_dataset", whole, "--tokenizer", tokenizer_path, "--documents", 100, "--tokens", 10**6
    ).stdout
    assert f"documents  {len(texts)}\n" in output
    assert "dtype      uint16\n" in output
    assert "length     min 1, median" in output
    for text in texts:
        assert f" tokens:\n{text}\n" in output.replace("\r\n", "\n") or "\r\n" in text


def test_ids_are_shown_without_a_tokenizer(tmp_path, run_tool):
    with IndexedDatasetWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        writer.add(np.array([5, 6, 7], dtype="<u2").tobytes(), np.array([3]))
        writer.finish()
    assert run_tool("inspect_dataset", tmp_path / "data", "--tokens", 2).stdout.endswith("3 tokens:\n5 6 ...\n")


def damage(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    "offset, data, message",
    [
        (0, b"X", "header is damaged"),
        (9, b"\2", "has version 2"),
        (17, b"\77", "unknown dtype code 63"),
        (18, b"\3", "cut off or damaged"),
        (HEADER, b"\1\0\0\0", "the index counts"),
        (HEADER + 10 * 4 + 8, b"\0", "the pointer of sequence 1"),
        (HEADER + 10 * 12, b"\1", "document indices do not rise"),
    ],
)
def test_damaged_index_is_named(copy, run_tool, offset, data, message):
    damage(copy.with_suffix(".idx"), offset, data)
    error = run_tool("inspect_dataset", copy, code=1).stderr
    assert message in error and "write" in error


def test_cut_off_files_are_named(copy, run_tool):
    content = copy.with_suffix(".bin").read_bytes()
    copy.with_suffix(".bin").write_bytes(content[:-2])
    assert "bytes where the index counts" in run_tool("inspect_dataset", copy, code=1).stderr
    copy.with_suffix(".idx").write_bytes(copy.with_suffix(".idx").read_bytes()[:20])
    assert "header is damaged" in run_tool("inspect_dataset", copy, code=1).stderr
    copy.with_suffix(".bin").unlink()
    assert "data.bin does not exist" in run_tool("inspect_dataset", copy, code=1).stderr


def test_ids_outside_the_vocabulary_are_named(copy, run_tool, tokenizer_path):
    damage(copy.with_suffix(".bin"), 6, b"\xff\xff")
    error = run_tool("inspect_dataset", copy, "--tokenizer", tokenizer_path, code=1).stderr
    assert "token 3 is 65535, outside the vocabulary of 800" in error
