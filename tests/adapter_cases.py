"""Train parts of tiny models in several layouts, and save their logits; see
huggingface/test_adapter.py.
"""

import os

import torch
import torch.distributed as dist
from models import random_tokens
from safetensors.torch import save_file
from training_cases import RECIPE, option, tp, zero

from megatron_tape.checkpoint.directories import list_checkpoints
from megatron_tape.checkpoint.opening import open_to_resume
from megatron_tape.checkpoint.restoring import load_weights
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.model.names import kind_of
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.parallel.partitions import allocate
from megatron_tape.run.watch import Watch
from megatron_tape.training.model_building import build_model
from megatron_tape.training.trainer import Trainer
from pretrain import extend_context

EVERYTHING = ("lora", "embeddings", "output", "norms", "position")
LORA = [
    option("extension.trains", "[lora]"),
    option("extension.lora_rank", 3),
    option("extension.lora_alpha", 7.5),
]
LAYOUTS = [(1, 1), (2, 3)]
"""Tensor-parallel size and ZeRO stage; checkpoints of other stages hold the same. See
extension/test_layouts.py.
"""


def cases():
    """Return options and trained kinds by case: TAPE with LoRA in several layouts, and other models
    and adapters.
    """
    layouts = {
        f"tape_tp{size}_zero{stage}": ([*LORA, tp(size), zero(stage)], EVERYTHING)
        for size, stage in LAYOUTS
    }
    rope = option("model.position_encoding", "rope")
    scaled = [
        *LORA,
        rope,
        option("model.position.rope_scaling_factor", 2),
        option("extension.lora_targets", "[v, q]"),
    ]
    return layouts | {
        "rope_tied": (
            [*LORA, rope, option("model.tie_embeddings", "true"), tp(2), zero(3)],
            ("lora", "embeddings"),
        ),
        "rope_biased": (
            [
                *scaled,
                option("model.qkv_bias", "true"),
                tp(2),
                zero(1),
            ],
            ("lora",),
        ),
        "tape_without_lora": (
            [
                option("model.tie_embeddings", "true"),
                option("model.position.mlp_zero", "up"),
                tp(2),
                zero(2),
            ],
            ("position", "norms"),
        ),
        "matrices": ([tp(1), zero(1)], ("attention", "mlp")),
    }


def train(folder, name, options, kinds=None):
    """Train these kinds of parameters for three steps; return the whole logits of the last
    checkpoint.

    Without `kinds`, the command that extends a model does that, and chooses what it trains.
    """
    steps = [
        option("train.steps", 3),
        option("train.eval_interval", 0),
        option("schedule.warmup_steps", 0),
    ]
    # Adam would amplify rounding errors of tiny gradients to full steps.
    steps += [option("optimizer.eps", 1e-3), option("data.prefix", f"{folder}/a")]
    arguments = [
        "--config",
        str(RECIPE),
        "--logging.directory",
        f"{folder}/{name}",
        *steps,
        *options,
    ]
    config = parse_run_config(arguments)
    validate(
        config, dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    )
    watch = Watch(None)
    try:
        if kinds is None:
            assert extend_context.main(arguments) == 0
            dist.barrier()
        else:
            Trainer(config, watch, lambda name, parameter: kind_of(name) in kinds).run()
        layout = initialize_distributed(config.parallel.tensor_model_parallel_size)
        model = build_model(config, layout, watch)
        allocate(model, "cpu")
        load_weights(open_to_resume(config, layout), model, layout)
    finally:
        watch.close()
    assert list_checkpoints(f"{folder}/{name}/checkpoints")[0][0] == 3
    with torch.no_grad():
        return model(random_tokens())


def extended(folder):
    """Train a run that extends another; its checkpoints omit frozen parameters."""
    command = [
        option("extension.from", f"{folder}/matrices"),
        option("checkpoint.frozen", "false"),
        tp(2),
        zero(3),
    ]
    return [
        *command,
        option("extension.trains", "[lora, output, position]"),
        option("model.position.rope_scaling_factor", 2),
    ]


def main(_, folder):
    logits = {name: train(folder, name, *case) for name, case in cases().items()}
    logits["extended"] = train(folder, "extended", extended(folder))
    logits = {name: whole.contiguous() for name, whole in logits.items()}
    if dist.get_rank() == 0:
        save_file(logits, f"{folder}/logits.safetensors")
