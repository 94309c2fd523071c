"""Positional encodings are plug-ins in one file; parallel/test_two_processes.py trains and resumes
a toy.
"""

import ast
from pathlib import Path

import pytest
from models import small_model

from megatron_tape.checks.layout import has_replicated_parameters
from megatron_tape.position import ENCODINGS, NoPosition, PositionEncoding, encoding_of, register

ROOT = Path(__file__).parents[2]


def test_taken_names_are_refused_and_replicated_parameters_are_known():
    assert has_replicated_parameters(encoding_of(small_model(position_encoding="fox")))
    assert not has_replicated_parameters(encoding_of(small_model(position_encoding="t5")))
    with pytest.raises(ValueError, match="there is already a positional encoding named nope"):
        register(type("Other", (PositionEncoding,), {"name": "nope"}))
    assert ENCODINGS["nope"] is NoPosition


def compared_names(path):
    """Yield places that compare an encoding's name: `x == "tape"`, or `position_encoding` with
    anything.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Compare, ast.match_case)):
            for part in ast.walk(node if isinstance(node, ast.Compare) else node.pattern):
                named = isinstance(part, ast.Constant) and part.value in ("tape", "rope", "nope")
                if named or (isinstance(part, ast.Attribute) and part.attr == "position_encoding"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_code_outside_compares_the_name_of_an_encoding():
    folders = ("megatron_tape", "pretrain", "tools")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    exempt = (ROOT / "megatron_tape" / "position", ROOT / "megatron_tape" / "huggingface")
    searched = [path for path in modules if not any(folder in path.parents for folder in exempt)]
    assert len(searched) > 40
    assert [place for path in searched for place in compared_names(path)] == []
    example = next(path for path in modules if path.name == "config_json.py")
    assert list(compared_names(example))
