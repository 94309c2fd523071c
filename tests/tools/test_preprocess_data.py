import gzip
import json
import os
import re
import signal
import subprocess
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import torch
import zstandard
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from tool_runs import command, read_pair, write_lines

from megatron_tape.data import preprocessing, raw_chunks
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tokenizer_path, texts):
    """Return the files that Megatron's own builder writes for the corpus."""
    prefix = tmp_path_factory.mktemp("megatron") / "data"
    tokenizer = load_tokenizer(tokenizer_path)
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for text in texts:
        ids = [*tokenizer.encode(text), tokenizer.eod]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return read_pair(prefix)


def files_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "workers, chunk_bytes",
    [(1, 1 << 18), (2, 1), (3, 30000)],
)
def test_output_equals_megatrons_for_any_number_of_workers_and_chunk_size(
    preprocess, corpus, expected, tmp_path, workers, chunk_bytes
):
    preprocess(corpus, "--chunk-bytes", chunk_bytes, workers=workers)
    assert read_pair(tmp_path / "out") == expected
    assert files_in(tmp_path) == ["out.bin", "out.idx", "out.origin"]


@pytest.mark.parametrize(
    "form", ["two gz streams", "two zst streams", "parquet", "txt, BOM", "no newline, BOM"]
)
def test_every_input_format_gives_the_same_bytes(
    preprocess, corpus, expected, texts, tmp_path, form
):
    raw = corpus.read_bytes()
    source = tmp_path / "in"
    source.mkdir()
    halves = [raw[:12345], raw[12345:]]
    if form == "two gz streams":
        (source / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    elif form == "two zst streams":
        (source / "a.json.zst").write_bytes(b"".join(map(zstandard.compress, halves)))
    elif form == "parquet":
        table = pa.table({"text": texts, "number": range(len(texts))})
        pa.parquet.write_table(table, source / "a.parquet", row_group_size=3)
    elif form == "txt, BOM":
        for number, text in enumerate(texts):
            (source / f"{number:02}.txt").write_text(text, encoding="utf-8-sig", newline="")
    else:
        (source / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + raw.rstrip(b"\n"))
    log = preprocess(source / "*", "--chunk-bytes", 20000).stderr
    assert "Error" not in log  # pyarrow prints errors that it ignores
    assert read_pair(tmp_path / "out") == expected


def test_documents_have_no_end_of_document_token_if_it_is_turned_off(
    preprocess, corpus, tmp_path, tokenizer_path, texts
):
    log = preprocess(corpus, "--no-append-eod").stderr
    assert "no token marks the ends of documents" in log
    tokenizer = load_tokenizer(tokenizer_path)
    reader = IndexedDatasetReader(tmp_path / "out")
    for number, text in enumerate(texts):
        assert reader.document(number).tolist() == tokenizer.encode(text)


def test_a_tokenizer_without_an_end_of_document_token_needs_the_option(
    preprocess, corpus, tmp_path
):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ["--tokenizer", tmp_path / "tokenizer.json"]
    error = preprocess(corpus, *options, code=2).stderr
    assert "has no end-of-document token; choose" in error
    preprocess(corpus, *options, "--no-append-eod")


def test_inputs_are_read_once_and_in_the_given_order_under_any_name(preprocess, tmp_path):
    for name in "cab":
        write_lines(tmp_path / f"{name}.jsonl", [name])
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    other = f"{tmp_path}/./c.jsonl"
    preprocess(tmp_path / "c.jsonl", tmp_path / "*.jsonl", other, prefix="patterns")
    write_lines(tmp_path / "order.jsonl", ["c", "a", "b"])
    preprocess(tmp_path / "order.jsonl", prefix="order")
    assert read_pair(tmp_path / "patterns") == read_pair(tmp_path / "order")


BAD_LINES = {
    "invalid JSON": b'{"text": "a',
    "JSON nested too deeply": b"[" * 100_000,
    "not a JSON object; each line must be one": b'["text"]',
    "no key 'text'": b'{"body": "a"}',
    "the value of 'text' is not a string": b'{"text": 1}',
    "invalid UTF-8": b'{"text": "\xff"}',
    "a lone surrogate, which UTF-8 cannot encode": b'{"text": "\\ud800"}',
    "empty text": b'{"text": ""}',
}


def test_a_bad_line_is_named_and_leaves_no_output(preprocess, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n' * 2 + b'{"text": "a\n{"text": "b"}\n')
    error = preprocess(tmp_path / "bad.jsonl", "--chunk-bytes", 20, code=2).stderr
    assert f"error: {tmp_path}/bad.jsonl:3 cannot be used: invalid JSON; repair it" in error
    assert files_in(tmp_path) == ["bad.jsonl"]


def test_a_text_key_that_does_not_exist_is_refused_with_the_keys_of_the_first_record(
    preprocess, tmp_path
):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"title": "t", "body": "a"}\n{"text": "b"}\n'))
    error = preprocess(path, code=2).stderr
    fix = "choose another text key with --text-key"
    assert error == f"error: {path}:2 has no key 'text', only ['title', 'body']; {fix}\n"
    assert "skipped 1: no key 'text'" in preprocess(path, "--on-error", "skip").stderr


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "key, option",
    [
        ("messages", []),
        ("conversations", []),
        ("messages", ["--text-key=messages"]),
    ],
)
def test_chats_are_refused_with_what_makes_text_of_them(preprocess, tmp_path, name, key, option):
    chat = [{"role": "user", "content": "hi"}]
    if name.endswith(".parquet"):
        pa.parquet.write_table(
            pa.table({"id": [1], key: [chat]}),
            tmp_path / name,
        )
    else:
        (tmp_path / name).write_text(json.dumps({"id": 1, key: chat}))
    error = preprocess(tmp_path / name, *option, code=2).stderr
    assert f"; turn the chats in '{key}' into text first, with a chat template" in error
    assert files_in(tmp_path) == [name]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 18])
def test_skipped_lines_are_counted_and_named(preprocess, tmp_path, chunk_bytes):
    good = b'{"text": "a"}\n'
    (tmp_path / "bad.jsonl").write_bytes(
        b"".join(good + line + b"\n" for line in BAD_LINES.values()) + b"1\n" * 4 + good
    )
    options = ["--on-error", "skip", "--chunk-bytes", chunk_bytes]
    report = preprocess(tmp_path / "bad.jsonl", *options).stderr
    for number, reason in enumerate(BAD_LINES):
        if not reason.startswith("not a JSON object"):
            assert f"skipped 1: {reason} ({tmp_path}/bad.jsonl:{2 * number + 2})" in report
    places = ", ".join(f"{tmp_path}/bad.jsonl:{number}" for number in (6, 17, 18))
    assert f" ({places}, ...)" in report
    assert len(IndexedDataset(str(tmp_path / "out"))) == len(BAD_LINES) + 1


def test_blank_lines_are_ignored(preprocess, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "b"}\r\n \t\r\n\n\n')
    preprocess(tmp_path / "a.jsonl", "--chunk-bytes", 1)
    assert len(IndexedDataset(str(tmp_path / "out"))) == 2


def cut_off(content):
    return content[: len(content) * 3 // 4]


def damaged(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "name, write, least",
    [
        ("a.jsonl.gz", lambda raw: cut_off(gzip.compress(raw)), 2),
        ("a.jsonl.gz", lambda raw: damaged(gzip.compress(raw)), 1),
        ("a.jsonl.zst", lambda raw: cut_off(zstandard.compress(raw)), 2),
        ("a.jsonl.zst", lambda raw: b"", 1),
        ("a.parquet", lambda raw: b"PAR1 and then something else", 1),
    ],
)
def test_an_unreadable_file_is_an_error_or_skipped_after_its_readable_lines(
    preprocess, corpus, tmp_path, texts, name, write, least
):
    path = tmp_path / name
    path.write_bytes(write(corpus.read_bytes()))
    write_lines(tmp_path / "b.jsonl", ["after"])
    error = preprocess(path, tmp_path / "b.jsonl", code=2).stderr
    assert f"error: {path} cannot be used: the file" in error
    assert files_in(tmp_path) == sorted([name, "b.jsonl"])
    report = preprocess(path, tmp_path / "b.jsonl", "--on-error", "skip").stderr
    assert re.search(rf"skipped 1: the file .*, so the rest was not read \({path}\)", report)
    assert least <= len(IndexedDataset(str(tmp_path / "out"))) < len(texts)


@pytest.mark.parametrize("values", [pa.string_view(), "dictionary"])
def test_every_string_type_of_parquet_is_read(preprocess, texts, tmp_path, expected, values):
    column = pa.array(texts)
    column = column.dictionary_encode() if values == "dictionary" else column.cast(values)
    pa.parquet.write_table(
        pa.table({"text": column}),
        tmp_path / "a.parquet",
        row_group_size=3,
    )
    preprocess(tmp_path / "a.parquet")
    assert read_pair(tmp_path / "out") == expected


def test_bad_rows_of_parquet_are_named(preprocess, tmp_path):
    raw = pa.array([b"good", b"\xff", None, b""], type=pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pa.parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    report = preprocess(tmp_path / "a.parquet", "--on-error", "skip").stderr
    for row, reason in ((2, "invalid UTF-8"), (3, "no text (null)"), (4, "empty text")):
        assert f"skipped 1: {reason} ({tmp_path}/a.parquet row {row})" in report
    error = preprocess(tmp_path / "a.parquet", "--text-key", "body", "--overwrite", code=2).stderr
    assert "a.parquet has no column 'body', only ['text']; choose another" in error


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 18])
def test_too_large_documents_are_errors(preprocess, tmp_path, name, chunk_bytes):
    texts = ["a", "b", "c" * 300_000, "d", "e" * 300_000]
    place = f"{tmp_path}/{name}:"
    if name == "a.parquet":
        pa.parquet.write_table(pa.table({"text": texts}), tmp_path / name)
        place = f"{tmp_path}/{name} row "
    else:
        write_lines(tmp_path / name, texts)
    error = preprocess(tmp_path / name, "--max-document-bytes", 100_000, code=2).stderr
    problem = f"error: {place}3 cannot be used: more than 100,000 bytes in one document"
    assert f"{problem}; split it, raise --max-document-bytes" in error
    options = ["--max-document-bytes", 100_000, "--on-error", "skip", "--chunk-bytes", chunk_bytes]
    report = preprocess(tmp_path / name, *options).stderr
    assert f"skipped 2: more than 100,000 bytes in one document ({place}3, {place}5)" in report
    assert len(IndexedDataset(str(tmp_path / "out"))) == 3


@pytest.mark.parametrize("chunk_bytes", [1, 9, 1 << 18])
def test_the_limit_on_document_size_is_exact(tmp_path, chunk_bytes):
    lines = [b"1" * length for length in (3, 10, 11, 10, 12, 40, 1)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"x" * 10)
    paths = [str(tmp_path / name) for name in ("a.jsonl", "a.txt")]
    chunks = raw_chunks.read_chunks(paths, "text", chunk_bytes, 10)
    documents = [document for chunk in chunks for document in chunk.documents]
    assert documents == [line[:11] for line in lines] + [b"x" * 10]


def test_an_endless_line_is_refused_at_the_limit(tmp_path):
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    encoding = preprocessing.Encoding(Characters(), "text", True, 1000)
    results = preprocessing.encode_files([str(tmp_path / "endless.jsonl")], encoding, 1, 1 << 18)
    assert list(next(results).problems.counts) == ["more than 1,000 bytes in one document"]
    results.close()


def test_user_errors_are_one_sentence_before_any_work(preprocess, corpus, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").touch()
    for message, arguments in {
        "matches no file": [tmp_path / "none*.jsonl"],
        "folder/*.jsonl": [tmp_path / "folder"],
        "unknown format": [tmp_path / "a.csv"],
        "has no documents": [tmp_path / "empty.jsonl"],
        "argument --workers: 0 is below 1": [corpus, "--workers", 0],
        "such as folder/NAME": [corpus, "--output-prefix", "folder/"],
        "error: --output-prefix is ": [corpus, "--output-prefix", tmp_path / "a.csv" / "out"],
    }.items():
        lines = preprocess(*arguments, code=2).stderr.splitlines()
        assert lines[-1].startswith("error: ")
        assert message in lines[-1]
    assert files_in(tmp_path) == ["a.csv", "empty.jsonl", "folder"]


@pytest.fixture
def interrupted(tmp_path, tokenizer_path, texts):
    """Start the tool on an endless input; yield its process and workers when it has written."""
    pipe = tmp_path / "endless.jsonl"
    os.mkfifo(pipe)
    options = ["--workers", 2, "--chunk-bytes", 1000, "--overwrite"]
    options += ["--tokenizer", tokenizer_path, "--output-prefix", tmp_path / "out"]
    tool = subprocess.Popen(
        command("preprocess_data", "--input", pipe, *options), stderr=subprocess.PIPE, text=True
    )
    # Open the pipe for reading and writing, so that opening does not block and the input never
    # ends.
    with open(pipe, "r+b", buffering=0) as writer:
        os.set_blocking(writer.fileno(), False)
        data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts * 3)
        while data:
            assert tool.poll() is None, tool.communicate()
            data = data[writer.write(data) or 0 :]
            time.sleep(0.005)
        wait_until(lambda: (tmp_path / "out.bin.partial").stat().st_size > 0)
        with open(f"/proc/{tool.pid}/task/{tool.pid}/children") as children:
            workers = [int(pid) for pid in children.read().split()]
        assert len(workers) == 2
        yield tool, workers
    if tool.poll() is None:
        tool.kill()
    tool.communicate()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            ended = stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        # Files stay open until the last thread has ended, which need not be the first.
        return ended and len(os.listdir(f"/proc/{pid}/task")) == 1
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_cleans_up_and_keeps_an_old_dataset(interrupted, tmp_path, name):
    for ending in (".bin", ".idx"):
        (tmp_path / f"out{ending}").write_text("old")
    tool, workers = interrupted
    number = signal.Signals[name]
    tool.send_signal(number)
    _, error = tool.communicate(timeout=60)
    assert tool.returncode == 128 + number
    assert f"error: ended by {name}" in error
    assert "Traceback" not in error
    assert files_in(tmp_path) == ["endless.jsonl", "out.bin", "out.idx"]
    assert read_pair(tmp_path / "out") == (b"old", b"old")
    wait_until(lambda: all(map(is_gone, workers)))


def test_the_same_command_continues_an_interrupted_run(
    preprocess, corpus, tmp_path, tokenizer_path
):
    files = [corpus, tmp_path / "b.jsonl"]
    files[1].write_bytes(corpus.read_bytes())
    preprocess(corpus, prefix="half")
    preprocess(*files, prefix="whole")
    files[1].unlink()
    os.mkfifo(files[1])
    options = ["--tokenizer", tokenizer_path, "--output-prefix", tmp_path / "out"]
    options += ["--workers", 2, "--chunk-bytes", 1000]
    arguments = command("preprocess_data", "--input", *files, *options)

    complete = len(read_pair(tmp_path / "half")[0])
    first = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    with open(files[1], "wb", buffering=0) as pipe:
        pipe.write(corpus.read_bytes())
        wait_until(lambda: (tmp_path / "out.bin.partial").stat().st_size > complete)
        first.send_signal(signal.SIGTERM)
        error = first.communicate(timeout=60)[1]
    assert "the same command continues after the last complete input file" in error

    second = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    files[1].write_bytes(corpus.read_bytes())
    error = second.communicate(timeout=60)[1]
    assert second.returncode == 0, error
    assert "continuing after 1 of 2 files" in error
    assert read_pair(tmp_path / "out") == read_pair(tmp_path / "whole")
    names = [path.name for path in tmp_path.glob("out*")]
    assert sorted(names) == ["out.bin", "out.idx", "out.origin"]


def test_a_killed_run_leaves_no_dataset_and_the_next_run_succeeds(
    interrupted, preprocess, tmp_path, corpus, expected
):
    tool, workers = interrupted
    assert "being written by another process" in preprocess(corpus, code=2).stderr
    tool.kill()
    tool.wait()
    assert files_in(tmp_path) == ["endless.jsonl", "out.bin.partial", "out.idx.partial"]
    wait_until(lambda: all(map(is_gone, workers)))
    preprocess(corpus)
    assert files_in(tmp_path) == ["endless.jsonl", "out.bin", "out.idx", "out.origin"]
    assert read_pair(tmp_path / "out") == expected


def test_the_death_of_a_worker_is_an_error(interrupted, tmp_path):
    tool, workers = interrupted
    os.kill(workers[0], signal.SIGKILL)
    with open(tmp_path / "endless.jsonl", "r+b", buffering=0) as writer:
        os.set_blocking(writer.fileno(), False)  # the tool may have ended already with a full pipe
        writer.write(b'{"text": "a"}\n' * 5000)
    _, error = tool.communicate(timeout=60)
    assert tool.returncode == 1
    assert "error: a worker process died" in error
    assert files_in(tmp_path) == ["endless.jsonl"]


class Characters:
    """A tokenizer whose ids are character codes."""

    vocab_size = 256
    eod = 0
    bos = None

    def encode_batch(self, texts):
        return [np.array([ord(character) for character in text], np.int32) for text in texts]
