"""Plans of recipes and small models, and built models to compare estimates with."""

import dataclasses
from pathlib import Path
from unittest import mock

import configurations
import torch
from models import random_tokens, small_model

from benchmarks.measured_model import activation_bytes
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import replace_settings
from megatron_tape.planning.activations import activations
from megatron_tape.planning.plan import Plan

RECIPES = Path(__file__).parents[1] / "pretrain" / "recipes"
GIB = 2**30


def recipe(name="tape_1b", *overrides):
    return parse_run_config(["--config", str(RECIPES / f"{name}.yaml"), *overrides])


def of_recipe(processes, *overrides, name="tape_1b"):
    return Plan(recipe(name, *overrides), processes)


def of_model(model, batch=1, precision="bf16", recompute="none", extension=None, **others):
    """Return the plan of a model on as many processes as one sequence needs; `others` are
    `section__key=value`.
    """
    changes = {
        "train.micro_batch_size": batch,
        "train.precision": precision,
        "train.recompute": recompute,
    }
    changes |= {name.replace("__", "."): value for name, value in others.items()}
    config = dataclasses.replace(replace_settings(configurations.make(), changes), model=model)
    if extension is not None:
        config = dataclasses.replace(config, extension=extension)
    return Plan(config, config.parallel.ranks_per_sequence)


def on_cpu(*arguments, **settings):
    """Return the estimated bytes that a forward pass saves, to compare with `saved_bytes`."""
    return activations(of_model(*arguments, **settings)).saved


def middle_model(encoding):
    sizes = dict(
        num_layers=4, vocab_size=4096, hidden_size=384, ffn_hidden_size=1024, num_attention_heads=6
    )
    others = dict(seq_length=256, mlp_size=24, attention_backend="torch")
    return small_model(position_encoding=encoding, **sizes, **others)


def saved_bytes(built, model, batch=2, packed=False):
    """Return the bytes that a forward pass with a GPU's norms saves for the backward pass, without
    weights.
    """
    from megatron_tape.planning.rehearsal import FusedRMSNorm

    tokens = random_tokens(batch, model.seq_length + 1, model.vocab_size)
    if packed:
        documents = torch.zeros(batch, model.seq_length, dtype=torch.long)
    else:
        documents = None
    norm = lambda x, shape, weight, eps=None: FusedRMSNorm.apply(x, weight)  # noqa: E731
    with mock.patch.object(torch.nn.functional, "rms_norm", norm):
        return activation_bytes(
            built, lambda: built(tokens[:, :-1], tokens[:, 1:], documents=documents)
        )
