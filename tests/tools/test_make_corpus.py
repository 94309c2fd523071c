import json


def read_texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_standard_library_is_written_in_order_and_the_same_twice(tmp_path, run_tool, texts):
    first = tmp_path / "a.jsonl"
    second = tmp_path / "b.jsonl"
    run_tool("make_corpus", "stdlib", "--output", second)
    records = [json.loads(line) for line in second.open(encoding="utf-8")]
    paths = [record["path"] for record in records]
    assert paths == sorted(paths)
    assert "argparse.py" in paths
    assert not any("site-packages" in path for path in paths)
    assert {record["path"]: record["text"] for record in records}["argparse.py"] == texts[0]
    first.write_text("old")
    error = run_tool("make_corpus", "stdlib", "--output", first, code=2).stderr
    assert "exists; pass --overwrite" in error
    run_tool("make_corpus", "stdlib", "--output", first, "--overwrite")
    assert first.read_bytes() == second.read_bytes()
    run_tool("make_corpus", "stdlib", "--shuffle", 7, "--output", first, "--overwrite")
    shuffled = [json.loads(line)["path"] for line in first.open(encoding="utf-8")]
    assert shuffled != paths
    assert sorted(shuffled) == paths


def test_the_files_of_a_folder_become_one_document(tmp_path, run_tool):
    root = tmp_path / "checkout"
    output = tmp_path / "out.jsonl"
    names = ["a.md", "b/two.py", "b/one.py", "b/picture.png", "b/c/three.py", ".git/hidden.py"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n")
    (root / "b" / "empty.py").touch()
    (root / "b" / "binary.py").write_bytes(b"\xff\xfe\x00")
    (root / "b" / "d").mkdir()
    (root / "b" / "d" / "latin.py").write_bytes("# coding: latin-1\nß\n".encode("latin-1"))
    report = run_tool("make_corpus", "folders", root, "--output", output).stderr
    assert "b/binary.py is not text" in report
    one_and_two = "# b/one.py\ntext of b/one.py\n\n# b/two.py\ntext of b/two.py\n"
    declared = "# b/d/latin.py\n# coding: latin-1\nß\n"
    assert read_texts(output) == [
        "# a.md\ntext of a.md\n",
        one_and_two,
        "# b/c/three.py\ntext of b/c/three.py\n",
        declared,
    ]
    options = ["--suffixes", ".md", "--output", output, "--overwrite"]
    assert "out.jsonl: 1 document, " in run_tool("make_corpus", "folders", root, *options).stderr
    assert read_texts(output) == ["# a.md\ntext of a.md\n"]
    for folder, problem in ((root, "has no files that end in .c"), (tmp_path / "no", "is not a")):
        options = ["--suffixes", ".c", "--output", tmp_path / "x.jsonl"]
        assert problem in run_tool("make_corpus", "folders", folder, *options, code=2).stderr
    assert not (tmp_path / "x.jsonl").exists()


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
