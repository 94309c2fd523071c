"""Datasets of the Hugging Face Hub give the bytes that their texts as JSONL give."""

import gzip
import io
import json
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from fake_hub import serve
from tool_runs import read_pair, write_lines

from megatron_tape.data import hub as data_hub
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
def test_a_local_directory_gives_the_bytes_of_its_texts_as_jsonl(
    preprocess, layout, expected, tmp_path, workers
):
    preprocess(f"hub:{layout}", workers=workers)
    assert read_pair(tmp_path / "out") == expected


def test_a_configuration_and_a_number_of_documents_can_be_chosen(preprocess, layout, tmp_path):
    write_lines(tmp_path / "some.jsonl", shard_texts(8)[:33])
    preprocess(tmp_path / "some.jsonl", prefix="some")
    options = ["--config-name", "small", "--max-documents", 33, "--chunk-bytes", 1000]
    preprocess(f"hub:{layout}", *options, workers=2)
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
    assert read_pair(tmp_path / "again") == expected
    assert hub.requests == []
    names = [
        f"hf://datasets/me/texts@{hub.commit}/data/train-{number}.parquet"
        for number in range(SHARDS)
    ]
    for prefix in ("streamed", "downloaded"):
        assert read_origin(tmp_path / prefix)["source"]["inputs"] == names


def test_local_files_need_no_package_of_the_hub(monkeypatch):
    # `import huggingface_hub` now raises ModuleNotFoundError.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    data_hub.download(["corpus.jsonl"])
    with pytest.raises(ModuleNotFoundError):
        data_hub.download(["hf://datasets/me/texts@abc/train.parquet"])


def test_an_existing_output_is_refused_before_the_download(preprocess, hub, tmp_path):
    (tmp_path / "out.idx").write_text("old")
    assert "out.idx exists" in preprocess("hub:me/texts", code=2, variables=hub.variables).stderr
    assert not any(path.endswith(".parquet") for path in hub.requests)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_of_the_network_is_no_bad_document(preprocess, hub, tmp_path, workers):
    hub.broken.add("data/train-2.parquet")
    options = ["--streaming", "--on-error", "skip"]
    run = {"workers": workers, "variables": hub.variables}
    error = preprocess("hub:me/texts", *options, code=1, **run).stderr
    assert f"@{hub.commit}/data/train-2.parquet cannot be read from the Hub" in error
    assert not list(tmp_path.glob("out*"))


def test_parts_share_the_files_and_refuse_another_revision(preprocess, hub, tmp_path):
    run = {"variables": hub.variables}
    preprocess("hub:me/texts", "--part", "0/2", **run)
    assert "complete already" in preprocess("hub:me/texts", "--part", "0/2", **run).stderr
    new = hub.add("me/texts", dataset_files("newer "))
    error = preprocess("hub:me/texts", "--part", "1/2", code=2, **run).stderr
    assert f"out-00000-of-00002.idx was made from revision {hub.commit}" in error
    assert new in error
    preprocess("hub:me/texts", "--part", "1/2", "--revision", hub.commit, **run)
    write_lines(tmp_path / "odd.jsonl", [*shard_texts(1), *shard_texts(3)])
    preprocess(tmp_path / "odd.jsonl", prefix="odd")
    assert read_pair(tmp_path / "out-00001-of-00002") == read_pair(tmp_path / "odd")
    # Only its own files are downloaded.
    assert hub.requests.count("data/train-1.parquet") == 1


@pytest.mark.parametrize(
    "inputs, problem",
    [
        (["hub:you/texts"], "you/texts cannot be opened: Dataset 'you/texts' doesn't exist"),
        (["hub:me/texts", "--revision", "old"], "Revision 'old' doesn't exist"),
        (["hub:me/texts", "--config-name", "big"], "BuilderConfig 'big' not found"),
        (["hub:me/texts", "--split", "dev"], "has only ['test', 'train']"),
        (["hub:./texts"], "./texts is no directory"),
        (["hub:me/texts", "--text-key", "body"], "train-0.parquet has no column 'body'"),
        (["a.jsonl", "--streaming"], "--streaming is only for datasets of the Hub"),
    ],
)
def test_the_cause_is_named_if_a_dataset_cannot_be_opened(
    preprocess, hub, tmp_path, inputs, problem
):
    error = preprocess(*inputs, code=2, variables=hub.variables).stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert problem in error
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
