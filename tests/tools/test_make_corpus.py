import json

import pyarrow as pa
import pyarrow.parquet
from tool_runs import write_lines


def read_texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_standard_library_is_written_in_order_and_the_same_twice(tmp_path, run_tool, texts):
    first = tmp_path / "a.jsonl"
    second = tmp_path / "b.jsonl"
    run_tool("make_corpus", "stdlib", "--output", second)
    records = [json.loads(line) for line in second.open(encoding="utf-8")]
    paths = [record["path"] for record in records]
    assert paths == sorted(paths) and "argparse.py" in paths
    assert not any("site-packages" in path for path in paths)
    assert {record["path"]: record["text"] for record in records}["argparse.py"] == texts[0]
    first.write_text("old")
    assert (
        "exists; pass --overwrite"
        in run_tool("make_corpus", "stdlib", "--output", first, code=2).stderr
    )
    run_tool("make_corpus", "stdlib", "--output", first, "--overwrite")
    assert first.read_bytes() == second.read_bytes()
    run_tool("make_corpus", "stdlib", "--shuffle", 7, "--output", first, "--overwrite")
    shuffled = [json.loads(line)["path"] for line in first.open(encoding="utf-8")]
    assert shuffled != paths and sorted(shuffled) == paths


def test_the_files_of_a_folder_become_one_document(tmp_path, run_tool):
    root = tmp_path / "checkout"
    output = tmp_path / "out.jsonl"
    for name in (
        "a.md",
        "b/two.py",
        "b/one.py",
        "b/picture.png",
        "b/c/three.py",
        ".git/hidden.py",
        "b/empty.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if "empty" in name else f"text of {name}\n")
    (root / "b" / "binary.py").write_bytes(b"\xff\xfe\x00")
    (root / "b" / "d").mkdir()
    (root / "b" / "d" / "latin.py").write_bytes("# coding: latin-1\nß\n".encode("latin-1"))
    assert (
        "b/binary.py is not text"
        in run_tool("make_corpus", "folders", root, "--output", output).stderr
    )
    one_and_two = "# b/one.py\ntext of b/one.py\n\n# b/two.py\ntext of b/two.py\n"
    declared = "# b/d/latin.py\n# coding: latin-1\nß\n"
    assert read_texts(output) == [
        "# a.md\ntext of a.md\n",
        one_and_two,
        "# b/c/three.py\ntext of b/c/three.py\n",
        declared,
    ]
    written = run_tool(
        "make_corpus", "folders", root, "--suffixes", ".md", "--output", output, "--overwrite"
    )
    assert "out.jsonl: 1 document, " in written.stderr
    assert read_texts(output) == ["# a.md\ntext of a.md\n"]
    none = run_tool(
        "make_corpus", "folders", root, "--suffixes", ".c", "--output", tmp_path / "x.jsonl", code=2
    )
    assert "has no files that end in .c" in none.stderr
    missing = run_tool(
        "make_corpus", "folders", tmp_path / "none", "--output", tmp_path / "x.jsonl", code=2
    )
    assert "is not a directory" in missing.stderr and not (tmp_path / "x.jsonl").exists()


def test_too_large_documents_and_files_that_are_not_text_are_skipped(tmp_path, run_tool):
    (root := tmp_path / "checkout").mkdir()
    for name, sizes in {"a": [10], "b": [70, 70], "d": [60]}.items():
        (root / name).mkdir()
        for number, size in enumerate(sizes):
            (root / name / f"{number}.md").write_text("é" * (size // 2))
    (root / "d" / "e.py").write_text("# coding: unicode_escape\n\\ud800")
    options = ["--max-document-bytes", 130, "--output", tmp_path / "out.jsonl"]
    report = run_tool("make_corpus", "folders", root, *options).stderr
    assert read_texts(tmp_path / "out.jsonl") == ["# a/0.md\n" + "é" * 5]
    assert "skipped 1: more than 130 bytes in one document (b)" in report
    assert "skipped 1: a lone surrogate, which UTF-8 cannot encode (d)" in report
    write_lines(tmp_path / "a.jsonl", ["one", "a" * 130, "two", "three"])
    options += ["--overwrite", "--max-documents", 2]
    report = run_tool(
        "make_corpus", "hub", "json", "--data-files", tmp_path / "a.jsonl", *options
    ).stderr
    assert read_texts(tmp_path / "out.jsonl") == ["one", "two"]
    assert f"skipped 1: more than 130 bytes in one document ({tmp_path}/a.jsonl:2)" in report


def test_local_datasets_are_read_like_those_of_the_hub(tmp_path, run_tool):
    pa.parquet.write_table(
        pa.table({"text": ["one", "", "two\n", "three", "four"]}), tmp_path / "a.parquet"
    )
    options = ["--data-files", tmp_path / "*.parquet", "--streaming", "--max-documents", 3]
    run_tool("make_corpus", "hub", "parquet", *options, "--output", tmp_path / "out.jsonl")
    assert read_texts(tmp_path / "out.jsonl") == ["one", "two\n", "three"]


def test_a_text_file_is_one_document(tmp_path, run_tool):
    for name, text in (("a", "one\n\ntwo\n"), ("b", "three")):
        (tmp_path / f"{name}.txt").write_text(text)
    run_tool(
        "make_corpus",
        "hub",
        "text",
        "--data-files",
        tmp_path / "*.txt",
        "--output",
        tmp_path / "out.jsonl",
    )
    assert read_texts(tmp_path / "out.jsonl") == ["one\n\ntwo\n", "three"]


def test_wrong_names_and_columns_leave_no_output(tmp_path, run_tool):
    write_lines(tmp_path / "a.jsonl", ["one"])
    output = tmp_path / "out.jsonl"
    options = ["--data-files", tmp_path / "a.jsonl", "--output", output]
    error = run_tool("make_corpus", "hub", "json", "--text-key", "body", *options, code=2).stderr
    assert f"{tmp_path}/a.jsonl:1 has no key 'body', only ['text']" in error
    error = run_tool("make_corpus", "hub", f"{tmp_path}/none", "--output", output, code=2).stderr
    assert f"error: {tmp_path}/none is no directory" in error
    error = run_tool(
        "make_corpus", "hub", tmp_path, "--config-name", "big", "--output", output, code=2
    ).stderr
    assert (
        "BuilderConfig 'big' not found. Available: ['default']; choose one with --config-name"
        in error
    )
    error = run_tool("make_corpus", "hub", "json", "--split", "nowhere", *options, code=2).stderr
    assert "error: --split is 'nowhere', but json (default) has only ['train']" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
