"""Tests that an installed Transformer Engine changes nothing, although Megatron-core prefers it for
many modules.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from models import build, random_tokens, small_model

TESTS = Path(__file__).parents[1]

STUB = """
import importlib.abc, importlib.machinery, sys, types

class Kind(type):
    def __getattr__(self, name):
        return made(self, name)

def made(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    def fail(self, *arguments, **options):
        raise RuntimeError(f"{owner.__name__}.{name} was called")
    setattr(owner, name, Kind(name, (), {"__init__": fail}))
    return vars(owner)[name]

class Stub(types.ModuleType):
    __version__, __path__ = "2.9.0", []

    def __getattr__(self, name):
        return made(self, name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
"""
PROGRAM = """
import json
from models import build, random_tokens, small_model
from megatron.core.extensions import transformer_engine
assert transformer_engine.HAVE_TE
model, _ = build(small_model())
losses = model(random_tokens(), labels=random_tokens(seed=1))
losses.mean().backward()
norms = [float(parameter.grad.norm()) for parameter in model.parameters()]
print(json.dumps([float(losses.detach().mean()), *norms]))
"""


def test_an_installed_transformer_engine_is_not_called_and_changes_nothing():
    model, _ = build(small_model())
    losses = model(random_tokens(), labels=random_tokens(seed=1))
    losses.mean().backward()
    expected = [
        float(losses.detach().mean()),
        *(float(parameter.grad.norm()) for parameter in model.parameters()),
    ]
    paths = os.pathsep.join(
        [
            str(TESTS),
            str(TESTS.parent),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    command = [sys.executable, "-c", STUB + PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert torch.isfinite(torch.tensor(expected)).all()
