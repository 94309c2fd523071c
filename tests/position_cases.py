"""Train encodings on two processes; parallel/test_two_processes.py checks every returned value."""

import shutil

import deepspeed
import torch
import torch.distributed as dist
from configurations import make_alone, nested
from models import WINDOWS, build, random_tokens, small_model
from plans import saved_bytes
from toy_encodings import TOYS, registered
from training_cases import option, run, tp, zero

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.model.weights import unshard
from megatron_tape.training.engine import Engine

BUILT_IN = {
    name: {"position_encoding": name}
    for name in ("fire", "path", "cope", "fox", "repo", "randpe", "selective_rope")
}
BUILT_IN["wall"] = {"position_encoding": "wall", "wall_bias_start": 1.0, "wall_sink": True}
BUILT_IN["increments"] = {"increments": "learned", "state_norm": "unit"}
# Named, since the estimate for `auto` is that of a GPU.
BUILT_IN["tape_window"] = WINDOWS["tape_scaled_full_layers"] | {"attention_backend": "tiled"}
"""Most have both sharded and replicated parameters. Positions of repo are sent to other processes;
those of randpe must be the same on all processes and in all micro-batches."""
RESUMED = (*TOYS, "path", "increments", "tape_window")
OF_ONE_HEAD = {"num_attention_heads": 1, "num_query_groups": 1}
"""Parameters with one element per head or group then have one element."""
UNDER_ZERO_3 = {name: {"position_encoding": name, **OF_ONE_HEAD} for name in ENCODINGS}
UNDER_ZERO_3["tape_per_head"] = {"token_mixing": "per_head", **OF_ONE_HEAD}
OF_THREE_HEADS = {"hidden_size": 30, "num_attention_heads": 3, "num_query_groups": 3}
UNDER_ZERO_3["fox_three_heads"] = {"position_encoding": "fox", **OF_THREE_HEADS}
"""Three biases. The first of two processes holds two of them, and the second holds one."""
UNDER_ZERO_3["increments"] = BUILT_IN["increments"] | OF_ONE_HEAD
LAYOUTS = {
    "alone": (1, 1),
    "tensor": (2, 2),
    "sharded": (1, 3),
}
"""Tensor-parallel size and ZeRO stage; without tensor parallelism the two processes are data
parallel.
"""


def settings_of(name):
    return BUILT_IN.get(name, {"position_encoding": name})


def whole_weights(model, layout):
    """Return the unsharded weights. Collective over all ranks."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    weights = {}
    for name, parameter in model.named_parameters():
        parts = [torch.empty_like(own[name]) for _ in range(layout.tensor_parallel_size)]
        dist.all_gather(parts, own[name], group=layout.groups.tp)
        weights[name] = unshard(parts, parameter)
    return weights


def steps(name, tensor_size, stage):
    """Return the losses and gradient norms of two steps, the loss after them, and the weights after
    them.
    """
    changes = {"parallel__tensor_model_parallel_size": tensor_size, "deepspeed__zero_stage": stage}
    model, layout = build(small_model(**settings_of(name)), tp=tensor_size, randomize=False)
    engine = Engine(
        model, make_alone(model.encoding.model, train__global_batch_size=2, **changes), layout
    )
    tokens = [random_tokens(1, 17, seed=i) for i in range(2)][
        layout.data_parallel_rank :: layout.data_parallel_size
    ]
    batches = [{"tokens": x[:, :-1], "labels": x[:, 1:]} for x in tokens]
    found = [engine.train_step(batches, 0.01, step) for step in (1, 2)]
    numbers = [number for step in found for number in (step.loss, step.grad_norm)] + [
        engine.evaluate(batches)
    ]
    return {"numbers": numbers, "weights": whole_weights(model, layout)}


def resume(folder, data, name, of_model, *layout):
    """Return the metrics of two steps, and those with the second step resumed from the first one's
    checkpoint.
    """
    own = nested(of_model.get("position_encoding", "tape"), **of_model)
    changes = {f"model.position.{key}": value for key, value in own.pop("position").items()}
    changes |= {f"model.{key}": value for key, value in own.items()}
    changes |= {"data.prefix": f"{data}/a", "schedule.warmup_steps": 1}
    changes |= {"train.steps": 2, "train.eval_interval": 2, "checkpoint.interval": 1}
    settings = [*(option(key, value) for key, value in changes.items()), *layout]
    whole = run(folder, name, *settings)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/{name}/checkpoints/step-00000002")
    dist.barrier()
    return whole, run(folder, name, *settings)


def costs(name):
    """Return this process's parameters and saved tensors of a model sharded over two."""
    model = small_model(**settings_of(name))
    built, _ = build(model, tp=2)
    return sum(p.numel() for p in built.parameters()), saved_bytes(built, model)


def main(folder, data):
    names = (*TOYS, *BUILT_IN)
    with registered():
        return {
            "steps": {
                name: {layout: steps(name, *sizes) for layout, sizes in LAYOUTS.items()}
                for name in names
            },
            "resumed": {
                name: resume(folder, data, name, settings_of(name), tp(2), zero(2))
                for name in RESUMED
            },
            "under_zero_3": {
                name: resume(folder, data, f"{name}-zero3", settings, tp(1), zero(3))
                for name, settings in UNDER_ZERO_3.items()
            },
            "costs": {name: costs(name) for name in names},
        }
