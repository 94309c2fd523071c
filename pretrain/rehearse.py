"""Rehearse a run without GPUs: `python -m pretrain.rehearse --config X.yaml [--processes N] [--section.key value]`."""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_tape import command_line
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import refuse
from megatron_tape.planning.plan import Plan
from megatron_tape.text import counted

if TYPE_CHECKING:
    from megatron_tape.planning.rehearsal.comparison import Row
    from megatron_tape.planning.rehearsal.run import Rehearsal

MIB = 2**20
MOST_PROCESSES = 65536
"""Building the groups of more would take many minutes."""


def main(argv: list[str] | None = None) -> int:
    """Rehearse and print the report; return 1 if a GPU would refuse an operation or values differ, otherwise 0."""
    options, rest = _parser().parse_known_args(argv)
    processes, rank = options.processes, options.rank
    wrong = processes is not None and not 1 <= processes <= MOST_PROCESSES
    refuse(wrong, "--processes", f"is {processes}", f"give 1 to {MOST_PROCESSES:,}")
    config = parse_run_config(rest)
    processes = config.parallel.ranks_per_sequence if processes is None else processes
    check(config, Level.SETTINGS, processes)
    refuse(not 0 <= rank < processes, "--rank", f"is {rank}", f"give one of 0 to {processes - 1}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    _quiet(config)
    started = time.monotonic()
    from megatron_tape.planning.rehearsal.devices import install_fake_world

    install_fake_world(processes, rank)
    from megatron_tape.planning.rehearsal.comparison import compared
    from megatron_tape.planning.rehearsal.run import rehearse

    outcome = rehearse(config)
    logging.getLogger(__name__).info("rehearsed in %.0f s", time.monotonic() - started)
    rows = list(compared(outcome, processes))
    print("\n".join(report(outcome, processes, rank, rows)))
    return int(bool(outcome.faults) or not all(row.agrees for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m pretrain.rehearse",
        usage="%(prog)s --config X.yaml [--processes N] [--rank R] [--section.key value ...]",
        description="Run five steps of pretrain.train as one rank of many on a fake GPU. This finds tensors on the "
        "wrong device, operations that a GPU or NCCL would refuse and places where the host waits for the GPU, and "
        "compares memory and collectives with pretrain.estimate's arithmetic. It needs no GPU, no data and little "
        "memory, and computes no numbers.",
        epilog="Exit status: 0 if all is well; 1 if there is a fault or a figure differs by more than 5 %% (10 %% for "
        "the peak); 2 if a setting is wrong. Settings are those of pretrain.train.",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of GPUs; default: those that one sequence needs"
    )
    parser.add_argument("--rank", type=int, metavar="R", default=0, help="which of them to rehearse (default: 0)")
    return parser


def _quiet(config) -> None:
    for noisy in ("DeepSpeed", "megatron", "torch", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if config.parallel.uses_sequence_parallel:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def report(outcome: "Rehearsal", processes: int, rank: int, rows: "list[Row]") -> Iterator[str]:
    """Yield the lines of the report."""
    plan, record, train = Plan(outcome.config, processes), outcome.record, outcome.config.train
    yield (
        f"rank {rank} of {processes}: {plan.config.parallel.described(processes)}, ZeRO {plan.zero_stage}, "
        f"{train.precision}, recompute {train.recompute}, attention as {plan.model.attention_backend}, "
        f"{counted(plan.micro_batches, 'micro-batch', 'micro-batches')} a step"
    )
    yield f"{'MiB':<44}{'rehearsed':>14}{'estimated':>14}"
    yield from map(str, rows)
    phases = ", ".join(f"{phase} {size / MIB:,.2f}" for phase, size in record.peak_by_phase.items() if size)
    yield f"the step's peak is in its {record.peak_phase} pass, with memory allocated in: {phases}"
    for (group, kind), count in sorted(record.single_elements.items()):
        yield f"{counted(count, 'time'):>12} a step, {group}: {kind} of a single number"
    for (phase, reason, place), count in sorted(record.waits.items()):
        yield f"{counted(count, 'time'):>12} a step, {phase}: the host waits for the GPU, {reason} at {place}"
    for kernel, count in sorted(record.launches.items()):
        yield f"{counted(count, 'time'):>12} a step: launch of the kernel {kernel}"
    for fault, count in outcome.faults.items():
        yield f"FAULT  {fault} ({counted(count, 'time')})"
    differing = [row.name for row in rows if not row.agrees]
    found = counted(len(outcome.faults), "fault") if outcome.faults else "no fault"
    yield f"{found}, but these differ from the estimate: {', '.join(differing)}" if differing else found


if __name__ == "__main__":
    command_line.run(main)
