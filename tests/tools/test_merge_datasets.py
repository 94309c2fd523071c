import numpy as np
from datasets_for_tests import write_documents
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tool_runs import read_pair, write_lines


def names(directory, start="out"):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(start))


def test_parts_contain_every_file_once_and_are_merged_by_a_pattern(preprocess, run_tool, tmp_path):
    for name in "abcde":
        write_lines(tmp_path / f"{name}.jsonl", [f"{name} {number}" for number in range(3)])
    for index in range(2):
        preprocess(tmp_path / "?.jsonl", "--part", f"{index}/2")
    run_tool(
        "merge_datasets", "--input", tmp_path / "out-*", "--output-prefix", tmp_path / "merged"
    )
    preprocess(*(tmp_path / f"{name}.jsonl" for name in "acebd"), prefix="single")
    assert read_pair(tmp_path / "merged") == read_pair(tmp_path / "single")
    parts = [
        f"out-0000{index}-of-00002.{ending}"
        for index in range(2)
        for ending in ("bin", "idx", "origin")
    ]
    assert names(tmp_path) == parts


def test_a_complete_part_is_kept_and_another_count_is_refused(preprocess, tmp_path):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", [name])
    preprocess(tmp_path / "?.jsonl", "--part", "1/2")
    index = tmp_path / "out-00001-of-00002.idx"
    before = index.stat().st_ino
    (tmp_path / "out-wide-00000-of-00003.idx").touch()  # of another dataset, out-wide
    assert "is complete already" in preprocess(tmp_path / "?.jsonl", "--part", "1/2").stderr
    assert index.stat().st_ino == before
    for options in ([tmp_path / "[ac].jsonl"], [tmp_path / "?.jsonl", "--no-append-eod"]):
        assert "was made from other files" in preprocess(*options, "--part", "1/2", code=2).stderr
    preprocess(tmp_path / "?.jsonl", "--part", "1/2", "--overwrite")
    assert index.stat().st_ino != before
    index.unlink()  # as if the process had been killed during the last rename
    assert "00002: 1 document, " in preprocess(tmp_path / "?.jsonl", "--part", "1/2").stderr
    for part, prefix, problem in (
        ("0/3", "out", "is not one of 3 parts"),
        ("2/2", "out", "is not I/N"),
        ("0/4", "other", "names only 3 files"),
    ):
        error = preprocess(tmp_path / "?.jsonl", "--part", part, prefix=prefix, code=2).stderr
        assert problem in error


def test_datasets_with_one_dtype_are_merged_in_the_given_order(run_tool, tmp_path):
    write_documents(tmp_path / "a", [[1, 2], [3]])
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(5, 9), [4])
    builder.finalize(str(tmp_path / "b.idx"))
    write_documents(tmp_path / "empty", [])
    inputs = [tmp_path / name for name in ("b", "empty", "a", "b")]
    run_tool("merge_datasets", "--input", *inputs, "--output-prefix", tmp_path / "ours")
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for path in inputs:
        if path.name != "empty":
            builder.add_index(str(path))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert read_pair(tmp_path / "ours") == read_pair(tmp_path / "theirs")
    assert names(tmp_path, "ours") == ["ours.bin", "ours.idx"]
    assert IndexedDataset(str(tmp_path / "ours")).document_indices.tolist() == [0, 2, 3, 4, 5, 7, 8]


def test_datasets_that_do_not_match_are_refused(run_tool, tmp_path):
    write_documents(tmp_path / "a", [[1, 2], [3]])
    write_documents(tmp_path / "b", [[1]], "<i4")
    write_documents(tmp_path / "empty", [])
    for message, inputs in {
        "b has int32 tokens, but": ["a", "b"],
        "none.idx does not exist": ["a", "none"],
        "have no documents": ["empty", "empty"],
    }.items():
        paths = [tmp_path / name for name in inputs]
        error = run_tool(
            "merge_datasets", "--input", *paths, "--output-prefix", tmp_path / "out", code=2
        ).stderr
        assert error.splitlines()[-1].startswith("error: ")
        assert message in error
        assert names(tmp_path) == []
    arguments = ["--input", tmp_path / "a", tmp_path / "empty", "--output-prefix", tmp_path / "a"]
    assert "a.idx exists; pass --overwrite" in run_tool("merge_datasets", *arguments, code=2).stderr
    before = read_pair(tmp_path / "a")
    run_tool("merge_datasets", *arguments, "--overwrite")
    assert read_pair(tmp_path / "a") == before
