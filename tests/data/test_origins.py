"""A dataset records its tokenizer, and every program that reads the dataset compares it."""

import json
import re

import numpy as np
import pytest
from configurations import make
from datasets_for_tests import EOD, write_dataset, write_documents, write_tokenizer
from tool_runs import run_here

from megatron_tape.data.inputs import check_datasets, check_same_data, fingerprints
from megatron_tape.data.origins import checked_origins, fingerprints_of, read_origin
from megatron_tape.data.tokenizer import load_tokenizer, tokenizer_record
from megatron_tape.errors import ConfigError, FileError


@pytest.fixture
def tokenizers(tmp_path):
    """Return the paths of tokenizers: `other` has another word than `own`, `ends` another `eod`."""
    write_tokenizer(tmp_path / "own.json")
    settings = json.loads((tmp_path / "own.json").read_text().replace('"w62"', '"<|stop|>"'))
    settings["added_tokens"].insert(
        0, settings["added_tokens"][0] | {"id": 62, "content": "<|stop|>"}
    )
    (tmp_path / "own.json").write_text(text := json.dumps(settings))
    (tmp_path / "other.json").write_text(text.replace('"w1"', '"changed"'))
    (tmp_path / "ends").mkdir()
    (tmp_path / "ends" / "tokenizer.json").write_text(text)
    (tmp_path / "ends" / "tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')
    return {
        name: str(tmp_path / path)
        for name, path in (("own", "own.json"), ("other", "other.json"), ("ends", "ends"))
    }


@pytest.fixture
def preprocess(tmp_path, tokenizers):
    """Return a function that preprocesses 40 texts and returns the prefix of the dataset."""

    def run(name, tokenizer="own", *options):
        texts = [" ".join(f"w{(i + k) % 62}" for k in range(90)) for i in range(40)]
        (tmp_path / "in.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        arguments = ["--input", tmp_path / "in.jsonl", "--tokenizer", tokenizers[tokenizer]]
        output = ["--output-prefix", tmp_path / name, "--workers", "1"]
        result = run_here("preprocess_data", *arguments, *output, *options)
        assert result.returncode == 0, result.stderr
        return str(tmp_path / name)

    return run


def settings(tokenizers, prefix, tokenizer="own", packed=True, **changes):
    path = None if tokenizer is None else tokenizers[tokenizer]
    return make(
        data__prefix=prefix, data__tokenizer=path, data__reset_attention_mask=packed, **changes
    )


def test_a_dataset_records_its_tokenizer_and_whether_documents_end(preprocess, tokenizers):
    record = tokenizer_record(load_tokenizer(tokenizers["own"]))
    for options, ends in ((["--no-append-eod"], False), ([], True)):
        prefix = preprocess(f"out{ends}", "own", *options)
        origin = read_origin(prefix)
        source = origin.pop("source")
        assert origin == {"tokenizer": record, "append_eod": ends, "files": fingerprints_of(prefix)}
        assert source["inputs"] == [prefix.replace(f"out{ends}", "in.jsonl")]
        assert source["text_key"] == "text"


def test_a_dataset_that_another_tool_has_replaced_has_no_origin(preprocess):
    prefix = preprocess("out")
    write_dataset(f"{prefix}.new")
    for ending in (".bin", ".idx"):
        with open(prefix + ending, "wb") as file, open(f"{prefix}.new{ending}", "rb") as new:
            file.write(new.read())
    assert read_origin(prefix) is None


@pytest.mark.parametrize(
    "made_with, problem",
    [
        ("other", "encodes text in another way than data.tokenizer"),
        ("ends", "ends documents with the id 62, and data.tokenizer"),
    ],
)
def test_training_refuses_data_of_another_tokenizer(preprocess, tokenizers, made_with, problem):
    good = preprocess("good")
    bad = preprocess("bad", made_with)
    check_datasets(settings(tokenizers, good))
    for prefix in (bad, {good: 0.5, bad: 0.5}):
        with pytest.raises(ConfigError, match=problem) as error:
            check_datasets(settings(tokenizers, prefix, packed=False))
        assert error.value.subjects == ("data.prefix", "data.tokenizer")
        assert bad in str(error.value)
    stages = [{"prefix": bad, "share": 0.5}]
    with pytest.raises(ConfigError, match=f"^data.stages .*{problem}"):
        check_datasets(settings(tokenizers, good, packed=False, data__stages=stages))


def test_datasets_are_compared_with_each_other_and_the_checkpoint_where_there_is_no_tokenizer(
    preprocess, tokenizers
):
    good = preprocess("good")
    bad = preprocess("bad", "other")
    check_datasets(settings(tokenizers, bad, None, packed=False))
    for prefix, tokenizer, saved, name in (
        ({good: 0.5, bad: 0.5}, None, None, "that of"),
        (bad, None, good, "the model's"),
        (good, "own", bad, "that of the model's training data"),
    ):
        record = saved and read_origin(saved)["tokenizer"]
        with pytest.raises(ConfigError, match=f"encodes text in another way than {name}"):
            check_datasets(settings(tokenizers, prefix, tokenizer, packed=False), record)


def test_data_of_other_tools_is_accepted_with_one_warning(tmp_path, tokenizers, capsys):
    for name in ("a", "b", "c"):
        write_dataset(tmp_path / name)
    prefixes = [str(tmp_path / name) for name in ("a", "b", "c")]
    check_datasets(settings(tokenizers, prefixes))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "which tokenizer" in line]
    assert line.startswith(f"warning: {prefixes[0]} does not record")
    assert "3 of 3" in line


def test_merged_datasets_keep_a_common_tokenizer_and_no_others_are_merged(
    preprocess, tmp_path, tokenizers
):
    one = preprocess("one", "own", "--no-append-eod")
    two = preprocess("two")
    other = preprocess("other", "other", "--no-append-eod")
    stop = preprocess("stop", "ends")
    write_dataset(tmp_path / "foreign")

    def merge(name, *prefixes):
        return run_here("merge_datasets", "--input", *prefixes, "--output-prefix", tmp_path / name)

    assert merge("out", one, two).returncode == 0
    origin = read_origin(tmp_path / "out")
    assert origin["tokenizer"] == read_origin(one)["tokenizer"]
    assert not origin["append_eod"]
    # The documents of `one` do not end in an end-of-document token.
    assert merge("in order", one, stop).returncode == merge("reversed", stop, one).returncode == 0
    for prefixes, problem in (
        ((two, stop), "ends documents with the id 62, and that of"),
        ((one, other), f"{other} was made with a tokenizer that encodes text in another way"),
    ):
        result = merge("bad", *prefixes)
        assert result.returncode == 2
        assert problem in result.stderr
    assert not (tmp_path / "bad.idx").exists()
    result = merge("both", one, tmp_path / "foreign")
    assert result.returncode == 0
    assert "foreign does not record" in result.stderr
    assert read_origin(tmp_path / "both") is None


def test_inspection_names_the_tokenizer_and_refuses_another(preprocess, tmp_path, tokenizers):
    prefix = preprocess("out")
    record = tokenizer_record(load_tokenizer(tokenizers["own"]))
    line = f"64 ids, digest {record['digest'][:12]}; documents end in token 63"
    assert line in run_here("inspect_dataset", prefix).stdout
    assert run_here("inspect_dataset", prefix, "--tokenizer", tokenizers["own"]).returncode == 0
    done = run_here("inspect_dataset", prefix, "--tokenizer", tokenizers["other"])
    assert done.returncode == 2
    assert "encodes text in another way" in done.stderr
    write_dataset(tmp_path / "foreign")
    assert "tokenizer  unknown" in run_here("inspect_dataset", tmp_path / "foreign").stdout


def test_a_malformed_origin_is_one_sentence(preprocess):
    prefix = preprocess("out")
    with open(f"{prefix}.origin", "w") as file:
        file.write('{"tokenizer": []}')
    with pytest.raises(FileError, match="out.origin cannot be used: .*; remove that file"):
        checked_origins([prefix], tokenizer=None)


def documents(*ends):
    """Return documents of five tokens with the last tokens `ends`; None is an empty document."""
    return [[] if end is None else [1, 2, 3, 4, end] for end in ends]


@pytest.mark.parametrize(
    "ends",
    [
        [None, *[EOD] * 40],
        [EOD, None] * 300 + [7],
        [EOD, 7, 7, 7] * 256 + [EOD],
    ],
)
def test_the_ends_of_documents_are_checked_throughout_a_dataset(tmp_path, tokenizers, ends):
    write_documents(tmp_path / "a", documents(*ends))
    changes = {"model__seq_length": 16, "data__split": "1,0,0", "train__eval_interval": None}
    config = settings(tokenizers, str(tmp_path / "a"), **changes)
    if set(ends) <= {EOD, None}:
        return check_datasets(config)
    with pytest.raises(ConfigError, match="does not end in the end-of-document token 63") as error:
        check_datasets(config)
    assert ends[int(re.search(r"document (\d+) of", str(error.value))[1])] == 7


def test_data_that_was_replaced_is_noticed_and_named(preprocess, tokenizers, tmp_path, capsys):
    one = preprocess("one")
    two = preprocess("two")

    def check(prefix, **changes):
        config = settings(tokenizers, prefix, packed=False, **changes)
        check_same_data(config, saved, tmp_path / "step-1")

    saved = fingerprints(settings(tokenizers, {one: 0.5, two: 0.5}, packed=False))
    check({one: 0.5, two: 0.5})
    write_documents(
        two,
        [np.arange(20) + i for i in range(40)],
        overwrite=True,
    )
    check(one)
    check({one: 0.5, two: 0.5}, data__allow_changed=True)
    assert "warning: the data has changed since" in capsys.readouterr().err
    for prefix, changes, key, name in (
        ({one: 0.5, two: 0.5}, {}, "data.prefix", two),
        (f"{tmp_path}/./two", {}, "data.prefix", f"{tmp_path}/./two"),
        (one, {"data__stages": [{"prefix": two, "share": 0.5}]}, "data.stages", two),
    ):
        with pytest.raises(
            ConfigError, match=f"has changed since .*step-1 was saved: {name};"
        ) as e:
            check(prefix, **changes)
        assert e.value.subjects == (key, "data.allow_changed")
