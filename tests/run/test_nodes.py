"""The problems that the preflight finds in the facts of nodes. tests/slurm/test_preflight.py runs
it in jobs.
"""

import shutil

import pytest
from configurations import make

from megatron_tape.run import nodes


def node(**versions):
    return {
        "versions": {"python": "3.11.7", "torch": "2.13.0", "code": "abc"} | versions,
        "data": {"a.bin": "10 bytes, sha256 1"},
        "error": None,
    }


def test_a_node_with_another_version_is_named_with_both_versions():
    assert nodes.differences({"a": node(), "b": node()}) == []
    (problem,) = nodes.differences(
        {
            "a": node(),
            "b": node(torch="2.12.0"),
            "c": node(),
        }
    )
    assert problem.sentence.startswith("b: torch is 2.12.0, but 2.13.0 on a")
    assert problem.nodes == ("b",)
    assert not problem.mistake


def test_nodes_with_different_code_or_data_or_unreadable_data_are_named():
    different = node(code="xyz")
    different["data"] = {"a.bin": "10 bytes, sha256 2"}
    unreadable = node()
    unreadable["data"] = {"a.bin": "not readable (No such file or directory)"}
    found = nodes.differences({"a": node(), "b": different, "c": node()})
    assert [problem.sentence[:12] for problem in found] == ["b: code is x", "b: a.bin is "]
    (problem,) = nodes.differences({"a": node(), "b": unreadable})
    assert problem == nodes.Problem("b: a.bin is not readable (No such file or directory)", ("b",))


def test_the_files_of_every_data_source_are_compared():
    def files(**data):
        return nodes.input_files(make(data__tokenizer=None, **data))

    assert files() == ["somewhere/corpus.idx", "somewhere/corpus.bin"]
    examples = {"path": "a.jsonl", "validation": "b.jsonl"}
    assert files(data__prefix=None, data__examples=examples) == ["a.jsonl", "b.jsonl"]
    assert files(data__prefix=None, data__generator={"task": "addition"}) == []


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "checkpoints" / ".attempt-000001"
    home.mkdir(parents=True)
    return home


def problems(home, names, absent="", keep=2, size=1000):
    for name in set(names) - set(absent):
        (home / f"preflight-{name}").touch()
    return nodes.directory_problems({name: node() for name in names}, home, size, keep)


@pytest.mark.parametrize(
    "names, absent, is_mistake",
    [
        ("ab", "", None),
        ("abc", "bc", True),
        ("abc", "c", False),
        ("ab", "b", False),
    ],
)
def test_nodes_that_do_not_share_the_directory_are_named(home, names, absent, is_mistake):
    """If no other node shares it, the setting is wrong."""
    expected = [((name,), is_mistake) for name in absent]
    found = problems(home, names, absent)
    assert [(problem.nodes, problem.mistake) for problem in found] == expected


def test_there_must_be_space_for_two_checkpoints_or_one_if_others_exist(home, monkeypatch):
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: type("Usage", (), {"free": 1500})(),
    )
    (problem,) = problems(home, "a", keep=1)
    assert "two checkpoints need" in problem.sentence
    assert not problem.mistake
    assert problem.nodes == ()
    assert problems(home, "a", keep=1, size=700) == []
    (home.parent / "step-00000010").mkdir()
    assert problems(home, "a", keep=1) == []


def test_missing_and_small_gpus_are_named():
    gib = 2**30
    large = {"name": "H100", "total": 80 * gib}
    small = {"name": "T4", "total": 15 * gib}
    assert (
        nodes.gpu_problems(
            {"a": [large, large], "b": [large, large]},
            2,
            20 * gib,
        )
        == []
    )
    missing, too_small = nodes.gpu_problems(
        {"a": [large], "b": [large, small]},
        2,
        20 * gib,
    )
    assert missing.nodes == ("a",)
    assert "finds 1 of the 2 GPUs" in missing.sentence
    assert too_small.nodes == ("b",)
    assert "GPU 1 (T4) has 15.0 GiB" in too_small.sentence
    assert not too_small.mistake
    all_small = nodes.gpu_problems(
        {"a": [small], "b": [small]},
        1,
        20 * gib,
    )
    assert all(problem.mistake for problem in all_small)
