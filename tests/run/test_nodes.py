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
        "directory": {"token": "t", "error": None, "wrote": "own-file"},
    }


def test_a_node_with_another_version_is_named_with_both_versions():
    assert nodes.differences({"a": node(), "b": node()}) == []
    (problem,) = nodes.differences({"a": node(), "b": node(torch="2.12.0"), "c": node()})
    assert problem.sentence.startswith("b: torch is 2.12.0, but 2.13.0 on a")
    assert problem.nodes == ("b",) and not problem.mistake


def test_nodes_with_different_code_or_data_or_unreadable_data_are_named():
    different = node(code="xyz")
    different["data"] = {"a.bin": "10 bytes, sha256 2"}
    unreadable = node()
    unreadable["data"] = {"a.bin": "not readable (No such file or directory)"}
    problems = nodes.differences({"a": node(), "b": different, "c": node()})
    assert [problem.sentence[:12] for problem in problems] == ["b: code is x", "b: a.bin is "]
    (problem,) = nodes.differences({"a": node(), "b": unreadable})
    assert problem == nodes.Problem("b: a.bin is not readable (No such file or directory)", ("b",))


def test_the_files_of_every_data_source_are_compared():
    def files(**data):
        return nodes.inputs(make(data__tokenizer=None, **data))

    assert files() == ["somewhere/corpus.idx", "somewhere/corpus.bin"]
    examples = {"path": "a.jsonl", "validation": "b.jsonl"}
    assert files(data__prefix=None, data__examples=examples) == ["a.jsonl", "b.jsonl"]
    assert files(data__prefix=None, data__generator={"task": "addition"}) == []


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "checkpoints" / ".attempt-000001"
    home.mkdir(parents=True)
    (home / "own-file").write_text("here")
    return home


def directory_problems(home, keep=2, size=1000, **nodes_by_name):
    return nodes.directory_problems(nodes_by_name, home, "t", size, keep)


def test_a_node_whose_directory_is_not_shared_or_not_writable_is_named(home):
    assert directory_problems(home, a=node()) == []
    elsewhere = node()
    elsewhere["directory"]["token"] = "another"
    unseen = node()
    unseen["directory"]["wrote"] = "not-seen-here"
    failing = node()
    failing["directory"] = {"token": None, "error": "Permission denied: x", "wrote": None}
    problems = directory_problems(home, a=elsewhere, b=unseen, c=failing)
    assert [problem.nodes for problem in problems] == [("a",), ("b",), ("c",)]
    assert "shared" in problems[0].sentence and "shared" in problems[1].sentence
    assert "Permission denied" in problems[2].sentence


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ("txx", [(("b",), True), (("c",), True)]),
        ("ttx", [(("c",), False)]),
        ("tx", [(("b",), False)]),
    ],
)
def test_a_directory_that_no_other_node_shares_is_a_mistake(home, tokens, expected):
    facts = {}
    for name, token in zip("abc", tokens):
        facts[name] = node()
        facts[name]["directory"]["token"] = token
    problems = directory_problems(home, **facts)
    assert [(problem.nodes, problem.mistake) for problem in problems] == expected


def test_there_must_be_space_for_two_checkpoints_or_one_if_others_exist(home, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1500})())
    (problem,) = directory_problems(home, keep=1, a=node())
    assert "two checkpoints need" in problem.sentence
    assert not problem.mistake and problem.nodes == ()
    assert directory_problems(home, keep=1, size=700, a=node()) == []
    (home.parent / "step-00000010").mkdir()
    assert directory_problems(home, keep=1, a=node()) == []


def test_missing_and_small_gpus_are_named():
    gib = 2**30
    large = {"name": "H100", "total": 80 * gib}
    small = {"name": "T4", "total": 15 * gib}
    assert nodes.gpu_problems({"a": [large, large], "b": [large, large]}, 2, 20 * gib) == []
    missing, too_small = nodes.gpu_problems({"a": [large], "b": [large, small]}, 2, 20 * gib)
    assert missing.nodes == ("a",) and "finds 1 of the 2 GPUs" in missing.sentence
    assert too_small.nodes == ("b",) and "GPU 1 (T4) has 15.0 GiB" in too_small.sentence
    assert not too_small.mistake
    problems = nodes.gpu_problems({"a": [small], "b": [small]}, 1, 20 * gib)
    assert all(problem.mistake for problem in problems)
