"""Positional encodings are plug-ins in one file; parallel/test_two_processes.py trains and resumes
a toy.
"""

import pytest
from models import small_model

from megatron_tape.checks.layout import has_replicated_parameters
from megatron_tape.position import ENCODINGS, NoPosition, PositionEncoding, encoding_of, register


def test_taken_names_are_refused_and_replicated_parameters_are_known():
    assert has_replicated_parameters(encoding_of(small_model(position_encoding="fox")))
    assert not has_replicated_parameters(encoding_of(small_model(position_encoding="t5")))
    with pytest.raises(ValueError, match="there is already a positional encoding named nope"):
        register(type("Other", (PositionEncoding,), {"name": "nope"}))
    assert ENCODINGS["nope"] is NoPosition
