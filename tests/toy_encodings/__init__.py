"""Toy encodings in one file each, as a user would write them; tests of two processes import
`head_gate`.
"""

import contextlib
import importlib
from unittest import mock

from megatron_tape.position import ENCODINGS

TOYS = ("toy_stretch",)


@contextlib.contextmanager
def registered():
    """Register the toy within the context, even if it was imported and removed before."""
    with mock.patch.dict(ENCODINGS):
        ENCODINGS["toy_stretch"] = importlib.import_module("toy_encodings.stretch").ToyStretch
        yield
