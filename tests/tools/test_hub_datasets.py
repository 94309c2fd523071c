"""Datasets of the Hugging Face Hub, and local directories in its layout, become the bytes that
their JSONL gives.
"""

import gzip
import io
import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from fake_hub import serve
from tool_runs import read_pair, write_lines

from megatron_tape.data.origins import read_origin

CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: small
  data_files: small/*
---
"""
SHARDS = 4


def shard_texts(number, revision=""):
    return [f"{revision}text {number} of document {index}, naïve 漢字 " * 9 for index in range(40)]


def parquet(texts):
    file = io.BytesIO()
    pa.parquet.write_table(
        pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=7
    )
    return file.getvalue()


def dataset_files(revision=""):
    """Return the files of a dataset, which has another configuration and another split, by path."""
    files = {
        f"data/train-{number}.parquet": parquet(shard_texts(number, revision))
        for number in range(SHARDS)
    }
    lines = b"".join(
        json.dumps({"text": text}).encode() + b"\n" for text in shard_texts(8, revision)
    )
    return files | {
        "README.md": CARD,
        "data/test-0.parquet": parquet(["a test document"]),
        "small/a.jsonl.gz": gzip.compress(lines),
    }


@pytest.fixture
def expected(preprocess, tmp_path):
    """Return the dataset of the training split, made from JSONL."""
    path = tmp_path / "expected.jsonl"
    write_lines(path, [text for number in range(SHARDS) for text in shard_texts(number)])
    preprocess(path, prefix="expected")
    return read_pair(tmp_path / "expected")


@pytest.fixture
def layout(tmp_path):
    """Return a local directory in the Hub's layout."""
    root = tmp_path / "layout"
    for name, content in dataset_files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def hub(tmp_path):
    """Start a Hub with the dataset me/texts; `hub.variables` make the tools use it."""
    with serve() as (server, address):
        server.commit = server.add("me/texts", dataset_files())
        server.variables = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
        }
        yield server


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [[], ["--streaming"]])
def test_a_local_directory_gives_the_bytes_of_its_texts_as_jsonl(
    preprocess, layout, expected, tmp_path, workers, options
):
    preprocess(f"hub:{layout}", *options, workers=workers)
    assert read_pair(tmp_path / "out") == expected


def test_a_configuration_and_a_number_of_documents_can_be_chosen(preprocess, layout, tmp_path):
    texts = shard_texts(8)
    write_lines(tmp_path / "some.jsonl", texts[:33])
    preprocess(tmp_path / "some.jsonl", prefix="some")
    for workers, chunk_bytes in ((1, 1 << 18), (2, 1000)):
        options = ["--config-name", "small", "--max-documents", 33, "--chunk-bytes", chunk_bytes]
        preprocess(f"hub:{layout}", *options, "--overwrite", workers=workers)
        assert read_pair(tmp_path / "out") == read_pair(tmp_path / "some")
    assert read_origin(tmp_path / "out")["source"]["max_documents"] == 33


def test_a_streamed_and_a_downloaded_dataset_are_the_same(preprocess, hub, expected, tmp_path):
    preprocess("hub:me/texts", "--streaming", prefix="streamed", variables=hub.variables)
    assert not list((tmp_path / "hf").rglob("*.parquet"))
    preprocess("hub:me/texts", prefix="downloaded", workers=2, variables=hub.variables)
    assert read_pair(tmp_path / "streamed") == read_pair(tmp_path / "downloaded") == expected
    # What was downloaded is not read over the network again.
    hub.requests.clear()
    preprocess("hub:me/texts", "--streaming", prefix="again", variables=hub.variables)
    assert read_pair(tmp_path / "again") == expected and hub.requests == []
    names = [
        f"hf://datasets/me/texts@{hub.commit}/data/train-{number}.parquet"
        for number in range(SHARDS)
    ]
    for prefix in ("streamed", "downloaded"):
        assert read_origin(tmp_path / prefix)["source"]["inputs"] == names


def test_an_existing_output_is_refused_before_the_download(preprocess, run_tool, hub, tmp_path):
    (tmp_path / "out.idx").write_text("old")
    assert "out.idx exists" in preprocess("hub:me/texts", code=2, variables=hub.variables).stderr
    output = ["--output", tmp_path / "out.idx"]
    error = run_tool(
        "train_tokenizer", "--input", "hub:me/texts", *output, code=2, variables=hub.variables
    ).stderr
    assert "out.idx exists" in error
    assert not any(path.endswith(".parquet") for path in hub.requests)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_network_failed_continues_after_the_last_complete_file(
    preprocess, hub, expected, tmp_path, workers
):
    def run(**others):
        # A network failure is no bad document.
        options = ["--streaming", "--on-error", "skip"]
        return preprocess(
            "hub:me/texts", *options, workers=workers, variables=hub.variables, **others
        ).stderr

    hub.broken.add("data/train-2.parquet")
    error = run(code=1)
    assert f"@{hub.commit}/data/train-2.parquet cannot be read from the Hub" in error
    assert not (tmp_path / "out.idx").exists()

    hub.requests.clear()
    hub.broken.clear()
    assert "continuing after 2 of 4 files" in run()
    assert set(hub.requests) == {"data/train-2.parquet", "data/train-3.parquet"}
    assert read_pair(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.glob("out.*")) == [
        "out.bin",
        "out.idx",
        "out.origin",
    ]


def test_an_interrupted_run_does_not_mix_two_revisions(preprocess, hub, expected, tmp_path):
    hub.broken.add("data/train-3.parquet")
    run = {"variables": hub.variables}
    preprocess("hub:me/texts", "--streaming", code=1, **run)
    hub.broken.clear()
    new = hub.add("me/texts", dataset_files("newer "))
    error = preprocess("hub:me/texts", "--streaming", code=2, **run).stderr
    problem = f"out was made from revision {hub.commit} of me/texts, and --input is revision {new}"
    assert f"{problem}; pass --revision {hub.commit}" in error
    preprocess("hub:me/texts", "--streaming", "--revision", hub.commit, **run)
    assert read_pair(tmp_path / "out") == expected


def test_parts_share_the_files_and_refuse_another_revision(
    preprocess, hub, run_tool, tmp_path, tokenizer_path
):
    run = {"variables": hub.variables}
    preprocess("hub:me/texts", "--part", "0/2", **run)
    assert "complete already" in preprocess("hub:me/texts", "--part", "0/2", **run).stderr
    new = hub.add("me/texts", dataset_files("newer "))
    error = preprocess("hub:me/texts", "--part", "1/2", code=2, **run).stderr
    assert f"out-00000-of-00002 was made from revision {hub.commit}" in error and new in error
    preprocess("hub:me/texts", "--part", "1/2", "--revision", hub.commit, **run)
    write_lines(tmp_path / "odd.jsonl", [*shard_texts(1), *shard_texts(3)])
    preprocess(tmp_path / "odd.jsonl", prefix="odd")
    assert read_pair(tmp_path / "out-00001-of-00002") == read_pair(tmp_path / "odd")
    # Only its own files are downloaded.
    assert hub.requests.count("data/train-1.parquet") == 1


def test_parts_that_run_at_the_same_time_do_not_mix_two_revisions(preprocess, hub, tmp_path):
    run = {"variables": hub.variables}
    hub.broken.add("data/train-2.parquet")
    preprocess("hub:me/texts", "--streaming", "--part", "0/2", code=1, **run)
    hub.broken.clear()
    hub.add("me/texts", dataset_files("newer "))
    error = preprocess("hub:me/texts", "--streaming", "--part", "1/2", code=2, **run).stderr
    assert f"out-00000-of-00002 was made from revision {hub.commit}" in error
    assert not list(tmp_path.glob("out-00001-of-00002*"))


def test_other_tools_read_the_same_dataset(run_tool, hub, tmp_path):
    run = {"variables": hub.variables}
    run_tool(
        "make_corpus", "hub", "me/texts", "--streaming", "--output", tmp_path / "out.jsonl", **run
    )
    texts = [text for number in range(SHARDS) for text in shard_texts(number)]
    assert [
        json.loads(line)["text"] for line in (tmp_path / "out.jsonl").open(encoding="utf-8")
    ] == texts
    options = ["--vocab-size", 350, "--max-documents", 50]
    run_tool(
        "train_tokenizer",
        "--input",
        "hub:me/texts",
        *options,
        "--output",
        tmp_path / "hub.model",
        **run,
    )
    write_lines(tmp_path / "some.jsonl", texts[:50])
    run_tool(
        "train_tokenizer",
        "--input",
        tmp_path / "some.jsonl",
        *options,
        "--output",
        tmp_path / "jsonl.model",
    )
    assert (tmp_path / "hub.model").read_bytes() == (tmp_path / "jsonl.model").read_bytes()


@pytest.mark.parametrize(
    "inputs, problem, fix",
    [
        (
            ["hub:you/texts"],
            "you/texts cannot be opened: Dataset 'you/texts' doesn't exist",
            "HF_TOKEN",
        ),
        (
            ["hub:me/texts", "--revision", "old"],
            "Revision 'old' doesn't exist",
            "check the name and --revision",
        ),
        (
            ["hub:me/texts", "--config-name", "big"],
            "BuilderConfig 'big' not found",
            "choose one with --config-name",
        ),
        (
            ["hub:me/texts", "--split", "dev"],
            r"'dev', but me/texts \(default\) has only \['test', 'train'\]",
            "choose",
        ),
        (["hub:./texts"], "./texts is no directory", "check the path"),
        (
            ["hub:me/texts", "--text-key", "body"],
            r"train-0.parquet has no column 'body'",
            "--text-key",
        ),
        (["a.jsonl", "--streaming"], "--streaming is only for datasets of the Hub", "remove it"),
    ],
)
def test_the_cause_is_named_if_a_dataset_cannot_be_opened(
    preprocess, hub, tmp_path, inputs, problem, fix
):
    (line,) = preprocess(*inputs, code=2, variables=hub.variables).stderr.splitlines()[-1:]
    assert re.search(f"^error: .*{problem}.*; .*{fix}", line)
    assert not list(tmp_path.glob("out*"))


def test_a_missing_directory_is_named_before_the_network(preprocess, tmp_path):
    """Without a network, the Hub cannot say whether it has the dataset."""
    error = preprocess("hub:texts/of-mine", code=2).stderr.splitlines()[-1]
    assert "texts/of-mine cannot be opened: there is no such directory, and " in error
    assert "check the name, then the network" in error


def test_files_of_another_format_are_refused(preprocess, tmp_path):
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "train.csv").write_text("text\na\n")
    error = preprocess(f"hub:{tmp_path}/layout", code=2).stderr
    assert "train.csv is neither parquet nor JSON lines; convert it" in error
