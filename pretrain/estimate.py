"""Estimate what a run needs, without a GPU: `python -m pretrain.estimate --config X.yaml [--section.key value ...]`."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, get_args, get_type_hints

from megatron_tape.checkpoint.index import writer_count
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.command_line import counted, duration
from megatron_tape.config.schema import ModelConfig, RunConfig, TrainConfig, is_positive
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.extension.base import with_base_settings
from megatron_tape.ops.backends import AVERAGE, ROTATION, described
from megatron_tape.planning.costs import Estimate, estimate
from megatron_tape.planning.hardware import KINDS, Hardware, with_rates
from megatron_tape.planning.search import CHOSEN, GIB, HEADROOM, Found, Layout, fits, search
from megatron_tape.planning.step_time import step_time
from megatron_tape.position import encoding_of, replaced

GPU_MEMORY = {"24 GB": 24, "40 GB": 40, "48 GB": 45, "80 GB": 80, "141 GB": 140}
"""Common GPU memory sizes, and the GiB that are actually available on each."""
PHASES = {
    "projections": "projections and MLP",
    "attention": "attention",
    "position": "position update",
    "elementwise": "norms, residuals, activation",
    "recomputation": "recomputation",
    "loss": "output layer and loss",
    "optimizer": "gradients' sum and optimizer",
    "host": "waiting for the host",
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "zero": "ZeRO's communication",
}
"""Names of the phases of a step."""


TOO_LARGE = 2
"""Layouts that need more than so many times the memory of a GPU are not listed beside those that fit."""


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
        hardware = KINDS[options.gpu or "H100"]
        hardware = with_rates(hardware, options.rates) if options.rates else hardware
        if hardware.name not in KINDS:
            print(
                f"warning: predicted for {hardware.name}: what was not measured is that of another machine, so that "
                "times mean little",
                file=sys.stderr,
            )
        gib = hardware.memory if gib is None and options.gpu else gib
        if options.search:
            given = [name for name in CHOSEN if any(x.partition("=")[0] == f"--{name}" for x in rest)]
            refuse(bool(given), f"--search chooses {', '.join(given)} itself; leave out what it would ignore")
            refuse(processes is None, "--search needs --processes, the number of GPUs; add it")
            found = search(config, processes, hardware, gib or hardware.memory, validate)
            print("\n".join(_found(found, config, processes, hardware, gib or hardware.memory, validate)))
            _warn_of_encoding(config.model)
            return 0
        processes = config.parallel.ranks_per_sequence if processes is None else processes
        validate(config, processes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    result = estimate(config, processes)
    fitting = [name for name, gib in GPU_MEMORY.items() if fits(result, gib)]
    for name, value in (*_rows(config, processes, result, fitting), *_time(config, processes, result, hardware)):
        print(f"{name:<40}{value}")
    _warn_of_encoding(config.model)
    if not fits(result, gib or max(GPU_MEMORY.values())):
        print(f"warning: {_advice(config, processes, result, gib)}", file=sys.stderr)
    return 0


def _warn_of_encoding(model: ModelConfig) -> None:
    encoding = model.position_encoding
    if unread := model.unread:
        print(f"warning: {encoding} does not read model.{', model.'.join(unread)}", file=sys.stderr)
    if slower := encoding_of(model).needs - {ROTATION, AVERAGE}:
        print(
            f"warning: {encoding} must {described(slower)} in attention, counted at the speed of RoPE's; steps "
            "take longer than predicted",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pretrain.estimate",
        usage="%(prog)s --config X.yaml [--section.key value ...] [--processes N] [--gpu-memory GIB] "
        "[--gpu KIND] [--rates FILE] [--search]",
        description="Estimate parameters, memory per GPU, FLOPs, step time, tokens and disk space of a run, without a "
        "GPU.",
        epilog="The settings are those of pretrain.train; `python -m pretrain.train --help` explains every key.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of GPUs; default: those that one sequence needs"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU; default: that of --gpu or, without both, every usual size is compared",
    )
    parser.add_argument(
        "--gpu",
        type=_kind,
        choices=KINDS,
        help="kind of GPU, for memory and the step time, which is otherwise that of an H100",
    )
    parser.add_argument(
        "--rates", metavar="FILE", help="rates measured by python -m benchmarks.rates, in place of assumed ones"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="list the ten fastest layouts that fit on --processes GPUs: tensor- and context-parallel sizes, ZeRO "
        "stage, micro-batch size and recomputation; the global batch stays",
    )
    return parser


def _kind(text: str) -> str:
    """Return the kind of GPU that is meant, in any case of letters."""
    return next((kind for kind in KINDS if kind.lower() == text.lower()), text)


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
    for name, size in _memory(result):
        yield f"  {name}", f"{size / GIB:8.2f} GiB"
    yield "fits on GPUs of", ", ".join(fitting) or "none of " + ", ".join(GPU_MEMORY)
    if result.host:
        yield "host memory per process", f"{result.host / GIB:8.2f} GiB"
    if config.checkpoint.asynchronous:
        copy, writers = _copy_of_a_save(config, processes, result)
        yield "host memory of each writer of a save", f"{copy / GIB:8.2f} GiB, {counted(writers, 'writer')}"
    yield "FLOPs per step", f"{result.flops_per_step:.3e}, {result.flops_per_gpu:.3e} per GPU"
    yield "tokens per step", f"{result.tokens_per_step:,}"
    yield "tokens of the run", f"{result.tokens:,} in {counted(train.steps, 'step')}"
    yield "checkpoint", f"{result.checkpoint_bytes / 1e9:.2f} GB"
    kept = f"at most {config.checkpoint.keep} kept, 1 being written"
    if milestones := config.checkpoint.milestones(train.steps):
        kept += f", {milestones} kept for good"
    yield "disk for checkpoints", f"{result.checkpoints_bytes / 1e9:.2f} GB for {kept}"


def _copy_of_a_save(config: RunConfig, processes: int, result: Estimate) -> tuple[int, int]:
    """Return the bytes of what a writer of an asynchronous save copies, and the number of writers."""
    tensor_size = config.parallel.tensor_model_parallel_size
    shard = result.checkpoint_bytes // tensor_size
    writers = min(processes // tensor_size, writer_count(shard, tensor_size, config.checkpoint.writers))
    return shard // writers, writers * tensor_size


def _memory(result: Estimate) -> list[tuple[str, int]]:
    """Return the parts of the peak."""
    return [
        ("weights", result.weights),
        ("gradients", result.gradients),
        ("optimizer state", result.optimizer),
        ("activations", result.layer_activations),
        ("logits and loss", result.logits),
        ("ZeRO buffers (reduce_bucket_size)", result.buffers),
        ("extra at the peak", result.working),
    ]


def _time(config: RunConfig, processes: int, result: Estimate, hardware: Hardware) -> Iterator[tuple[str, str]]:
    try:
        found = step_time(config, processes, hardware)
    except ConfigError as error:
        yield "step time", f"not predicted: {error}"
        return
    yield "step time (predicted, not measured)", f"{found.total:8.3f} s on {_named(hardware)}"
    for field in dataclasses.fields(found):
        if seconds := getattr(found, field.name):
            yield f"  {PHASES[field.name]}", f"{seconds:8.3f} s {seconds / found.total:4.0%}"
    speed = result.tokens_per_step / found.total
    yield "tokens per second", f"{speed:,.0f}, {speed / processes:,.0f} per GPU"
    yield "MFU", f"{result.flops_per_gpu / found.total / hardware.peak:.1%}"
    yield "time of the run", duration(found.total * config.train.steps)


def _named(hardware: Hardware) -> str:
    """Say for what a step time is predicted, and where its rates come from."""
    measured = ", ".join(hardware.measured)
    return f"{hardware.name}, " + (f"measured: {measured}; else assumed" if measured else "rates assumed")


def _found(found: Found, config: RunConfig, processes: int, hardware: Hardware, gib: float) -> Iterator[str]:
    """Yield the tables of a search."""
    batch = counted(config.train.global_batch_size, "sequence")
    yield (
        f"predicted for {counted(processes, 'GPU')}, {_named(hardware)}; {batch} of {config.model.seq_length:,} tokens "
        f"a step; {counted(found.tried, 'layout')}"
    )
    if not found.tried:
        yield f"no layout can run on {counted(processes, 'GPU')}"
        yield from _reasons(found)
        return
    yield _line("tensor", "context", "data", "ZeRO", "micro", "recompute", "s/step", "tok/s/GPU", "MFU", "GiB") + WHERE
    for layout in found.fitting:
        yield _described(layout, processes, hardware)
    if found.fitting:
        yield f"the first of these: {_settings(found.fitting[0].config, config)}"
    others = found.too_large
    if found.fitting:
        others = [layout for layout in others if layout.memory.peak < TOO_LARGE * gib * GIB]
    if found.fitting and others:
        yield f"as fast, but too large for {gib:g} GiB, of which {HEADROOM:.0%} must stay free:"
    elif not found.fitting:
        others = sorted(others, key=lambda layout: layout.memory.peak)
        yield f"none fits in {gib:g} GiB, of which {HEADROOM:.0%} must stay free" + "; the smallest:" * bool(others)
    for layout in others[:5]:
        yield _described(layout, processes, hardware, largest=True)
    yield from _reasons(found)


def _settings(chosen: RunConfig, given: RunConfig) -> str:
    """Return the arguments that set what a search chose; those that the configuration leaves open are null."""
    values = {name: getattr(getattr(chosen, name.partition(".")[0]), name.partition(".")[2]) for name in CHOSEN}
    if given.parallel.sequence_parallel is None:
        del values["parallel.sequence_parallel"]
    return " ".join(f"--{name} {'null' if value is None else value}" for name, value in values.items())


def _reasons(found: Found) -> Iterator[str]:
    """Yield why layouts cannot run: first the smallest ones, then most of them."""
    reasons = [*list(found.refused.items())[:1], *found.refused.most_common(5)]
    for why, times in list(dict.fromkeys(reasons))[:5]:
        yield f"{counted(times, 'layout')} cannot run: {why}"


WHERE = "  most time in"


def _line(*columns: str) -> str:
    widths = 6, 8, 6, 5, 6, 10, 9, 10, 6, 7
    return "".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=True))


def _described(layout: Layout, processes: int, hardware: Hardware, largest: bool = False) -> str:
    config, time, memory = layout.config, layout.time, layout.memory
    tensor_size, context_size = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    line = _line(
        f"{tensor_size}",
        f"{context_size}",
        f"{processes // tensor_size // context_size}",
        f"{config.deepspeed.zero_stage}",
        f"{config.train.micro_batch_size}",
        config.train.recompute,
        f"{time.total:.3f}",
        f"{memory.tokens_per_step / time.total / processes:,.0f}",
        f"{memory.flops_per_gpu / time.total / hardware.peak:.1%}",
        f"{memory.peak / GIB:.1f}",
    )
    if largest:
        part, size = max(_memory(memory), key=lambda item: item[1])
        return f"{line}  {size / GIB:.1f} of them {part}"
    phases = sorted(((seconds, name) for name, seconds in dataclasses.asdict(time).items()), reverse=True)
    return line + "  " + ", ".join(f"{name} {seconds / time.total:.0%}" for seconds, name in phases[:3])


def _advice(config: RunConfig, processes: int, result: Estimate, given: float | None) -> str:
    """Return advice on what to change: the first change that makes the run fit, or else the one that saves most."""
    gib = given or max(GPU_MEMORY.values())
    best = None
    for text, changed, number in _changes(config, processes):
        try:
            validate(changed, number)
        except ConfigError:
            continue
        outcome = estimate(changed, number)
        if best is None or outcome.peak < best[1].peak:
            best = text, outcome
        if fits(outcome, gib):
            break
    size = f"{gib:g} GiB" if given else f"{gib:g} GiB, the most that is usual"
    problem = f"{result.peak / GIB:.2f} GiB does not fit in {size}, of which {HEADROOM:.0%} must stay free"
    if best is None or best[1].peak >= result.peak:
        return f"{problem}; choose a smaller model or larger GPUs"
    enough = "which fits" if fits(best[1], gib) else "which is not enough yet"
    return f"{problem}; first {best[0]}: {best[1].peak / GIB:.2f} GiB, {enough}; --processes N --search lists layouts"


def _changes(config: RunConfig, processes: int) -> Iterator[tuple[str, RunConfig, int]]:
    """Yield changes that save memory, the cheapest first: what to do, the configuration, the number of processes."""

    train, stage = config.train, config.deepspeed.zero_stage
    levels = get_args(get_type_hints(TrainConfig)["recompute"])
    smaller = [("set", "train.recompute", more) for more in levels[levels.index(train.recompute) + 1 :]]
    if train.micro_batch_size > 1:
        smaller.append(("lower", "train.micro_batch_size", train.micro_batch_size // 2))
    smaller += [("raise", "deepspeed.zero_stage", higher) for higher in range(stage + 1, 4)]
    for verb, key, value in smaller:
        yield f"{verb} {key} to {value}", replaced(config, {key: value}), processes
    number = processes if processes % (2 * config.parallel.ranks_per_sequence) == 0 else 2 * processes
    where = "" if number == processes else f" on {counted(number, 'process', 'processes')}"
    for key in ("parallel.tensor_model_parallel_size", "parallel.context_parallel_size"):
        double = 2 * getattr(config.parallel, key.partition(".")[2])
        changed = replaced(config, {key: double})
        changed.parallel.sequence_parallel = None
        yield f"raise {key} to {double}{where}", changed, number
    bucket = config.deepspeed.reduce_bucket_size // 10
    smaller_bucket = replaced(config, {"deepspeed.reduce_bucket_size": bucket})
    yield f"lower deepspeed.reduce_bucket_size to {bucket}", smaller_bucket, processes


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
