"""Encodings that plug in, each a file as a user would write one; the tests of two processes import `head_gate`."""

import contextlib
import importlib
from unittest import mock

from megatron_tape.position import ENCODINGS

TOYS = ("toy_stretch",)


@contextlib.contextmanager
def registered():
    """Have the toy among the encodings, also if it was imported and removed before."""
    with mock.patch.dict(ENCODINGS):
        ENCODINGS["toy_stretch"] = importlib.import_module("toy_encodings.stretch").ToyStretch
        yield
