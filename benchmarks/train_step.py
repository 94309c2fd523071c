"""Measure training steps of TAPE beside RoPE, with the same DeepSpeed engine, and beside what one would train instead.

    python -m benchmarks.train_step [--layers 4] [--tokens 4096]              the CPU's figures
    python -m benchmarks.train_step --shape 1.3b-4k --profile --record        a GPU's, and a trace of a step
    torchrun --nproc-per-node 8 -m benchmarks.train_step --shape 1.3b-4k [--tensor-parallel 2]

A step is the training's own (`Engine.train_step`): all micro-batches, averaging over ranks, clipping, Adam. Loading
data is not part of it; every step trains on the same random tokens. On one process, models of the same sizes in
transformers and Megatron-core (benchmarks/rivals.py) train on the same tokens; `--against` names fewer or none. On a
CPU steps of all alternate, and a ratio is the median of paired steps. A GPU holds one model at a time, and blocks of
steps follow each other: TAPE, RoPE, the others, and back, so that a slow drift cancels, or not back with `--order
once`. No figure appears unless RoPE and TAPE start with the same losses.

Model FLOPs are those of `planning.flops.flops_per_token`: matrix products forward and backward, causal attention as
half of all pairs, nothing for recomputation. They include what TAPE itself adds: averaging the state, and its
update. MFU is model FLOP/s per GPU divided by the data sheet's bf16 peak, and is given for GPUs that are listed in
megatron_tape/planning/hardware.py. `mfu_of_rope_flops` divides RoPE's FLOPs by TAPE's time: it counts nothing that RoPE
does not need, and is the stricter figure for TAPE. `of_matmul` compares with a large matrix product measured here.

On a GPU memory is what torch allocated at the peak, beside the estimate's. On a CPU it is added up from the tensors:
weights, gradients, Adam's moments, and what the forward pass keeps. If memory does not suffice, the micro-batch is
halved and the number of micro-batches doubled, for both models.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys

import torch

from benchmarks.environment import add_record_arguments, positive, quieten_libraries
from benchmarks.shapes import ENCODINGS, RIVALS, SHAPES, Shape, run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.config.schema import ATTENTION_BACKENDS
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.launcher import rank_and_size


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; `--record` or `--output` also writes a record. Returns the exit status."""
    on_gpu = torch.cuda.is_available()
    arguments, shape = parse(argv, on_gpu)
    rank, world_size = rank_and_size()
    try:
        if missing := [name for name in ("megatron", "deepspeed") if importlib.util.find_spec(name) is None]:
            raise ConfigError(" and ".join(missing), "cannot be imported", "install requirements.txt")
        for encoding in ENCODINGS:
            validate(run_config(encoding, shape, world_size, arguments), world_size)
        rivals = rivals_here(arguments.against, world_size)
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    quieten_libraries(rank)
    if arguments.tensor_parallel > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron to overlap collectives
    from benchmarks.step_comparison import Comparison
    from benchmarks.step_results import table
    from megatron_tape.parallel.layout import abort_process_groups, initialize_distributed

    try:
        result = Comparison(arguments, shape, initialize_distributed(arguments.tensor_parallel), rivals).run()
    except ConfigError as error:
        abort_process_groups()
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        return 1
    except Exception:
        abort_process_groups()
        raise
    if rank == 0:
        print("\n".join(table(result)), flush=True)
    return 0


def rivals_here(wanted: list[str] | None, processes: int) -> list[str]:
    """Return the rivals that were asked for, by default all that can train here. Raises ConfigError if one cannot."""
    found = []
    for name in RIVALS if wanted is None else wanted:
        why = "trains on one process" if processes > 1 else None
        if name == "transformer_engine" and not torch.cuda.is_available():
            why = "needs a GPU"
        elif importlib.util.find_spec(name) is None:
            why = "is not installed"
        if why and wanted:
            raise ConfigError("--against", f"names {name}, which {why}", "leave it out")
        found += [] if why else [name]
    return found


def parse(argv: list[str] | None, on_gpu: bool) -> tuple[argparse.Namespace, Shape]:
    """Read the options; those that were not given get the defaults of the device and the shape."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shape = "155m-1k" if on_gpu else "cpu"
    add("--shape", choices=SHAPES, default=shape, help="model and batch (default here: %(default)s)")
    add("--layers", type=positive, metavar="N", help="instead of the shape's")
    add("--tokens", type=positive, metavar="N", help="of a sequence, instead of the shape's")
    add("--micro-batch", type=positive, metavar="N", help="sequences; halved until they fit a GPU")
    add("--accumulate", type=positive, metavar="N", help="micro-batches of a step on each rank")
    add("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on a CPU")
    add("--zero-stage", type=int, choices=(1, 2, 3), default=1, help="default: %(default)s")
    add("--recompute", choices=("none", "selective", "full"), default="none", help="default: %(default)s")
    add("--tensor-parallel", type=positive, default=1, metavar="T", help="default: %(default)s")
    backends = [name for name in ATTENTION_BACKENDS if name != "naive"]
    add("--tape-backend", choices=backends, default="auto", help="TAPE's attention (default: %(default)s)")
    add("--rope-backend", choices=backends, default="auto", help="RoPE's attention (default: %(default)s)")
    add("--against", nargs="*", choices=RIVALS, metavar="NAME", help=f"of {', '.join(RIVALS)} (default: what is here)")
    add("--order", choices=("blocks", "once", "alternate"), help="default: blocks; on a CPU alternate, except for toy")
    add("--warmup", type=positive, metavar="N", help="steps before those that count, in every block")
    add("--repetitions", type=positive, metavar="N", help="steps of a block, or pairs if they alternate")
    add("--profile", action="store_true", help="profile a step of each: longest kernels; beside a record, a trace")
    add_record_arguments(parser)
    arguments = parser.parse_args(argv)
    sizes = {"layers": arguments.layers, "seq_length": arguments.tokens}
    sizes |= {"micro_batch": arguments.micro_batch, "accumulate": arguments.accumulate}
    changed = dataclasses.replace(SHAPES[arguments.shape], **{k: size for k, size in sizes.items() if size})
    small = arguments.shape == "toy"
    defaults = {
        "precision": "bf16" if on_gpu else "fp32",
        "order": "blocks" if on_gpu or small else "alternate",
        "warmup": 1 if small else 2,
        "repetitions": 2 if small else 7,
    }
    for name, default in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if on_gpu and arguments.order == "alternate":
        parser.error("--order alternate is for CPUs: the memory of a GPU is measured with one model at a time")
    return arguments, changed


if __name__ == "__main__":
    sys.exit(main())
