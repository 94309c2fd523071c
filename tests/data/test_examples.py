"""Examples of inputs and targets are read from JSON lines and zips, and truncated to a context."""

import json
import zipfile

import pytest

from megatron_tape.data.examples import EncodedExample, ExampleEncoder, first_tokens, read_examples
from megatron_tape.errors import FileError

LINES = [
    {"id": "q1", "pid": "q1_0", "input": "Who?\n\nA text.", "output": "Ann"},
    {"id": "q1", "pid": "q1_1", "input": "Who?\n\nA text.", "output": "Ann Lee"},
    {"input": "What?", "target": "it"},
]


def encode(text):
    return list(text.encode())


def write_lines(path, lines=LINES):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_json_lines_and_zips_give_the_same_examples(tmp_path):
    plain = write_lines(tmp_path / "qa.jsonl")
    with zipfile.ZipFile(tmp_path / "qa.zip", "w") as archive:
        archive.write(plain, "qa/validation.jsonl")
        archive.writestr("qa/train.jsonl", json.dumps(LINES[0]))
        archive.writestr("__MACOSX/qa/validation.jsonl", "rubbish")
    read = [
        list(read_examples(str(tmp_path / name), "validation")) for name in ("qa.jsonl", "qa.zip")
    ]
    for examples in read:
        assert [(one.key, one.input, one.target) for one in examples] == [
            ("q1", "Who?\n\nA text.", "Ann"),
            ("q1", "Who?\n\nA text.", "Ann Lee"),
            (None, "What?", "it"),
        ]
    assert [one[2].place for one in read] == [
        f"{plain}:3",
        f"{tmp_path}/qa.zip/qa/validation.jsonl:3",
    ]
    assert len(list(read_examples(str(tmp_path / "qa.zip"), "train"))) == 1


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", "cannot be used: invalid JSON"),
        ('{"input": "a", "output": null}', "has no text under the key output"),
        ('{"input": "a", "target": "\\ud800"}', "has a lone surrogate in its target"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(FileError) as error:
        list(read_examples(str(path), "train"))
    assert (error.value.subject, error.value.problem) == (f"{path}:2", problem)


def test_files_without_examples_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "qa.zip", "w") as archive:
        archive.writestr("qa/train.jsonl", "")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "qa.zip").read_bytes()[:-5])
    (tmp_path / "qa.csv").write_text("a,b\n")
    for name, word in (
        ("qa.zip", "with 0 files called validation.jsonl instead of one"),
        ("cut.zip", "unknown format"),
        ("qa.csv", "unknown format"),
        ("none.jsonl", "No such file"),
    ):
        with pytest.raises(FileError) as error:
            list(read_examples(str(tmp_path / name), "validation"))
        assert error.value.subject == str(tmp_path / name)
        assert word in error.value.problem


def test_a_line_that_is_too_large_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_tape.data.examples.DOCUMENT_BYTES", 1_000_000)
    lines = [json.dumps(LINES[2]), json.dumps({"input": "a" * 2_000_000, "target": "b"})]
    with zipfile.ZipFile(tmp_path / "qa.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("qa/validation.jsonl", "\n".join(lines))
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    for name, split in (("qa.zip", "validation"), ("qa.jsonl", "")):
        with pytest.raises(FileError, match=r":2 has more than 1,000,000 bytes in one document"):
            list(read_examples(str(tmp_path / name), split))


def test_a_long_input_loses_its_end_and_the_template_stays():
    encoder = ExampleEncoder(encode, [256], "Q: {input}\nA:", length=20, target_tokens=4)
    prompt = [256, *b"Q: 012345678\nA:"]
    encoded = encoder("0123456789", " yes sir ")
    assert encoded == EncodedExample(prompt, list(b" yes"), True, True)
    assert encoder("012345678", "no") == EncodedExample(prompt, list(b" no"), False, False)
    assert bytes(ExampleEncoder(encode, [], "{input}", 20, 4)("abc", "no").target) == b"no"


def test_the_first_tokens_are_those_of_the_whole_text():
    read = []

    def words(text):
        read.append(len(text))
        return [len(word) for word in text.split(" ")]

    text = " ".join("x" * (1 + i % 40) for i in range(2000))
    for count in (1, 7, 100, 1999, 2000, 2001):
        assert first_tokens(words, text, count) == (words(text)[:count], count < 2000)
    read.clear()
    first_tokens(words, text, 3)
    assert max(read) < 500
