"""Train under every layout of two ranks, and on one process. gpu/test_two_ranks.py starts this on
both at the same time, and compares the results.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import ON_GPU
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from training_cases import cp, gathering_all, option, tp, whole_state, without_speed, zero
from training_cases import run as train

from megatron_tape.parallel import megatron_patches

STEPS = 3
ROPE = option("model.position_encoding", "rope")
BF16 = option("train.precision", "bf16")
TWO_STAGES = option("parallel.pipeline_model_parallel_size", 2)
FP32_LAYOUTS = {
    "tp2_zero3": ("tape", [tp(2), zero(3)]),
    "zero3": ("tape", [zero(3)]),
    "cp2_zero2": ("tape", [cp(2), zero(2)]),
    "zero1": ("tape", [zero(1)]),
    "tp2_without_sp": ("rope", [tp(2), option("parallel.sequence_parallel", "false")]),
    "pp2": ("tape", [TWO_STAGES]),
    "pp2_v2": ("tape", [TWO_STAGES, option("parallel.virtual_pipeline_size", 2)]),
}
"""Layouts of two ranks by name: the run on one process that each must equal, a key of `SINGLE`, and
the layout's settings. Ranks that are neither tensor nor context parallel nor pipeline stages are
data parallel.
"""
BF16_LAYOUTS = {"tp2_bf16": ("tape_bf16", [tp(2)])}
if ON_GPU:
    # Without a GPU, other tests cover such layouts in bf16.
    BF16_LAYOUTS |= {
        "pp2_bf16": ("tape_bf16", [TWO_STAGES]),
        "cp2_zero3_bf16": ("tape_bf16", [cp(2), zero(3)]),
    }
LAYOUTS = FP32_LAYOUTS | BF16_LAYOUTS
SINGLE = {"tape": [], "rope": [ROPE], "tape_bf16": [BF16]}
"""The settings of runs on one process by name."""
RESUMED = ("tp2_zero3", "zero3", "pp2")
"""Layouts whose checkpoint of step 2 is also resumed by one process."""


def settings(single):
    """Return the settings of a run on one process, which its layouts share. `single` is a key of
    `SINGLE`.
    """
    chosen = [
        *SINGLE[single],
        option("model.num_layers", 4),
        option("train.steps", STEPS),
        option("train.eval_interval", STEPS),
        option("train.micro_batch_size", 1),
        option("checkpoint.interval", 1),
        option("checkpoint.keep", STEPS),
        # Layouts round the norm differently, which would change clipped gradients.
        option("optimizer.clip_grad", 0.0),
        # Adam's usual eps would turn gradients that are only rounding errors into full steps.
        option("optimizer.eps", 1e-6),
    ]
    if ON_GPU:
        # Sizes that kernels support, also for the half of the heads and groups that a
        # tensor-parallel rank has.
        chosen += [
            option("model.hidden_size", 256),
            option("model.ffn_hidden_size", 512),
            option("model.num_attention_heads", 8),
            option("model.num_query_groups", 4),
            option("model.seq_length", 128),
            option("model.vocab_size", 512),
            option("model.init_std", 0.05),
            option("optimizer.lr", 0.002),
            # Longer than kernels take to compile. A rank that hangs writes its stacks after this
            # time.
            option("train.hang_timeout", 60),
        ]
        # Otherwise, `auto` would choose a library for TAPE in bf16.
        if single != "rope":
            chosen.append(option("model.attention_backend", "triton"))
    return chosen


def run(folder, name, single, *overrides):
    """Train in `folder`/`name`, and save the metrics, the gradients of the first step, and the
    state after the last one. Do nothing if an earlier attempt has saved them.

    `single` is the run on one process whose settings it has, with `overrides`.
    """
    result = result_path(folder, name)
    if result.exists():
        return
    # Otherwise, ZeRO 3 would replicate small parameters: on the CPU, all of them.
    with gathering_all():
        rows = train(
            folder,
            name,
            option("data.prefix", f"{folder}/data"),
            *settings(single),
            *overrides,
        )
    found = {"rows": without_speed(rows), "state": whole_state(folder, name, STEPS)}
    # A resumed run has no checkpoint of the first step.
    if len(rows) == STEPS:
        # After the first step, the first moments are a tenth of the gradients.
        first = whole_state(folder, name, 1)
        found["gradients"] = {
            key: value for key, value in first.items() if key.startswith("exp_avg/")
        }
    if dist.get_rank() == 0:
        # Renamed when it is complete, since the other group waits for this file.
        partial = result.with_suffix(".partial")
        torch.save(found, partial)
        os.rename(partial, result)


def result_path(folder, name):
    """Return the file with the results of a layout or of a run on one process."""
    return Path(folder, f"{name}.pt")


def refuse_unless_copied():
    """Make Megatron's functions refuse to send and receive its own tensors, as gloo does on a GPU.

    `send_through_cpu` then makes Megatron send and receive copies.
    """
    communicate = P2PCommunicator._communicate

    def marked(self, **arguments):
        """Mark the tensors that Megatron sends, and communicate."""
        for name in ("tensor_send_next", "tensor_send_prev"):
            if arguments[name] is not None:
                arguments[name].of_megatron = True
        return communicate(self, **arguments)

    def refusing(start):
        """Return a function that calls `start` unless an argument is a tensor of Megatron."""

        def start_or_refuse(**arguments):
            for name, tensor in arguments.items():
                if name.startswith("tensor_") and tensor is not None:
                    # Tensors that Megatron has created to receive into require gradients; copies do
                    # not.
                    if tensor.requires_grad or hasattr(tensor, "of_megatron"):
                        raise RuntimeError("this tensor cannot be sent or received")
            return start(**arguments)

        return start_or_refuse

    P2PCommunicator._communicate = marked
    p2p_communication._batched_p2p_ops = refusing(p2p_communication._batched_p2p_ops)
    p2p_communication._p2p_ops = refusing(p2p_communication._p2p_ops)
    megatron_patches.send_through_cpu()


def main(_, folder, *failed):
    """Train in all layouts if this group has two ranks, otherwise all runs on one process.

    `folder` is that of both groups; the first argument is the folder of this group. `failed` are
    the layouts to leave out, since they have failed before.
    """
    if os.environ["WORLD_SIZE"] == "2":
        if not ON_GPU:
            refuse_unless_copied()
        for name, (single, overrides) in LAYOUTS.items():
            if name not in failed:
                run(folder, name, single, *overrides)
        return

    for name in SINGLE:
        run(folder, name, name)
    for name in RESUMED:
        if name in failed:
            continue
        # The two ranks write the result after the checkpoints. If they fail, `run_groups` ends this
        # process.
        while not result_path(folder, name).exists():
            time.sleep(0.1)
        single, _ = LAYOUTS[name]
        saved = Path(folder, name, "checkpoints", f"step-{STEPS - 1:08d}")
        run(folder, f"{name}_resumed", single, option("checkpoint.resume", saved))
