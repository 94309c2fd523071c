"""Rehearse a run without GPUs: `python -m pretrain.rehearse --config RECIPE [--processes N]
[--section.key value]`.
"""

import logging
import os
import sys
import warnings

from megatron_tape import command_line
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import ConfigError
from megatron_tape.planning.plan import Plan
from megatron_tape.text import counted


def main(argv: list[str] | None = None) -> int:
    """Rehearse a run, print the report, and return the exit status that --help describes."""
    parser = command_line.Parser(
        prog="python -m pretrain.rehearse",
        usage="%(prog)s [--config] RECIPE [--processes N] [--rank R] [--section.key value ...]",
        description=(
            "Run four steps of pretrain.train as one rank of many on a fake GPU, and compare memory"
            " and collectives with pretrain.estimate. No GPU and no data are needed, and little"
            " memory: nothing is computed."
        ),
        epilog=(
            "A fault is an operation that would fail on a GPU. Exit status: 1 if there is a fault,"
            " or if a value differs from the estimate by more than 5 % (10 % for the peak); 2 for"
            " invalid settings; otherwise 0. The settings are those of pretrain.train."
        ),
    )
    parser.add_argument(
        "--processes",
        type=command_line.whole_number,
        metavar="N",
        help="number of GPUs (default: as many as one model replica needs)",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", default=0, help="rank to rehearse (default: 0)"
    )
    options, settings = parser.parse_known_args(argv)
    config = parse_run_config(settings)
    processes = options.processes or config.parallel.ranks_per_sequence
    check(config, Level.SETTINGS, processes=processes)
    rank = options.rank
    # Checked last, since the settings decide the number of processes.
    if not 0 <= rank < processes:
        raise ConfigError("--rank", f"is {rank}", f"give a number from 0 to {processes - 1}")

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    # The libraries warn of what they miss, such as a real GPU.
    for noisy in ("DeepSpeed", "megatron", "torch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # even if there is a GPU
    from megatron_tape.planning.rehearsal import install_fake_world, rehearse

    install_fake_world(processes, rank)
    outcome = rehearse(config)
    # The rehearsal shortens the run, so the settings are those of `outcome`.
    plan = Plan(outcome.config, processes)
    train = outcome.config.train
    print(
        f"rank {rank} of {processes}: {plan.config.parallel.describe(processes)}, ZeRO"
        f" {plan.zero_stage}, {train.precision}, recompute {train.recompute}, attention as"
        f" {plan.model.attention_backend}"
    )

    rows = list(outcome.rows())
    print(f"{'MiB':<44}{'rehearsed':>14}{'estimated':>14}")
    print(*rows, sep="\n")
    for wait, count in sorted(outcome.waits.items()):
        print(f"{counted(count, 'time'):>12} per step, the host waits for the GPU: {wait}")
    for fault, count in outcome.faults.items():
        print(f"FAULT  {fault} ({counted(count, 'time')})")

    differing = [row.name for row in rows if not row.agrees]
    verdict = "no faults"
    if outcome.faults:
        verdict = counted(len(outcome.faults), "fault")
    if differing:
        verdict += f"; different from the estimate: {', '.join(differing)}"
    print(verdict)
    return int(bool(outcome.faults or differing))


if __name__ == "__main__":
    command_line.run(main)
