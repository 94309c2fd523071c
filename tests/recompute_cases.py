"""Gradients of every encoding with and without recomputation on two processes; see
training/test_recompute.py.
"""

import torch
import torch.distributed as dist
from configurations import make_alone
from models import build, random_batch, small_model
from toy_encodings import TOYS, registered

from megatron_tape.config.schema import ExtensionConfig
from megatron_tape.model.names import kind_of
from megatron_tape.position import BUILT_IN
from megatron_tape.training.engine import Engine
from megatron_tape.training.gradients import local_gradient
from megatron_tape.training.model_building import freeze_parameters

NAMES = (*(encoding.name for encoding in BUILT_IN), *TOYS)
TRAINED = {
    "all": lambda name, parameter: True,
    "position": lambda name, parameter: kind_of(name) == "position",
    "others": lambda name, parameter: kind_of(name) != "position",
    "lora": lambda name, parameter: kind_of(name) == "lora",
}
LORA = ExtensionConfig(trains=["lora"], lora_rank=2)
FROZEN = {
    "position": ("t5", "fire", "cope"),
    "others": ("t5", "fire"),
    "lora": ("t5", "tape"),
}
"""Encodings to train with frozen parameters, by the trained kinds."""


def cases():
    """Return encoding, ZeRO stage, precision, trained kinds and kinds of recomputation by case."""
    both = "tape", "path_fox", *TOYS
    for name in NAMES:
        yield name, 1, "fp32", "all", ("selective", "full") if name in both else ("selective",)
    for name in ("t5", "repo", "selective_rope", *both):
        yield name, 3, "fp32", "all", ("selective",)
    for name in ("fire", "path_fox", "selective_rope_fox", "wall"):
        yield name, 1, "bf16", "all", ("selective",)
    for trained, names in FROZEN.items():
        for name in names:
            yield name, 1, "fp32", trained, ("selective",)
            yield name, 3, "fp32", trained, ("selective",)


def step(name, zero_stage, precision, trained, recompute):
    """Return the loss of a step of two micro-batches, and this rank's shard of each trained
    parameter's gradient.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    settings = small_model(position_encoding=name, num_layers=2)
    model, layout = build(
        settings, recompute=recompute, dtype=dtype, lora=LORA if trained == "lora" else None
    )
    freeze_parameters(model, TRAINED[trained])
    changes = {"deepspeed__zero_stage": zero_stage, "train__precision": precision}
    sizes = {"train__global_batch_size": 8, "train__micro_batch_size": 2}
    engine = Engine(model, make_alone(settings, **changes, **sizes), layout)
    gradients = {}

    def look():
        for name, parameter in engine.trained.items():
            part = local_gradient(parameter, zero_stage)
            gradients[name] = None if part is None else part.detach().clone()

    engine.before_update = look
    batches = [random_batch(2 * i + layout.data_parallel_rank, batch=2) for i in range(2)]
    result = engine.train_step(batches, 0.0)
    engine.close()
    return result.loss, gradients


def compared(one, other):
    """Compare two steps of this rank: the losses, the number of gradients, and their largest
    difference.

    Distances are relative to the largest number of a gradient.
    """
    (loss, gradients), (other_loss, others) = one, other
    assert gradients.keys() == others.keys()
    far = [0.0]
    moved = 0
    for name, gradient in gradients.items():
        assert (gradient is None) == (others[name] is None), name
        if gradient is not None and gradient.any():
            moved += 1
            far.append(((gradient - others[name]).abs().max() / gradient.abs().max()).item())
    return {"same_loss": loss == other_loss, "gradients": moved, "far": max(far)}


def differences(*case, kinds):
    """Return the difference of a step with each kind of recomputation from one without, on each
    rank, or its error.
    """
    plain = step(*case, "none")
    found = {}
    for recompute in kinds:
        try:
            own = compared(plain, step(*case, recompute))
        except Exception as error:
            own = f"{type(error).__name__}: {error}"
        found[recompute] = [None] * dist.get_world_size()
        dist.all_gather_object(found[recompute], own)
    return found


def main(folder):
    found = {}
    with registered():
        for *case, kinds in cases():
            for recompute, of_ranks in differences(*case, kinds=kinds).items():
                name, zero_stage, precision, trained = case
                found[f"{name}_zero{zero_stage}_{precision}_{trained}_{recompute}"] = of_ranks
    return found
