"""Train and evaluate with and without pipeline stages; see test_pipeline.py."""

import itertools
import math
import os
import shutil
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from configurations import nested
from extension_cases import WITH_LORA, extended, pretrained
from models import WINDOWS
from training_cases import evaluated, generated, option, packed, whole_state, without_speed
from training_cases import run as train

from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.training import engine

FOUR_LAYERS = [
    option("model.num_layers", 4),
    option("train.micro_batch_size", 1),
    option("train.global_batch_size", 8),
]
MIXED = [option("model.sliding_window", 5), option("model.full_attention_every", 2)]
"""Settings of layers with and without a window."""
SEVERAL = option("checkpoint.interval", 1), option("checkpoint.keep", 99)
STEPS = 3


def windows(name):
    """Return the options of a model of `models.WINDOWS`, without its number of layers."""
    settings = {key: value for key, value in WINDOWS[name].items() if key != "num_layers"}
    own = nested(settings.get("position_encoding", "tape"), **settings)
    of_encoding = {f"position.{key}": value for key, value in own.pop("position").items()}
    return [option(f"model.{key}", value) for key, value in (own | of_encoding).items()]


def cases(data):
    """Return settings by case, to train with and without stages."""
    return {
        "tape": [],
        "rope": [option("model.position_encoding", "rope")],
        "path_fox": [option("model.position_encoding", "path_fox"), *MIXED],
        "wall": [option("model.position_encoding", "wall"), *MIXED, *packed(data)],
        "selective_rope_fox": [
            option("model.position_encoding", "selective_rope_fox"),
            *MIXED,
            *packed(data),
        ],
        "learned": [option("model.position.increments", "learned")],
        "rope_signed": [
            option("model.position.increments", "signed"),
            option("model.position_encoding", "rope"),
        ],
        "tied": [option("model.tie_embeddings", "true")],
        "packed": packed(data),
        "generated": generated(),
        "full": [option("train.recompute", "full"), *packed(data)],
        "bf16_tied": [option("train.precision", "bf16"), option("model.tie_embeddings", "true")],
        # The first steps have one micro-batch per stage.
        "ramp": [option("train.batch_ramp", "{from: 2, over_samples: 8}")],
        "muon": [option("optimizer.kind", "muon")],
        "swan": [*windows("swan"), *packed(data)],
        "rope_window": windows("rope_scaled_full_layers"),
        "tape_window": windows("tape_scaled_full_layers"),
    }


PIPELINE_SIZE = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.virtual_pipeline_size"
LAYOUTS = {
    1: {"alone": []},
    2: {
        "pp2": [option(PIPELINE_SIZE, 2)],
        "pp2_v2": [option(PIPELINE_SIZE, 2), option(VIRTUAL, 2)],
    },
    4: {
        "pp4": [option(PIPELINE_SIZE, 4)],
        "pp2_cp2": [option(PIPELINE_SIZE, 2), option("parallel.context_parallel_size", 2)],
        "pp2_dp2": [option(PIPELINE_SIZE, 2), option("parallel.pipeline_layers", "[1, 3]")],
        "pp2_v2_tp2": [
            option(PIPELINE_SIZE, 2),
            option(VIRTUAL, 2),
            option("parallel.tensor_model_parallel_size", 2),
        ],
    },
}
COMPARED = (
    "tape",
    "rope_signed",
    "learned",
    "tied",
    "packed",
    "full",
    "swan",
    "rope_window",
    "tape_window",
)
"""Cases whose gradients are compared."""


def run_under(layout):
    """Return the names of the cases to run in a layout.

    gpu/test_two_ranks.py runs TAPE on two stages.
    """
    every = tuple(cases(""))
    return {
        "alone": every,
        "pp2": tuple(case for case in every if case != "tape"),
        "pp2_v2": ("packed", "ramp", "swan", "tape_window"),
        "pp2_cp2": ("tape", "tied", "tape_window"),
        "pp2_v2_tp2": ("tape", "rope_signed", "tied", "rope_window"),
    }.get(layout, ("tape", "tied"))


def run(folder, name, *overrides, trains=None):
    """Train in `folder`/`name`, and return the rows of its metrics."""
    steps = [option("train.steps", STEPS), option("train.eval_interval", STEPS)]
    return without_speed(train(folder, name, *FOUR_LAYERS, *steps, *overrides, trains=trains))


def moments(folder, name, step):
    """Return the unsharded first moments of a checkpoint."""
    return {
        key: value
        for key, value in whole_state(folder, name, step).items()
        if key.startswith("exp_avg/")
    }


def equal_runs(folder, data):
    results = {"rows": {}, "gradients": {}, "states": {}}
    size = int(os.environ["WORLD_SIZE"])
    for layout, settings in LAYOUTS[size].items():
        for case, changes in cases(data).items():
            if case not in run_under(layout):
                continue
            name = f"{case}-{layout}"
            if case == "generated":
                prefix = []
            else:
                prefix = [option("data.prefix", f"{data}/a")]
            # After the first step, the first moments are a tenth of the gradients, which are not
            # clipped, as their norm is rounded differently.
            if case in COMPARED:
                saves = [*SEVERAL, option("optimizer.clip_grad", 0.0)]
            else:
                saves = []
            results["rows"][name] = run(
                folder,
                name,
                *prefix,
                *changes,
                *settings,
                *saves,
            )
            results["states"][name] = whole_state(folder, name, STEPS)
            if saves:
                results["gradients"][name] = {step: moments(folder, name, step) for step in (1, 2)}
    return results


TP = "parallel.tensor_model_parallel_size"
ZERO = "deepspeed.zero_stage"
TWO = option(PIPELINE_SIZE, 2)
MOVES = {
    "same": ([TWO], [TWO]),
    "to_tensor": ([TWO, option(VIRTUAL, 2)], [option(TP, 2), option(ZERO, 3)]),
    "from_tensor": ([option(TP, 2)], [TWO, option("parallel.pipeline_layers", "[1,3]")]),
}
"""Layouts before and after a run is resumed."""


def first_layer(name, parameter):
    """Return whether to train a parameter; with this filter the second stage trains none."""
    return name.startswith("layers.0.")


def not_finite(step=2):
    """Replace the losses of the `step`-th step, of 8 micro-batches, by NaN on the ranks that have
    losses.
    """
    calls = itertools.count()
    scaled = engine._nan_unless_finite
    return mock.patch.object(
        engine,
        "_nan_unless_finite",
        lambda x: scaled(x * (math.nan if next(calls) // 8 == step - 1 else 1)),
    )


def more(folder, data):
    """Test other features with two stages or in one process; two processes also resume in other
    layouts.
    """
    pipeline = [TWO] if os.environ["WORLD_SIZE"] == "2" else []
    prefix = option("data.prefix", f"{data}/a")
    rows = {}
    states = {}
    evaluating = [
        option("logging.sample_tokens", 3),
        option("logging.sample_prompt", "w1 w2 w3"),
        *evaluated(data),
    ]
    rows["evaluated"] = run(
        folder,
        "evaluated",
        prefix,
        *packed(data),
        *evaluating,
        *pipeline,
    )
    rows["frozen"] = run(
        folder, "frozen", prefix, option("train.recompute", "full"), *pipeline, trains=first_layer
    )
    with not_finite():
        rows["not_finite"] = run(folder, "not_finite", prefix, *pipeline)
    updates = read_state(Path(folder, "not_finite", "checkpoints", f"step-{STEPS:08d}"))[
        "optimizer_steps"
    ]
    four = option("model.num_layers", 4)
    base = pretrained(folder, data, "base", "tape", four)
    rows["extended"] = extended(folder, data, base, "extended", *WITH_LORA, four, *pipeline)
    for name in ("evaluated", "frozen", "not_finite", "extended"):
        states[name] = whole_state(folder, name, STEPS)
    tied = [prefix, option("model.tie_embeddings", "true"), *SEVERAL]
    for name, (before, after) in MOVES.items() if pipeline else [("alone", ([], []))]:
        in_background = [option("checkpoint.asynchronous", "true"), option("checkpoint.writers", 4)]
        rows[f"{name}_whole"] = run(
            folder, name, *tied, *before, *(in_background if name == "same" else ())
        )
        states[f"{name}_whole"] = whole_state(folder, name, STEPS)
        dist.barrier()
        for step, path in list_checkpoints(f"{folder}/{name}/checkpoints"):
            if dist.get_rank() == 0 and step > 1:
                shutil.rmtree(path)
        dist.barrier()
        rows[f"{name}_continued"] = run(folder, name, *tied, *after)
        states[f"{name}_continued"] = whole_state(folder, name, STEPS)
    return {"rows": rows, "states": states, "updates": updates, "folder": str(folder)}


def main(folder, data):
    found = equal_runs(folder, data)
    if os.environ["WORLD_SIZE"] == "4":
        return found
    return found | {"more": more(folder, data)}
