"""Records: a value is validated when it is read, and errors are one sentence."""

import os
from typing import Any, Literal

import pytest
from typing_extensions import TypedDict

from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record, read_record, read_yaml, write_record


class Needed(TypedDict):
    step: int
    sizes: dict[str, list[int]]


class Shape(Needed, total=False):
    seconds: float | None
    outcome: Literal["failed", "finished"]
    rest: Any


GOOD = (
    '{"step": 3, "sizes": {"a": [1, 2]}, "seconds": 2, "outcome": "failed", "rest": [{}],'
    ' "unknown": 1}'
)


def test_a_valid_record_is_returned_unchanged(tmp_path):
    assert parse_record(GOOD, Shape)["sizes"] == {"a": [1, 2]}
    assert parse_record('{"step": 3, "sizes": {}, "seconds": null}', Shape)["seconds"] is None
    write_record(tmp_path / "record.json", {"step": 1, "sizes": {}})
    assert read_record(tmp_path / "record.json", Shape) == {"step": 1, "sizes": {}}
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("[1, 2]", "it is a list"),
        ('{"sizes": {}}', "step is missing"),
        ('{"step": "3", "sizes": {}}', "step is '3'"),
        ('{"step": 3, "sizes": {"a": [1, null]}}', r"sizes.a\[1\] is None"),
        ('{"step": 3, "sizes": {}, "outcome": "odd"}', "outcome is 'odd'"),
        ('{"step": 3, "sizes": {}, "seconds": NaN}', "it is not JSON"),
        ('{"step": 3, "sizes"', "it is not JSON"),
        (b"\xff\xfe\xfa", "it is not JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("1" * 10_000, "it is not JSON"),
    ],
)
def test_a_wrong_record_is_described_in_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}") as caught:
        parse_record(text, Shape)
    assert "\n" not in str(caught.value)


def test_size_and_type_of_a_file_are_checked_before_reading(tmp_path):
    path = tmp_path / "record.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for other in (path, tmp_path / "pipe", tmp_path):
        with pytest.raises(FileError) as error:
            read_record(other, Shape, limit=1000)
        assert error.value.subject == str(other)
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "absent", Shape)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("step: 3", "sizes is missing"),
        ("step: [3\n", "it is not YAML"),
        ("&a [*a]", "it is not YAML .*aliases"),
        ("step: 3\nsizes: {}\nseconds: .nan", "Out of range"),
    ],
)
def test_yaml_is_checked_in_the_same_way(tmp_path, text, sentence):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=f"{path} cannot be used: {sentence}") as caught:
        read_yaml(path, Shape)
    assert "\n" not in str(caught.value)

    path.write_text("step: 3\nsizes: {}\n")
    assert read_yaml(path, Shape)["step"] == 3


def test_an_integer_beyond_64_bits_is_read():
    """The maximum length of Hugging Face's tokenizers is 10^30."""
    text = '{"model_max_length": 1000000000000000019884624838656}'
    assert parse_record(text, dict[str, Any])["model_max_length"] == int(1e30)
