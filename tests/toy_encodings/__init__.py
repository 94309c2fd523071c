"""Encodings that plug in, each a file as a user would write one."""

import contextlib
import importlib
from unittest import mock

from megatron_tape.position import ENCODINGS

CLASSES = {"toy_bias": "ToyBias", "toy_gate": "ToyGate", "toy_stretch": "ToyStretch"}
TOYS = (*CLASSES,)


@contextlib.contextmanager
def registered():
    """Have the toys among the encodings, also if they were imported and removed before."""
    with mock.patch.dict(ENCODINGS):
        for name, of in CLASSES.items():
            ENCODINGS[name] = getattr(importlib.import_module(f"toy_encodings.{name.removeprefix('toy_')}"), of)
        yield
