import gzip
import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets_for_tests import write_documents
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tool_runs import read_pair, write_lines

from megatron_tape.data import raw_chunks
from megatron_tape.data.documents import parse_chunk
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.raw_chunks import FilePart, read_chunks
from megatron_tape.data.shards import Shard, find_shards, read_origin
from megatron_tape.errors import ConfigError


@pytest.fixture
def mixed(tmp_path, texts):
    """A directory of every format, with small, empty and awkward files, sorted so that formats alternate."""
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", texts[:3])
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(b'{"text": "gz %d"}\n' % i for i in range(9))))
    (source / "c.json").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n{"text": "no end of line"}')
    (source / "d.txt").write_text(texts[3], encoding="utf-8", newline="")
    (source / "e.jsonl").touch()
    pa.parquet.write_table(pa.table({"text": texts[4:6]}), source / "f.parquet", row_group_size=1)
    (source / "g.jsonl").write_bytes(b'{"text": "x"}\n')
    write_lines(source / "h.jsonl", [f"line {i} " * (i % 7 + 1) for i in range(200)])
    (source / "i.jsonl").touch()
    return source / "*"


@pytest.fixture
def merge(run_tool, tmp_path):
    return lambda *options, prefix="out", code=0: run_tool(
        "merge_datasets", "--shards", tmp_path / prefix, *options, code=code
    )


@pytest.fixture
def two_shards(preprocess, tmp_path):
    """The two shards of a small corpus that `corpus.jsonl` holds."""
    write_lines(tmp_path / "corpus.jsonl", ["a", "b", "c", "d"])
    for index in range(2):
        preprocess(tmp_path / "corpus.jsonl", "--shard", f"{index}/2")
    return tmp_path / "corpus.jsonl"


def names(directory, start="out"):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(start))


def read(parts, chunk_bytes=50):
    """All texts, in order, with the place of each, and all problems."""
    found, bad = [], []
    for chunk in read_chunks(parts, "text", chunk_bytes):
        texts, numbers, problems = parse_chunk(chunk, "text")
        found += [(text, str(chunk.place(number))) for text, number in zip(texts, numbers)]
        bad += [(str(place), reason) for reason, places in problems.examples.items() for place in places]
    return found, sorted(bad)


@pytest.mark.parametrize("count", [1, 3])
def test_merged_shards_are_byte_for_byte_what_one_process_writes(preprocess, merge, mixed, tmp_path, count):
    preprocess(mixed, "--append-eod", prefix="single")
    for index in reversed(range(count)):
        preprocess(mixed, "--append-eod", "--shard", f"{index}/{count}")
    merge("--remove-shards")
    assert read_pair(tmp_path / "out") == read_pair(tmp_path / "single")
    assert names(tmp_path) == ["out.bin", "out.idx", "out.origin"]


def test_cuts_at_every_byte_keep_every_line_and_its_number(tmp_path):
    lines = [b'{"text": "a"}', b"", b'{"text": "b"}\r', b"", b"", b"x", b'{"text": "cc"}']
    for name, end in (("with.jsonl", b"\n"), ("without.jsonl", b"")):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + end)
        size = path.stat().st_size
        whole = read([FilePart(str(path))])
        assert len(whole[0]) + len(whole[1]) == sum(map(bool, lines))
        for cut in range(1, size):
            raw_chunks.lines_before.cache_clear()
            parts = [FilePart(str(path), 0, cut), FilePart(str(path), cut, size)]
            assert read(parts) == whole, cut


def test_random_cuts_of_random_files(tmp_path):
    draw = random.Random(0)
    for trial in range(60):
        paths = []
        for number in range(draw.randrange(1, 5)):
            path = tmp_path / f"{trial}-{number}.{draw.choice(['jsonl', 'json', 'txt', 'jsonl.gz'])}"
            lines = [
                b'{"text": "%s"}' % (b"t" * draw.randrange(0, 40)) if draw.random() < 0.8 else b"  "
                for _ in range(draw.randrange(0, 8))
            ]
            content = draw.choice([b"\n", b"\r\n"]).join(lines) + draw.choice([b"", b"\n"])
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
            paths.append(str(path))
        count = draw.choice([1, 2, 3, 5, 8, 13, 200])
        parts = [part for index in range(count) for part in Shard(index, count).cut(paths)]
        assert read(parts, chunk_bytes=draw.choice([1, 30, 1000])) == read([FilePart(path) for path in paths])


def test_empty_text_file_at_the_end_is_some_shards_error(preprocess, tmp_path):
    write_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.txt").touch()
    preprocess(tmp_path / "*.*", "--shard", "0/2")
    assert "b.txt cannot be used: empty text" in preprocess(tmp_path / "[ab].*", "--shard", "1/2", code=2).stderr


def test_bad_line_of_a_later_shard_is_named_by_its_line_in_the_file(preprocess, tmp_path):
    write_lines(tmp_path / "a.jsonl", ["a"] * 20)
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b"bad\n")
    error = preprocess(tmp_path / "a.jsonl", "--shard", "2/3", code=2).stderr
    assert f"error: {tmp_path}/a.jsonl:21 cannot be used: invalid JSON; repair or split it" in error
    assert names(tmp_path) == []


def test_empty_shards_are_not_an_error_but_an_empty_whole_is(preprocess, merge, tmp_path):
    write_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.jsonl").touch()
    for index in range(2):
        preprocess(tmp_path / "a.jsonl", "--shard", f"{index}/2")
        preprocess(tmp_path / "b.jsonl", "--shard", f"{index}/2", prefix="empty")
    merge("--remove-shards")
    assert len(IndexedDatasetReader(tmp_path / "out")) == 1
    assert "hold no document" in merge(prefix="empty", code=2).stderr
    assert "empty.idx" not in names(tmp_path, "empty")


def test_complete_shard_of_the_same_origin_is_kept(preprocess, merge, two_shards, tmp_path):
    index = tmp_path / "out.shard-00001-of-00002.idx"
    before = index.stat()
    for options in ([], ["--overwrite"]):
        report = preprocess(two_shards, "--shard", "1/2", *options).stderr
        assert f"{tmp_path}/out.shard-00001-of-00002 is complete already; nothing to do" in report
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    merge("--remove-shards")
    assert f"{tmp_path}/out is complete already" in preprocess(two_shards, "--shard", "1/2").stderr
    assert names(tmp_path) == ["out.bin", "out.idx", "out.origin"]


def test_shard_of_another_origin_is_refused_saying_what_differs(preprocess, two_shards, corpus, run_tool, tmp_path):
    run_tool("train_tokenizer", "--input", corpus, "--vocab-size", 700, "--output", tmp_path / "other.model")
    write_lines(tmp_path / "more.jsonl", ["more"])
    for reason, inputs, options in [
        ("append_eod False instead of True", "corpus.jsonl", ["--append-eod"]),
        ("text_key 'text' instead of 'body'", "corpus.jsonl", ["--text-key", "body"]),
        ("on_error 'stop' instead of 'skip'", "corpus.jsonl", ["--on-error", "skip"]),
        ("with another tokenizer", "corpus.jsonl", ["--tokenizer", tmp_path / "other.model"]),
        (f"without the input {tmp_path}/more.jsonl", "*o*.jsonl", []),
        (f"without the input {tmp_path}/more.jsonl", "more.jsonl", []),
    ]:
        error = preprocess(tmp_path / inputs, "--shard", "1/2", *options, code=2).stderr.splitlines()[-1]
        shard = f"{tmp_path}/out.shard-00001-of-00002"
        assert error == f"error: {shard} was made differently ({reason}); remove it or pass --overwrite"
    os.utime(two_shards, ns=(0, 0))
    error = preprocess(two_shards, "--shard", "1/2", code=2).stderr
    assert f"(from another version of {two_shards})" in error
    preprocess(two_shards, "--shard", "1/2", "--overwrite")


def test_inputs_in_another_order_are_another_origin(preprocess, merge, two_shards, tmp_path):
    more = tmp_path / "more.jsonl"
    write_lines(more, ["more"] * 9)
    preprocess(two_shards, more, "--shard", "0/2", prefix="order")
    preprocess(more, two_shards, "--shard", "1/2", prefix="order")
    assert "(with its inputs in another order)" in merge(prefix="order", code=2).stderr
    error = preprocess(two_shards, more, "--shard", "1/2", prefix="order", code=2).stderr
    assert "was made differently (with its inputs in another order)" in error


def test_whole_dataset_of_another_origin_is_in_the_way_unless_overwritten(preprocess, merge, two_shards, tmp_path):
    preprocess(two_shards)
    single = read_pair(tmp_path / "out")
    for error in (preprocess(two_shards, "--shard", "1/2", code=2).stderr, merge(code=2).stderr):
        assert "was made differently (without --shard); remove it or pass --overwrite" in error
    merge("--overwrite")
    assert read_pair(tmp_path / "out") == single
    error = preprocess(two_shards, "--shard", "1/2", "--append-eod", code=2).stderr
    assert f"{tmp_path}/out was made differently" in error
    preprocess(two_shards, "--overwrite")
    assert "inputs" not in json.loads((tmp_path / "out.origin").read_text())


def test_shard_that_a_killed_process_half_published_is_made_again(preprocess, merge, two_shards, tmp_path):
    preprocess(two_shards, prefix="single")
    (tmp_path / "out.shard-00001-of-00002.idx").unlink()
    (tmp_path / "out.shard-00001-of-00002.bin").write_bytes(b"half")
    assert "lacks 1 of its 2 shards" in merge(code=2).stderr
    preprocess(two_shards, "--shard", "1/2")
    merge()
    assert read_pair(tmp_path / "out") == read_pair(tmp_path / "single")


def test_merge_that_was_killed_while_it_removed_shards_is_completed(merge, two_shards, tmp_path):
    merge()
    (tmp_path / "out.shard-00000-of-00002.idx").unlink()
    assert "is complete already" in merge("--remove-shards").stderr
    assert names(tmp_path) == ["out.bin", "out.idx", "out.origin"]
    assert "has no shards; nothing to do" in merge("--remove-shards").stderr


def test_merge_names_what_is_wrong_with_shards(preprocess, merge, two_shards, tmp_path):
    assert "has no shards" in merge(prefix="none", code=2).stderr
    preprocess(two_shards, "--shard", "1/2", "--append-eod", "--overwrite")
    error = merge(code=2).stderr
    assert "out.shard-00001-of-00002 was made differently from" in error and "(append_eod True instead of" in error
    for shard in ("1/2", "3/5"):
        preprocess(two_shards, "--shard", shard, "--overwrite")
    assert "has shards of 2 and of 5" in merge(code=2).stderr
    assert "lacks 4 of its 5 shards" in (error := merge("--count", 5, code=2).stderr)
    assert "shards: 0, 1, 2, 4; make them with tools/preprocess_data.py --shard 0/5" in error
    shard = tmp_path / "out.shard-00001-of-00002.bin"
    tokens = shard.read_bytes()
    shard.write_bytes(tokens[:-2])
    assert f"{tmp_path}/out.shard-00001-of-00002 is not whole" in merge("--count", 2, code=2).stderr
    shard.write_bytes(tokens)
    for damaged in ("[1]", '{"inputs": 3}', "[" * 100_000, "\0"):
        shard.with_suffix(".origin").write_text(damaged)
        with pytest.raises(ValueError, match="out.shard-00001-of-00002.origin cannot be used: .*; remove that file"):
            read_origin(str(shard.with_suffix("")))
    shard.with_suffix(".origin").unlink()
    assert "has no .origin" in merge("--count", 2, code=2).stderr
    assert "out.idx" not in names(tmp_path) and names(tmp_path, "out.bin") == []


def test_user_errors_are_one_sentence(preprocess, run_tool, two_shards, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "--shard is '2/2'; give I/N" in preprocess(two_shards, "--shard", "2/2", code=2).stderr
    for text in ("1", "-1/2", "0/0", "a/b"):
        with pytest.raises(ValueError, match="give I/N"):
            Shard.parse(text)
    assert "is not a regular file" in preprocess(tmp_path / "pipe.jsonl", "--shard", "0/2", code=2).stderr
    for message, options in {
        "--shards P writes P": ["--shards", tmp_path / "out", "--output-prefix", tmp_path / "other"],
        "needs --output-prefix": ["--input", tmp_path / "out"],
        "a directory; give it a name": ["--input", tmp_path / "out", "--output-prefix", f"{tmp_path}/"],
        "belong to --shards": ["--input", tmp_path / "out", "--output-prefix", tmp_path / "b", "--remove-shards"],
    }.items():
        assert message in run_tool("merge_datasets", *options, code=2).stderr


@pytest.mark.parametrize("text", ["\u0660/\u0664", "\u00b2/3", "1/1", "0/9999999999", "9" * 5000 + "/1"])
def test_shards_that_do_not_exist_are_refused(text):
    with pytest.raises(ConfigError, match="--shard is .*give I/N") as caught:
        Shard.parse(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["\u0660\u0660\u0660\u0660\u0660-of-00002", "000000-of-000002", "00002-of-00002"])
def test_files_that_are_named_almost_like_shards_are_none(tmp_path, name):
    (tmp_path / "out.shard-00000-of-00002.idx").touch()
    (tmp_path / f"out.shard-{name}.idx").touch()
    assert find_shards(str(tmp_path / "out")) == [Shard(0, 2)]


def test_any_datasets_of_one_token_type_are_merged_in_the_order_given(run_tool, tmp_path):
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


def test_merge_refuses_what_does_not_fit(run_tool, tmp_path):
    write_documents(tmp_path / "a", [[1, 2], [3]])
    write_documents(tmp_path / "b", [[1]], "<i4")
    write_documents(tmp_path / "empty", [])
    builder = IndexedDatasetBuilder(str(tmp_path / "pictures.bin"), dtype=np.uint16, multimodal=True)
    builder.add_document(np.arange(5), [5], [1])
    builder.finalize(str(tmp_path / "pictures.idx"))
    for message, inputs in {
        "b holds int32 tokens, but": ["a", "b"],
        "none.idx does not exist; give the prefix": ["a", "none"],
        "pictures is a multimodal dataset": ["a", "pictures"],
        "hold no document": ["empty", "empty"],
    }.items():
        paths = [tmp_path / name for name in inputs]
        error = run_tool("merge_datasets", "--input", *paths, "--output-prefix", tmp_path / "out", code=2).stderr
        assert error.splitlines()[-1].startswith("error: ") and message in error
        assert names(tmp_path) == []
    arguments = ["--input", tmp_path / "a", tmp_path / "empty", "--output-prefix", tmp_path / "a"]
    assert "a.idx exists; pass --overwrite" in run_tool("merge_datasets", *arguments, code=2).stderr
    before = read_pair(tmp_path / "a")
    run_tool("merge_datasets", *arguments, "--overwrite")
    assert read_pair(tmp_path / "a") == before


def test_an_origin_is_not_believed_of_other_files(preprocess, merge, two_shards, tmp_path):
    for shard in ("0/2", "1/2"):
        preprocess(two_shards, "--shard", shard)
    merge()
    foreign = tmp_path / "foreign"
    preprocess(two_shards, "--append-eod", prefix="foreign")

    def replace(name):
        for ending in (".bin", ".idx"):
            (tmp_path / f"{name}{ending}").write_bytes(foreign.with_name(f"foreign{ending}").read_bytes())

    replace("out")
    assert "has changed since it was written" in merge("--remove-shards", code=2).stderr
    assert (tmp_path / "out.shard-00000-of-00002.idx").exists()
    replace("out.shard-00001-of-00002")
    assert "has changed since it was written" in preprocess(two_shards, "--shard", "1/2", code=2).stderr
    assert "is not whole, or was replaced" in merge("--overwrite", code=2).stderr
