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
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import AVERAGE, ROTATION, described
from megatron_tape.planning.flops import flops_per_step
from megatron_tape.planning.hardware import KINDS, Hardware
from megatron_tape.planning.memory import Memory, checkpoint_bytes, checkpoints_bytes, memory
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.planning.plan import MASKING, Plan
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
    """Print the estimate, or with --search the layouts that fit, and return the exit status.

    It is 1 if a search finds no layout, otherwise 0. If the run of an estimate does not fit in the
    memory, a warning is printed. Raises ConfigError for invalid settings.
    """
    options, settings = _parser().parse_known_args(argv)
    if options.gpu_memory is not None and not 0 < options.gpu_memory < math.inf:
        raise ConfigError(
            "--gpu-memory", f"is {options.gpu_memory}", "give a number of GiB above 0"
        )
    if options.search:
        options_given = {setting.partition("=")[0] for setting in settings}
        searched = [name for name in CHOSEN if f"--{name}" in options_given]
        if searched:
            raise ConfigError(
                "--search", f"chooses {', '.join(searched)} itself", "remove these settings"
            )
        if options.processes is None:
            raise ConfigError("--search", "needs --processes", "add it with the number of GPUs")
        # The search starts from the settings of one GPU and replaces them.
        settings += [f"--{name}={value}" for name, value in ONE_GPU.items()]

    config = parse_run_config(settings)
    hardware = KINDS[options.gpu]
    gpu_gib = options.gpu_memory or hardware.memory
    processes = options.processes or config.parallel.ranks_per_sequence
    plan = Plan(config, processes, generation=hardware.generation)
    if options.search:
        result = search(plan, hardware, gpu_gib, validate)
        print(*_describe_search(result, plan, hardware, gpu_gib), sep="\n")
        _warn_of_attention(plan)
        return int(not result.fitting)

    check(config, Level.SETTINGS, processes=processes)
    estimated = memory(plan)
    for name, value in (*_rows(plan, estimated), *_time(plan, hardware)):
        print(f"{name:<40}{value}")
    # A search ranks layouts by their step times, which are known only for bf16. So with another
    # precision, the advice is to change it first.
    fix = (
        "train.precision bf16 takes less, and with it --processes N --search lists layouts that fit"
    )
    if config.train.precision == "bf16":
        _warn_of_attention(plan)
        fix = "--processes N --search lists layouts that do"
    if not fits(estimated, gpu_gib):
        _warn(f"{byte_size(estimated.peak)} does not fit in {_usable(gpu_gib)}; {fix}")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the options; the settings of the run are parsed separately."""
    parser = command_line.Parser(
        prog="python -m pretrain.estimate",
        usage="%(prog)s [--config] RECIPE [--section.key value ...] [--processes N] [--gpu-memory"
        " GIB] [--gpu KIND] [--search]",
        description="Compute the parameters, memory per GPU, FLOPs, tokens and disk space of a run,"
        " and estimate its step time. No GPU is needed.",
        epilog="The settings are those of pretrain.train; `python -m pretrain.train --help`"
        " explains every key.",
    )
    add = parser.add_argument
    add(
        "--processes",
        type=command_line.whole_number,
        metavar="N",
        help="number of GPUs (default: as many as one model replica needs)",
    )
    add(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU in GiB (default: that of --gpu)",
    )
    add(
        "--gpu",
        choices=KINDS,
        default="H100",
        help="model of the GPUs, which determines memory and step time (default: %(default)s)",
    )
    add(
        "--search",
        action="store_true",
        help="list the ten fastest layouts that fit on --processes GPUs; a layout is a choice of"
        " tensor-, context- and pipeline-parallel sizes, virtual stages, ZeRO stage, micro-batch"
        " size and recomputation",
    )
    return parser


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _warn_of_attention(plan: Plan) -> None:
    """Warn if the encoding, or the backend, makes attention slower than the step time assumes."""
    model = plan.model
    # What attention must do for the encoding, but not for RoPE or TAPE.
    slower = encoding_of(model).needs - {ROTATION, AVERAGE}
    if slower:
        _warn(
            f"the step time assumes RoPE's attention; with {model.position_encoding}, steps take"
            f" longer, because attention must {described(slower)}"
        )
    backend = plan.attention.backend
    if model.needs_window and backend in MASKING:
        _warn(
            "the step time assumes that attention skips the tokens outside model.sliding_window;"
            f" with {backend}, which computes and masks them, steps take longer"
        )


def _rows(plan: Plan, estimated: Memory) -> Iterator[tuple[str, str]]:
    """Yield the rows of the estimate, names and values, except those of the step time."""
    train = plan.config.train
    checkpoint = plan.config.checkpoint
    parameters = parameter_count(plan.model, plan.extension)
    trained = parameter_count(plan.model, plan.extension, plan.trained_kinds)
    shards = plan.tensor_size * plan.pipeline_size
    yield "parameters", f"{parameters:,}"
    if trained < parameters:
        yield "  trained", f"{trained:,} ({', '.join(plan.extension.trains)})"
    if shards > 1:
        elements = max(stage.elements for stage in plan.pipeline_stages())
        yield "  per model-parallel rank, at most", f"{elements:,}"
    layout = (
        f"{counted(plan.processes, 'process', 'processes')}:"
        f" {plan.config.parallel.describe(plan.processes)}, ZeRO {plan.zero_stage},"
        f" {train.precision}, recompute {train.recompute}"
    )
    yield "layout", layout
    yield "attention on a GPU, assumed", _attention(plan)
    layers = plan.model.num_layers
    layers_with_window = sum(map(plan.window_hides_tokens, range(layers)))
    if layers_with_window:
        window = f"{plan.model.sliding_window:,} tokens"
        yield "sliding window", f"{window} in {layers_with_window} of {layers} layers"

    yield "memory per GPU", f"{byte_size(estimated.peak):>10}"
    for attribute, name in COMPONENTS.items():
        yield f"  {name}", f"{byte_size(getattr(estimated, attribute)):>10}"
    # An asynchronous checkpoint is copied to the host before it is written. Each model-parallel
    # rank has one shard of it, whose bytes are divided among its writers.
    if checkpoint.asynchronous:
        shard = checkpoint_bytes(plan) // shards
        writers = writer_count(shard, shards, checkpoint.writers)
        writers = min(plan.data_context_size, writers)
        copies = f"{byte_size(shard // writers):>10}, {counted(writers * shards, 'writer')}"
        yield "host memory per checkpoint writer", copies

    flops = flops_per_step(plan)
    yield "FLOPs per step", f"{flops:.3e}, {flops // plan.processes:.3e} per GPU"
    yield "tokens per step", f"{plan.tokens_per_step:,}"
    yield "tokens of the run", f"{plan.tokens:,} in {counted(train.steps, 'step')}"
    yield "checkpoint", byte_size(checkpoint_bytes(plan))
    kept = f"at most {checkpoint.keep} kept, 1 being written"
    milestones = checkpoint.milestones(train.steps)
    if milestones:
        kept += f", {milestones} kept permanently"
    yield "disk for checkpoints", f"{byte_size(checkpoints_bytes(plan))} for {kept}"


def _attention(plan: Plan) -> str:
    """Return the attention backend and what it is chosen for."""
    return f"{plan.attention.backend}, {plan.attention}"


def _time(plan: Plan, hardware: Hardware) -> Iterator[tuple[str, str]]:
    """Yield the rows of the step time and of the time of the run.

    If the time cannot be estimated, there is one row with the reason.
    """
    try:
        time = step_time(plan, hardware)
    except ConfigError as error:
        yield "step time", f"not estimated: {error}"
        return
    assumed = f"{_seconds(time.total)} s on {_assumed(hardware)}"
    if time.communication:
        assumed += f", {time.communication / time.total:.0%} communication"
    if time.bubble:
        assumed += f", {time.bubble / time.total:.0%} waiting for other stages"
    yield "step time, assumed", assumed
    # Two digits, since the estimate is no more precise.
    seconds = time.total * plan.tokens / plan.tokens_per_step
    yield "time of the run, assumed", duration(float(f"{seconds:.2g}"))


def _seconds(time: float) -> str:
    """Format seconds with two significant digits, since the estimate is no more precise."""
    return f"{float(f'{time:.2g}'):g}"


def _assumed(hardware: Hardware) -> str:
    """Return the assumption behind a step time, in words."""
    return f"{hardware.name} at {EFFICIENCY:.0%} of the peak"


def _usable(gpu_gib: float) -> str:
    """Describe the memory of a GPU that `fits` lets a run use."""
    return f"{gpu_gib:g} GiB with {HEADROOM:.0%} kept free"


def _describe_search(
    result: SearchResult, plan: Plan, hardware: Hardware, gpu_gib: float
) -> Iterator[str]:
    """Yield the lines that show the result of a search: a table of layouts, or why none fits."""
    gpus = counted(plan.processes, "GPU")
    batch = counted(plan.config.train.global_batch_size, "sequence")
    yield f"assumed for {gpus}, {_assumed(hardware)}; {batch} of {plan.model.seq_length:,} tokens"
    yield f"attention, assumed: {_attention(plan)}"
    if result.fitting:
        yield ROW.format(*COLUMNS)
        yield from map(_row, result.fitting)
        yield f"the first of these: {_settings(result.fitting[0].plan.config)}"
    elif result.too_large:
        yield f"none fits in {_usable(gpu_gib)}; the smallest:"
        yield ROW.format(*COLUMNS)
        # The row ends with the largest component, which shows what to change.
        for candidate in sorted(result.too_large, key=lambda candidate: candidate.memory.peak)[:5]:
            largest = max(COMPONENTS, key=lambda name: getattr(candidate.memory, name))  # noqa: B023
            size = getattr(candidate.memory, largest) / GIB
            yield f"{_row(candidate)}  of which {COMPONENTS[largest]} {size:.1f}"
    else:
        yield f"no layout can run on {gpus}"
    for reason, count in list(result.refused.items())[:5]:  # the reasons of the smallest layouts
        yield f"{counted(count, 'layout')} cannot run: {reason}"


def _settings(chosen: RunConfig) -> str:
    """Return the layout that a search chose as arguments `--section.key value`."""
    arguments = []
    for name in CHOSEN:
        section, _, key = name.partition(".")
        value = getattr(getattr(chosen, section), key)
        # JSON without spaces is one word of a shell. A text needs no quotes.
        shown = json.dumps(value, separators=(",", ":")).strip('"')
        arguments.append(f"--{name} {shown}")
    return " ".join(arguments)


def _row(candidate: Candidate) -> str:
    """Return the row of a layout in the table."""
    plan = candidate.plan
    train = plan.config.train
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
