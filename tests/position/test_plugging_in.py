"""A positional encoding is one file, as three toys are; parallel/test_two_processes.py trains and resumes them."""

import ast
from pathlib import Path

import pytest
import torch
from models import build, random_tokens, small_model
from plans import on_cpu, saved_bytes
from toy_encodings import TOYS, registered

from megatron_tape.checks.layout import has_whole_parameters
from megatron_tape.errors import ConfigError
from megatron_tape.model.validation import validate_model
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import ENCODINGS, MicroBatch, NoPosition, PositionEncoding, encoding_of, register

ROOT = Path(__file__).parents[2]
BATCH = MicroBatch(16, 16, 4, 1)


@pytest.fixture(scope="module", autouse=True)
def toys():
    with registered():
        yield


@pytest.mark.parametrize("name", TOYS)
def test_a_plugged_in_encoding_is_counted(name):
    model = small_model(position_encoding=name)
    for recompute in ("none", "full"):
        built, _ = build(model, recompute=recompute)
        assert on_cpu(model, 2, "fp32", recompute) == pytest.approx(saved_bytes(built, model), rel=0.02)
    assert parameter_count(model) == sum(parameter.numel() for parameter in built.parameters())
    nope = small_model(position_encoding="nope")
    added = sum(encoding_of(model).costs(layer, BATCH).multiply_adds for layer in range(model.num_layers))
    assert added > 0 and flops_per_token(model) == flops_per_token(nope) + 6 * added


@pytest.mark.parametrize("name", TOYS)
def test_a_plugged_in_encoding_keeps_packed_documents_apart(name):
    built, _ = build(small_model(position_encoding=name), recompute="full")
    ids = random_tokens(1)
    documents = torch.tensor([[0] * 5 + [1] * 11])
    packed = built(ids, documents=documents)
    torch.testing.assert_close(packed[:, 5:], built(ids[:, 5:], positions=torch.arange(5, 16)), atol=1e-5, rtol=1e-5)
    assert (built(ids) - packed)[:, 5:].abs().max() > 1e-3


def test_what_no_backend_or_layout_can_do_is_refused_by_name():
    model = small_model(position_encoding="toy_gate", attention_backend="triton")
    with pytest.raises(ConfigError, match="triton, which cannot lower the scores of keys with forget gates, as"):
        validate_model(model)
    assert has_whole_parameters(ENCODINGS["toy_gate"](model))
    assert not has_whole_parameters(ENCODINGS["toy_bias"](model))
    with pytest.raises(ValueError, match="there already is a positional encoding nope"):
        register(type("Other", (PositionEncoding,), {"name": "nope"}))
    assert ENCODINGS["nope"] is NoPosition


def compared_names(path):
    """Where a module compares the name of an encoding: `x == "tape"`, or a `position_encoding` with anything."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Compare, ast.match_case)):
            for part in ast.walk(node if isinstance(node, ast.Compare) else node.pattern):
                named = isinstance(part, ast.Constant) and part.value in ("tape", "rope", "nope")
                if named or (isinstance(part, ast.Attribute) and part.attr == "position_encoding"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_nothing_outside_compares_the_name_of_an_encoding():
    folders = ("megatron_tape", "pretrain", "tools")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    exempt = (ROOT / "megatron_tape" / "position", ROOT / "megatron_tape" / "huggingface")
    searched = [path for path in modules if not any(folder in path.parents for folder in exempt)]
    assert len(searched) > 40
    assert [place for path in searched for place in compared_names(path)] == []
    example = next(path for path in modules if path.name == "config_json.py")
    assert list(compared_names(example))
