"""Extend a small model under every layout of the processes, inside one process group."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_cases import checksums, option, packed, tp, whole_state, zero
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.extension import importing
from megatron_tape.run.watch import Watch
from megatron_tape.training.hooks import Hook
from megatron_tape.training.model_building import parameter_filter
from megatron_tape.training.trainer import Trainer
from pretrain import extend_context, train

TESTS = Path(__file__).parent
BASE = TESTS / "recipes" / "tiny.yaml"
RECIPE = TESTS / "recipes" / "extend.yaml"
STEPS = 3
TOKENS = torch.randint(
    60,
    (2, 32),
    generator=torch.Generator().manual_seed(1),
)
ONLY = "extension.trains"
WITH_LORA = [option(ONLY, "[position,lora,embeddings,norms]")]
FULL = option("train.recompute", "full")
LAYOUTS = [(1, 1), (1, 2), (1, 3), (2, 3)]
VARIANTS = {
    "tape_recomputed": [option(ONLY, "[position]"), FULL],
    "lora_recomputed": [option("model.position_encoding", "rope"), option(ONLY, "[lora]"), FULL],
    "all": [option(ONLY, "[all]")],
    "shifted_sparse_with_yarn": [
        option("extension.attention", "shifted_sparse"),
        option("model.position.rope_scaling_type", "yarn"),
        option("model.position.rope_original_seq_length", 16),
        FULL,
    ],
}


def write_llama(folder, data=None, **changes):
    """Write a Hugging Face model with random weights and, with `data`, its tokenizer."""
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
    )
    settings = dict(num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2)
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**sizes | settings | changes)).save_pretrained(folder)
    if data is not None:
        shutil.copy(data / "tokenizer.json", folder)
    return folder


def pretrained(folder, data, name="base", encoding="rope", *overrides):
    """Train a small RoPE or TAPE model to extend, and return its run."""
    run = f"{folder}/{name}"
    settings = [
        option("model.position_encoding", encoding),
        "--train.steps=4",
        "--train.eval_interval=0",
        *overrides,
    ]
    status = train.main(
        [
            "--config",
            str(BASE),
            option("data.prefix", f"{data}/a"),
            f"--logging.directory={run}",
            *settings,
        ]
    )
    assert status == 0
    dist.barrier()
    return run


def arguments(folder, data, base, name, *overrides, recipe=RECIPE):
    prefix = option("data.prefix", f"{data}/a")
    run = f"--logging.directory={folder}/{name}"
    return [
        "--config",
        str(recipe),
        prefix,
        run,
        option("extension.from", base),
        *map(str, overrides),
    ]


class Begun(Hook, Exception):
    """Ends a run before its first step, with the logits of the model."""

    def before_step(self, trainer, step):
        self.logits = trainer.engine.logits(TOKENS)
        raise self


def first_logits(data, base, folder, *overrides, recipe=RECIPE):
    """Return the logits of the model that the command starts from."""
    config = parse_run_config(arguments(folder, data, base, "unused", *overrides, recipe=recipe))
    with contextlib.closing(Watch(None)) as watch, pytest.raises(Begun) as begun:
        hooks = {"begun": Begun()}
        Trainer(
            config,
            watch,
            parameter_filter(config.extension),
            importing.base_of_run,
            lambda _: hooks,
        ).run()
    return begun.value.logits


def extended(folder, data, base, name, *overrides):
    """Extend `base` in `folder`/`name`; return the rows of metrics.jsonl."""
    status = extend_context.main(arguments(folder, data, base, name, *overrides))
    assert status == 0, f"{name} ended with {status}"
    dist.barrier()
    rows = [
        json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()
    ]
    dist.barrier()
    return rows


def states(folder, names):
    """Return the weights and moments of these extended models by name."""
    return {name: whole_state(folder, name, STEPS) for name in names}


def continued(folder, data, base, name, *overrides):
    """Train uninterrupted, and again from the first step's checkpoint; return the rows and last
    tensors of both.
    """
    every = [*overrides, "--checkpoint.interval=1"]
    found = {
        "whole": extended(folder, data, base, name, *every),
        "whole_state": checksums(folder, name, STEPS),
    }
    found["whole_tensors"] = whole_state(folder, name, STEPS)
    dist.barrier()
    for step, path in list_checkpoints(f"{folder}/{name}/checkpoints"):
        if dist.get_rank() == 0 and step > 1:
            shutil.rmtree(path)
    dist.barrier()
    found["continued"] = extended(folder, data, base, name, *every)
    return found | {"continued_state": checksums(folder, name, STEPS)}


def main(folder, data):
    size = int(os.environ.get("WORLD_SIZE", "1"))
    base = pretrained(folder, data)
    rows = {}
    for tensor_size, stage in LAYOUTS if size > 1 else [(1, 1)]:
        name = f"tp{tensor_size}_zero{stage}"
        rows[name] = extended(
            folder,
            data,
            base,
            name,
            tp(tensor_size),
            zero(stage),
        )
    for name, overrides in {**VARIANTS, "packed": packed(data)}.items():
        rows[name] = extended(
            folder,
            data,
            base,
            name,
            tp(size),
            zero(1),
            *overrides,
        )
    leaner = ["--checkpoint.frozen=false", *WITH_LORA]
    if size == 1:
        rows["with_lora"] = extended(folder, data, base, "with_lora", *leaner)
        return rows | {"states": states(folder, rows)}
    resumed = {
        "tp2_zero1": continued(folder, data, base, "resumed-1", tp(2), zero(1)),
        "with_lora": continued(
            folder,
            data,
            base,
            "resumed-3",
            tp(1),
            zero(3),
            *leaner,
        ),
    }
    found = states(folder, rows)
    found |= {name: case.pop("whole_tensors") for name, case in resumed.items()}
    return (
        rows
        | {name: case["whole"] for name, case in resumed.items()}
        | {"resumed": resumed, "states": found}
    )
