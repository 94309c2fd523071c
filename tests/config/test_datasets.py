"""Patterns in `data.prefix`: which datasets they match, and that a run records these when it
starts.
"""

from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.datasets import resolve_patterns
from megatron_tape.config.schema import to_yaml
from megatron_tape.config.stages import stages_of
from megatron_tape.data.inputs import check_data_files
from megatron_tape.errors import ConfigError

RECIPE = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Write the datasets web-1, web-2 and books with 2, 4 and 6 bytes, not in alphabetical
    order.
    """
    monkeypatch.chdir(tmp_path)
    for name, size in (("web-2", 4), ("books", 6), ("web-1", 2)):
        (tmp_path / f"{name}.idx").touch()
        (tmp_path / f"{name}.bin").write_bytes(bytes(size))
    return tmp_path


@pytest.mark.parametrize(
    "prefix, expected",
    [
        ("web-*", ["web-1", "web-2"]),
        (["books", "web-?", "web-2"], ["books", "web-1", "web-2"]),
        ({"books": 1, "web-*": 3}, {"books": 1.0, "web-1": 1.0, "web-2": 2.0}),
        ({"web-*": 3, "web-2": 1}, {"web-1": 1.0, "web-2": 3.0}),
    ],
)
def test_matching_datasets_are_sorted_and_share_the_weight_by_size(datasets, prefix, expected):
    assert resolve_patterns(prefix) == expected


def test_the_name_of_an_existing_dataset_is_not_a_pattern(datasets):
    (datasets / "web-[12].idx").touch()
    assert resolve_patterns("web-[12]") == "web-[12]"


def test_a_run_records_the_datasets_that_matched_at_its_start(datasets):
    stages = "--data.stages=[{prefix: ./web-*, share: 0.5}]"
    config = parse_run_config(
        ["--config", RECIPE, "--data.prefix=web-*", stages, "--data.tokenizer=null"]
    )
    assert config.data.prefix == ["web-1", "web-2"]
    assert [stage.config.data.prefix for stage in stages_of(config)][1] == ["./web-1", "./web-2"]
    (datasets / "recorded.yaml").write_text(to_yaml(config))
    (datasets / "web-3.idx").touch()
    assert parse_run_config(["--config", "recorded.yaml"]).data == config.data


def test_incomplete_datasets_and_patterns_without_matches_are_refused(datasets):
    (datasets / "web-3.idx.partial").touch()
    for pattern, problem in (
        ("web-*", "web-3.idx does not exist"),
        ("none-*", "no dataset matches it"),
    ):
        config = parse_run_config(
            ["--config", RECIPE, f"--data.prefix={pattern}", "--data.tokenizer=null"]
        )
        with pytest.raises(ConfigError, match=problem) as error_info:
            check_data_files(config)
        assert error_info.value.key == "data.prefix"


def test_a_missing_part_is_refused_if_the_pattern_matches_its_name(datasets):
    for number in (0, 2):
        for ending in (".idx", ".bin"):
            (datasets / f"part-{number:05}-of-00003{ending}").touch()
    assert resolve_patterns("part-0000[02]-of-*") == ["part-00000-of-00003", "part-00002-of-00003"]
    config = parse_run_config(
        ["--config", RECIPE, "--data.prefix=./part-*", "--data.tokenizer=null"]
    )
    with pytest.raises(ConfigError, match="part-00001-of-00003.idx does not exist"):
        check_data_files(config)
