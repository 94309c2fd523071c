"""Estimate what a run needs, without a GPU: `python -m pretrain.estimate --config X.yaml [--section.key value ...]`."""

import argparse
import copy
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from megatron_tape.command_line import counted
from megatron_tape.config.checks import validate
from megatron_tape.config.parse import parse_run_config
from megatron_tape.config.schema import RunConfig, is_positive
from megatron_tape.costs import Estimate, estimate
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.extension.base import with_base_settings
from megatron_tape.position import unread_settings

GIB = 2**30
HEADROOM = 0.06
"""Share of a GPU's memory that is left to the CUDA context, NCCL and fragmentation."""
GPU_MEMORY = {"24 GB": 24, "40 GB": 40, "48 GB": 45, "80 GB": 80, "141 GB": 140}
"""Common GPU memory sizes, and the GiB that are actually available on each."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: list[str] | None = None) -> int:
    """Print the estimate, and a warning if the run does not fit; return the exit status, 0 even with a warning."""
    try:
        options, rest = _parser().parse_known_args(argv)
        processes, gib = options.processes, options.gpu_memory
        refuse(processes is not None and processes < 1, f"--processes is {processes}; give 1 or more")
        refuse(gib is not None and not is_positive(gib), f"--gpu-memory is {gib}; give a number of GiB above 0")
        config = parse_run_config(rest, with_base_settings)
        processes = config.parallel.ranks_per_sequence if processes is None else processes
        validate(config, processes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    result = estimate(config, processes)
    fitting = [name for name, gib in GPU_MEMORY.items() if _fits(result, gib)]
    for name, value in _rows(config, processes, result, fitting):
        print(f"{name:<40}{value}")
    if unread := unread_settings(config.model):
        print(
            f"warning: {config.model.position_encoding} does not read model.{', model.'.join(unread)}", file=sys.stderr
        )
    gib = gib or max(GPU_MEMORY.values())
    if not _fits(result, gib):
        print(f"warning: {_advice(config, processes, result, gib)}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pretrain.estimate",
        usage="%(prog)s --config X.yaml [--section.key value ...] [--processes N] [--gpu-memory GIB]",
        description="Estimate parameters, memory per GPU, FLOPs, tokens and disk space of a run, without a GPU.",
        epilog="The settings are those of pretrain.train; `python -m pretrain.train --help` explains every key.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of GPUs; default: those that one sequence needs"
    )
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of one GPU; without it every usual size is compared"
    )
    return parser


def _rows(config: RunConfig, processes: int, result: Estimate, fitting: list[str]) -> Iterator[tuple[str, str]]:
    train, tensor_size = config.train, config.parallel.tensor_model_parallel_size
    yield "parameters", f"{result.parameters:,}"
    if result.trained < result.parameters:
        yield "  trained", f"{result.trained:,} ({', '.join(config.extension.trains)})"
    if tensor_size > 1:
        yield "  per tensor-parallel rank", f"{result.parameters_per_rank:,}"
    layout = counted(processes, "process", "processes")
    layout += f": {config.parallel.described(processes)}"
    yield "layout", f"{layout}, ZeRO {config.deepspeed.zero_stage}, {train.precision}, recompute {train.recompute}"
    yield "memory per GPU", f"{result.peak / GIB:8.2f} GiB"
    for name, size in (
        ("weights", result.weights),
        ("gradients", result.gradients),
        ("optimizer state", result.optimizer),
        ("activations (with torch's attention)", result.layer_activations),
        ("logits and loss", result.logits),
        ("ZeRO buffers (reduce_bucket_size)", result.buffers),
        ("extra at the peak", result.working),
    ):
        yield f"  {name}", f"{size / GIB:8.2f} GiB"
    yield "fits on GPUs of", ", ".join(fitting) or "none of " + ", ".join(GPU_MEMORY)
    if result.host:
        yield "host memory per process", f"{result.host / GIB:8.2f} GiB"
    yield "FLOPs per step", f"{result.flops_per_step:.3e}, {result.flops_per_gpu:.3e} per GPU"
    yield "tokens per step", f"{result.tokens_per_step:,}"
    yield "tokens of the run", f"{result.tokens:,} in {counted(train.steps, 'step')}"
    yield "checkpoint", f"{result.checkpoint_bytes / 1e9:.2f} GB"
    keep = config.checkpoint.keep
    yield "disk for checkpoints", f"{result.checkpoints_bytes / 1e9:.2f} GB for {keep} kept and 1 being written"


def _fits(result: Estimate, gib: float) -> bool:
    return result.peak <= (1 - HEADROOM) * gib * GIB


def _advice(config: RunConfig, processes: int, result: Estimate, gib: float) -> str:
    """Return advice on what to change: the first change that makes the run fit, or else the one that saves most."""
    best = None
    for text, changed, number in _changes(config, processes):
        try:
            validate(changed, number)
        except ConfigError:
            continue
        outcome = estimate(changed, number)
        if best is None or outcome.peak < best[1].peak:
            best = text, outcome
        if _fits(outcome, gib):
            break
    problem = f"{result.peak / GIB:.2f} GiB does not fit in {gib:g} GiB, of which {HEADROOM:.0%} must stay free"
    if best is None or best[1].peak >= result.peak:
        return f"{problem}; choose a smaller model or larger GPUs"
    enough = "which fits" if _fits(best[1], gib) else "which is not enough yet"
    return f"{problem}; first {best[0]}: {best[1].peak / GIB:.2f} GiB, {enough}"


def _changes(config: RunConfig, processes: int) -> Iterator[tuple[str, RunConfig, int]]:
    """Yield changes that save memory, the cheapest first: what to do, the configuration, the number of processes."""

    def change(key: str, value: object) -> RunConfig:
        changed = copy.deepcopy(config)
        section, _, name = key.partition(".")
        setattr(getattr(changed, section), name, value)
        return changed

    train, stage, tensor_size = config.train, config.deepspeed.zero_stage, config.parallel.tensor_model_parallel_size
    smaller = []
    if train.recompute == "none":
        smaller.append(("set", "train.recompute", "full"))
    if train.micro_batch_size > 1:
        smaller.append(("lower", "train.micro_batch_size", train.micro_batch_size // 2))
    smaller += [("raise", "deepspeed.zero_stage", higher) for higher in range(stage + 1, 4)]
    for verb, key, value in smaller:
        yield f"{verb} {key} to {value}", change(key, value), processes
    double = 2 * tensor_size
    number = processes if processes % (2 * config.parallel.ranks_per_sequence) == 0 else 2 * processes
    where = "" if number == processes else f" on {counted(number, 'process', 'processes')}"
    changed = change("parallel.tensor_model_parallel_size", double)
    changed.parallel.sequence_parallel = None
    yield f"raise parallel.tensor_model_parallel_size to {double}{where}", changed, number
    bucket = config.deepspeed.reduce_bucket_size // 10
    yield f"lower deepspeed.reduce_bucket_size to {bucket}", change("deepspeed.reduce_bucket_size", bucket), processes


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
