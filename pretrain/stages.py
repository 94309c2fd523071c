"""The stages of a demo: commands that run one after another, and are skipped when their output exists already."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.parallel.launcher import refuse_launcher
from pretrain.comparison.programs import find_gpus


@dataclass(frozen=True)
class Stage:
    """A command, shown before it runs."""

    name: str
    command: list[str]
    output: Path | None = None
    """The file or directory that the command leaves, complete or not at all; None if the command itself knows what is
    done."""


def run_stages(stages: Sequence[Stage], processes: int) -> int:
    """Run the stages that are not done; return the exit status of the first that fails, or 0.

    Commands get as many threads as leave every one of `processes` an equal share of the cores. Raises UserError for
    variables of a launcher, which commands would take for theirs.
    """
    refuse_launcher("this program", "starts its own processes")
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    started = time.monotonic()
    for number, stage in enumerate(stages, 1):
        shown = shlex.join([Path(stage.command[0]).name, *stage.command[1:]])
        minutes = (time.monotonic() - started) / 60
        print(f"\n[{number}/{len(stages)}, after {minutes:.1f} minutes] {stage.name}: {shown}", flush=True)
        if stage.output is not None and stage.output.exists():
            print(f"{stage.output} exists already", flush=True)
            continue
        status = _run(stage.command, environment)
        if status != 0:
            print(f"error: {stage.name} ended with status {status}; see above", file=sys.stderr)
            return status
    return 0


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit status; a signal lets it clean up first; a Ctrl-C reaches it anyway."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except command_line.Interrupted as interruption:
            if interruption.number != signal.SIGINT:
                process.send_signal(interruption.number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            raise


def launcher(processes: int) -> list[str]:
    """Return the beginning of a command that starts a module in several processes of this machine."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    # Its rendezvous would wait forever for an address of this machine's name, which may not resolve.
    local = ["--standalone", "--local-addr", "127.0.0.1"]
    return [torchrun, *local, "--nproc-per-node", str(processes), "-m"]


def leave_gpus_out(processes: int) -> None:
    """Hide the GPUs beyond so many from the stages: a training must use all that it sees."""
    if gpus := find_gpus()[0]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:processes])


def shortened(steps: int | None) -> list[str]:
    """Return the settings of a training of so many steps; none for those of the recipe."""
    return [] if steps is None else ["--train.steps", str(steps), "--schedule.warmup_steps", str(steps // 10)]


def exported_from(run: Path) -> Path:
    """Return where the model of a run goes, in the format of transformers."""
    return run.with_name(f"{run.name}-hf")


def export(run: Path) -> list[str]:
    """Return the command that exports the model of a run."""
    command = [sys.executable, "tools/convert_checkpoint.py", "to-hf", "--checkpoint", str(run)]
    return [*command, "--output", str(exported_from(run))]
