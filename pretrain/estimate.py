"""Estimate the resources of a run: `python -m pretrain.estimate --config RECIPE [--section.key
value ...]`.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator

from megatron_tape import command_line
from megatron_tape.checkpoint.index import writer_count
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import AVERAGE, ROTATION, described
from megatron_tape.planning.flops import flops_per_step
from megatron_tape.planning.hardware import KINDS, Hardware
from megatron_tape.planning.memory import Memory, checkpoint_bytes, checkpoints_bytes, memory
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.planning.plan import Plan
from megatron_tape.planning.search import (
    CHOSEN,
    GIB,
    HEADROOM,
    ONE_GPU,
    Candidate,
    SearchResult,
    fits,
    search,
)
from megatron_tape.planning.step_time import EFFICIENCY, step_time
from megatron_tape.position import encoding_of
from megatron_tape.text import byte_size, counted, duration

COMPONENTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "layer_activations": "activations",
    "output_gradient": "output gradient",
    "buffers": "ZeRO buffers (reduce_bucket_size)",
    "working": "extra at the peak",
}
"""Names of the components of peak memory, by the attribute of `Memory`."""
ROW = "{:>6}{:>8}{:>9}{:>6}{:>5}{:>6}{:>10}{:>9}{:>7}"
"""Format of a row of the table of layouts; its columns are COLUMNS."""
COLUMNS = ("tensor", "context", "pipeline", "data", "ZeRO", "micro", "recompute", "s/step", "GiB")


def main(argv: list[str] | None = None) -> int:
    """Print the estimate, or with --search the layouts that fit; return 1 if a search finds none,
    otherwise 0.

    An estimate that does not fit prints a warning.
    """
    options, settings = _parser().parse_known_args(argv)
    processes = options.processes
    gib = options.gpu_memory
    if processes is not None and processes < 1:
        raise ConfigError("--processes", f"is {processes}", "give 1 or more")
    if gib is not None and not 0 < gib < math.inf:
        raise ConfigError("--gpu-memory", f"is {gib}", "give a number of GiB above 0")
    if options.search:
        searched = [
            name for name in CHOSEN if any(x.partition("=")[0] == f"--{name}" for x in settings)
        ]
        if bool(searched):
            raise ConfigError(
                "--search", f"chooses {', '.join(searched)} itself", "remove these settings"
            )
        if processes is None:
            raise ConfigError("--search", "needs --processes", "add it with the number of GPUs")
        settings += [f"--{name}={value}" for name, value in ONE_GPU.items()]
    config = parse_run_config(settings)
    hardware = KINDS[options.gpu]
    gib = gib or hardware.memory
    if options.search:
        plan = Plan(config, processes, generation=hardware.generation)
        result = search(plan, hardware, gib, validate)
        print("\n".join(_describe_search(result, plan, hardware, gib)))
        _warn_of_encoding(config.model)
        if result.fitting:
            return 0
        return 1
    if processes is None:
        processes = config.parallel.ranks_per_sequence
    else:
        processes = processes
    plan = Plan(config, processes, generation=hardware.generation)
    check(config, Level.SETTINGS, processes)
    needed = memory(plan)
    for name, value in (*_rows(plan, needed), *_time(plan, hardware)):
        print(f"{name:<40}{value}")
    in_bf16 = config.train.precision == "bf16"
    if in_bf16:
        _warn_of_encoding(config.model)
    if not fits(needed, gib):
        fix = "--processes N --search lists layouts that do"
        if not in_bf16:  # a search ranks layouts by their step times, which are known only for bf16
            fix = (
                "train.precision bf16 takes less, and with it --processes N --search lists layouts"
                " that fit"
            )
        _warn(f"{byte_size(needed.peak)} does not fit in {_room(gib)}; {fix}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m pretrain.estimate",
        usage=(
            "%(prog)s [--config] RECIPE [--section.key value ...] [--processes N] [--gpu-memory"
            " GIB] [--gpu KIND] [--search]"
        ),
        description=(
            "Compute the parameters, memory per GPU, FLOPs, tokens and disk space of a run, and"
            " estimate its step time. No GPU is needed."
        ),
        epilog=(
            "The settings are those of pretrain.train; `python -m pretrain.train --help` explains"
            " every key."
        ),
    )
    add = parser.add_argument
    add(
        "--processes",
        type=int,
        metavar="N",
        help="number of GPUs (default: as many as one model replica needs)",
    )
    add(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU in GiB (default: that of --gpu)",
    )
    gpu_help = "model of the GPUs, which determines memory and step time (default: %(default)s)"
    add("--gpu", choices=KINDS, default="H100", help=gpu_help)
    search_help = (
        "list the ten fastest layouts that fit on --processes GPUs; a layout is a choice of"
        " tensor-, context- and pipeline-parallel sizes, virtual stages, ZeRO stage, micro-batch"
        " size and recomputation"
    )
    add("--search", action="store_true", help=search_help)
    return parser


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _warn_of_encoding(model: ModelConfig) -> None:
    encoding = model.position_encoding
    if slower := encoding_of(model).needs - {ROTATION, AVERAGE}:
        _warn(
            f"the step time assumes RoPE's attention; with {encoding}, steps take longer, because"
            f" attention must {described(slower)}"
        )


def _rows(plan: Plan, needed: Memory) -> Iterator[tuple[str, str]]:
    config = plan.config
    parameters = parameter_count(plan.model, plan.extension)
    trained = parameter_count(plan.model, plan.extension, plan.trained_kinds)
    yield "parameters", f"{parameters:,}"
    if trained < parameters:
        yield "  trained", f"{trained:,} ({', '.join(plan.extension.trains)})"
    if plan.tensor_size * plan.pipeline_size > 1:
        elements = max(stage.elements for stage in plan.pipeline_stages())
        yield "  per model-parallel rank, at most", f"{elements:,}"
    layout = (
        f"{counted(plan.processes, 'process', 'processes')}:"
        f" {config.parallel.describe(plan.processes)}"
    )
    yield (
        "layout",
        (
            f"{layout}, ZeRO {plan.zero_stage}, {config.train.precision}, recompute"
            f" {config.train.recompute}"
        ),
    )
    yield "attention on a GPU, assumed", _attention(plan)
    yield "memory per GPU", f"{byte_size(needed.peak):>10}"
    for attribute, name in COMPONENTS.items():
        yield f"  {name}", f"{byte_size(getattr(needed, attribute)):>10}"
    if config.checkpoint.asynchronous:
        shards = plan.tensor_size * plan.pipeline_size
        shard = checkpoint_bytes(plan) // shards
        writers = min(
            plan.data_context_size, writer_count(shard, shards, config.checkpoint.writers)
        )
        copies = f"{byte_size(shard // writers):>10}, {counted(writers * shards, 'writer')}"
        yield "host memory per checkpoint writer", copies
    flops = flops_per_step(plan)
    yield "FLOPs per step", f"{flops:.3e}, {flops // plan.processes:.3e} per GPU"
    yield "tokens per step", f"{plan.tokens_per_step:,}"
    yield "tokens of the run", f"{plan.tokens:,} in {counted(config.train.steps, 'step')}"
    yield "checkpoint", byte_size(checkpoint_bytes(plan))
    kept = f"at most {config.checkpoint.keep} kept, 1 being written"
    if milestones := config.checkpoint.milestones(config.train.steps):
        kept += f", {milestones} kept permanently"
    yield "disk for checkpoints", f"{byte_size(checkpoints_bytes(plan))} for {kept}"


def _attention(plan: Plan) -> str:
    return f"{plan.attention.backend}, {plan.attention}"


def _time(plan: Plan, hardware: Hardware) -> Iterator[tuple[str, str]]:
    try:
        time = step_time(plan, hardware)
    except ConfigError as error:
        yield "step time", f"not estimated: {error}"
        return
    overheads = {"communication": time.communication, "waiting for other stages": time.bubble}
    shares = "".join(
        f", {value / time.total:.0%} {name}" for name, value in overheads.items() if value
    )
    yield "step time, assumed", f"{_seconds(time.total)} s on {_assumed(hardware)}{shares}"
    yield (
        "time of the run, assumed",
        duration(float(f"{time.total * plan.tokens / plan.tokens_per_step:.2g}")),
    )


def _seconds(time: float) -> str:
    """Format seconds with two significant digits, since the estimate is no more precise."""
    return f"{float(f'{time:.2g}'):g}"


def _assumed(hardware: Hardware) -> str:
    return f"{hardware.name} at {EFFICIENCY:.0%} of the peak"


def _room(gib: float) -> str:
    return f"{gib:g} GiB with {HEADROOM:.0%} kept free"


def _describe_search(
    result: SearchResult, plan: Plan, hardware: Hardware, gib: float
) -> Iterator[str]:
    gpus = counted(plan.processes, "GPU")
    batch = counted(plan.config.train.global_batch_size, "sequence")
    yield (
        f"assumed for {gpus}, {_assumed(hardware)}; {batch} of {plan.model.seq_length:,} tokens a"
        " step"
    )
    yield f"attention, assumed: {_attention(plan)}"
    if result.fitting:
        yield ROW.format(*COLUMNS)
        yield from map(_row, result.fitting)
        yield f"the first of these: {_settings(result.fitting[0].plan.config)}"
    elif result.too_large:
        yield f"none fits in {_room(gib)}; the smallest:"
        yield ROW.format(*COLUMNS)
        for candidate in sorted(result.too_large, key=lambda candidate: candidate.memory.peak)[:5]:
            size, part = max(
                (getattr(candidate.memory, attribute), name)
                for attribute, name in COMPONENTS.items()
            )
            yield f"{_row(candidate)}  of which {part} {size / GIB:.1f}"
    else:
        yield f"no layout can run on {gpus}"
    for reason, count in list(result.refused.items())[:5]:  # the reasons of the smallest layouts
        yield f"{counted(count, 'layout')} cannot run: {reason}"


def _settings(chosen: RunConfig) -> str:
    """Return the layout that a search chose as arguments `--section.key value`."""
    values = {
        name: getattr(getattr(chosen, name.partition(".")[0]), name.partition(".")[2])
        for name in CHOSEN
    }
    shown = {
        name: json.dumps(value, separators=(",", ":")).strip('"') for name, value in values.items()
    }
    return " ".join(f"--{name} {value}" for name, value in shown.items())


def _row(candidate: Candidate) -> str:
    plan, train = candidate.plan, candidate.plan.config.train
    return ROW.format(
        plan.tensor_size,
        plan.context_size,
        plan.pipeline,
        plan.data_context_size // plan.context_size,
        plan.zero_stage,
        train.micro_batch_size,
        train.recompute,
        _seconds(candidate.time.total),
        f"{candidate.memory.peak / GIB:.1f}",
    )


if __name__ == "__main__":
    command_line.run(main)
