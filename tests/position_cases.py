"""Trains the toy encodings on two processes; position/test_plugging_in.py checks every value returned."""

import importlib
import shutil

import torch.distributed as dist
from models import build, small_model
from plans import saved_bytes
from training_cases import option, run, tp, zero

from megatron_tape.position import ENCODINGS

BUILT_IN = {name: {"position_encoding": name} for name in ("fire", "path", "cope", "fox", "repo", "randpe")}
BUILT_IN["increments"] = {"position_increments": "learned", "position_state_norm": "unit"}
"""Parameters of most are of both kinds: cut over the processes, and held whole by each. Positions that repo computes
are sent to other processes, and what randpe draws must be the same on all, and in all micro-batches."""
TOYS = {"toy_bias": "bias", "toy_gate": "gate", "toy_stretch": "stretch"}


def register_toys():
    """Register the toys, also where another module of tests has imported and removed them before."""
    for name, file in TOYS.items():
        found = vars(importlib.import_module(f"toy_encodings.{file}")).values()
        ENCODINGS[name] = next(one for one in found if getattr(one, "name", None) == name)


def settings_of(name):
    return BUILT_IN.get(name, {"position_encoding": name})


def train(folder, data, name):
    """Two steps under two layouts, and the second step again from the checkpoint of the first."""
    both = [option("data.prefix", f"{data}/a")]
    both += [option(f"model.{key}", value) for key, value in settings_of(name).items()]
    both += [
        option("train.steps", 2),
        option("schedule.warmup_steps", 1),
        option("train.eval_interval", 2),
        option("checkpoint.interval", 1),
    ]
    alone = run(folder, f"{name}-alone", *both, tp(1), zero(1))
    whole = run(folder, name, *both, tp(2), zero(2))
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/{name}/checkpoints/step-00000002")
    dist.barrier()
    rows = {"alone": alone, "whole": whole, "continued": run(folder, name, *both, tp(2), zero(2))}
    return rows | {"sharded": run(folder, f"{name}-sharded", *both, tp(1), zero(3))} if name in BUILT_IN else rows


def costs(name):
    """What this process holds and saves of a model shared by two."""
    model = small_model(**settings_of(name))
    built, _ = build(model, tp=2)
    return sum(p.numel() for p in built.parameters()), saved_bytes(built, model)


def main(folder, data):
    register_toys()
    return {name: {"rows": train(folder, data, name), "costs": costs(name)} for name in (*TOYS, *BUILT_IN)}
