"""Train under several layouts with the installed Megatron-core; parallel/test_megatron_versions.py
compares versions.

As a program, `megatron_cases.py DATA OUTPUT` runs the cases on four processes and writes the result
to OUTPUT.
"""

import sys
from pathlib import Path

import torch
from launch import run_group
from megatron.core import package_info
from training_cases import cp, gathering_all, option, packed, rows, tp, whole_state, zero
from training_cases import run as train

STEPS = 3


def stages(virtual=1):
    """Two pipeline stages of `virtual` model chunks each, for four layers."""
    return [
        option("model.num_layers", 4),
        option("train.micro_batch_size", 1),
        option("parallel.pipeline_model_parallel_size", 2),
        option("parallel.virtual_pipeline_size", virtual),
    ]


def cases(data):
    """Return the settings of each case; ranks left over are data parallel."""
    full = option("train.recompute", "full")
    selective = option("train.recompute", "selective")
    bf16 = option("train.precision", "bf16")
    tied = option("model.tie_embeddings", "true")
    without_sequence_parallel = option("parallel.sequence_parallel", "false")
    return {
        "tensor_zero3": [tp(2), zero(3)],
        "tensor_without_sequence_parallel": [
            tp(2),
            without_sequence_parallel,
            option("model.position_encoding", "alibi"),
        ],
        "context_packed_zero2": [cp(2), zero(2), *packed(data)],
        "tensor_context_recomputed": [tp(2), cp(2), full],
        "stages": [*stages(), cp(2), full],
        "virtual_stages_tied": [*stages(virtual=2), tp(2), tied, bf16],
        "data_bf16_selective": [tp(1), zero(2), bf16, selective],
        "path_selective": [tp(2), zero(1), option("model.position_encoding", "path"), selective],
    }


def main(folder, data):
    found = {}
    for name, settings in cases(data).items():
        prefix = option("data.prefix", f"[{data}/a,{data}/b]")
        sizes = [option("train.steps", STEPS), option("train.global_batch_size", 8)]
        saves = [option("checkpoint.interval", 1), option("checkpoint.keep", STEPS)]
        validation = option("train.eval_interval", STEPS)
        with gathering_all():
            train(folder, name, prefix, *sizes, *saves, validation, *settings)
        # After the first step, the first moments are a tenth of the clipped gradients.
        states = {step: whole_state(folder, name, step) for step in range(1, STEPS + 1)}
        found[name] = {"rows": rows(Path(folder, name)), "states": states}
    return {"version": package_info.__shortversion__, "cases": found}


if __name__ == "__main__":
    data, output = sys.argv[1:]
    torch.save(run_group("megatron_cases", 4, data, timeout=400), output)
