"""Check and measure this project on a GPU that is borrowed for a few minutes.

    python3 -m benchmarks.gpu_trial --minutes 8 --output DIR [--wheels DIR] [--stage NAME ...]

Stages run in order of value, each in a process of its own with its own time limit, so that one that hangs or crashes
costs no more than its limit. A stage for which the time left is too short is skipped, and the next that fits runs.

DIR/results.json holds every result within seconds of its existence, DIR/summary.md what was learned and all tables, and
DIR/trial.tar.gz both, and the logs and traces of every stage that has ended.

It needs a C compiler and Python with torch, Triton, numpy, PyYAML and pydantic. `--wheels` names a folder made by
benchmarks.wheels; its packages are installed into a temporary folder. Without a GPU every stage runs at toy size on the
CPU. The exit status is 1 if a stage failed or found something wrong, or if none ran; 2 if the trial cannot begin; and
128 plus the signal's number if a signal ended it, such as 130 after Ctrl-C.
"""

import argparse
import importlib.util
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from benchmarks.trial_summary import problems, summary, toy_size
from megatron_tape import command_line
from megatron_tape.io.versions import ROOT, commit

MERGED_EVERY = 2.0
"""Seconds between two looks at a running stage's results."""
GRACE = 3.0
"""Seconds that a stage has to end after SIGTERM, and again after SIGKILL."""
RESERVE = 5.0
"""Seconds at the end that no stage may use."""
ARCHIVE_BYTES, LOG_BYTES = 15 * 2**20, 4 * 2**20
"""Size above which a trace is left out of the archive, and of a log the last bytes that are kept."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the trial and its running stage."""
NEEDED = ("numpy", "torch", "triton", "typing_extensions", "pydantic", "yaml")
"""Modules without which no stage runs."""


@dataclass(frozen=True)
class Stage:
    """A part of the trial."""

    name: str
    purpose: str
    least: float
    """Seconds that must be left for it to start."""
    limit: float
    """Seconds after which it is ended."""
    default: bool = True
    """Whether it runs unless others are named."""


STAGES = (
    Stage("machine", "versions, matmul rate and copy bandwidth", 15, 60),
    Stage("compile", "compile the kernels of the recipes' shapes in bf16", 20, 100),
    Stage("correctness", "kernels and libraries against float64, outputs and gradients", 20, 110),
    Stage("attention", "attention by every backend, TAPE and RoPE", 30, 120),
    Stage("step-155m", "a training step of the 155M model at 1,024 tokens", 40, 120),
    Stage("step-1.3b", "a training step of a 1.3B model at 4,096 tokens, with a trace", 70, 180),
    Stage("training", "20 training steps against the CPU's losses and gradients", 45, 150),
    Stage("pretraining", "the 155M recipe, TAPE and RoPE on the same tokens", 280, 600, default=False),
)


class Trial:
    """The stages' results, merged into one record. `work` holds each stage's own results, log and traces."""

    def __init__(self, options: argparse.Namespace, work: Path, stages: list[Stage], started: float):
        self.options, self.work, self.started = options, work, started
        code = options.commit or commit() or "unknown"
        origin = {"command": shlex.join(["python3", "-m", "benchmarks.gpu_trial", *sys.argv[1:]]), "commit": code}
        origin |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "minutes": options.minutes}
        ahead = {"status": "not run", "seconds": 0.0, "reason": "it was not reached"}
        self.record: dict = {"trial": origin, "problems": [], "toy": None, "seconds": 0.0}
        self.record["stages"] = {stage.name: ahead for stage in stages}
        self.variables = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        paths = [str(ROOT), str(work / "packages"), os.environ.get("PYTHONPATH", "")]
        self.variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # Kept from one call to the next, as compiling takes a while.
        cache = Path(tempfile.gettempdir(), f"gpu-trial-triton-{os.getuid()}")
        self.variables.setdefault("TRITON_CACHE_DIR", str(cache))

    def command(self, stage: Stage, seconds: float) -> list[str]:
        """Return the command of a stage that has `seconds` of time."""
        command = [sys.executable, "-m", "benchmarks.trial_stages", stage.name, "--seconds", f"{seconds:.0f}"]
        command += ["--output", str(self.work / f"{stage.name}.json"), "--commit", self.record["trial"]["commit"]]
        command += ["--toy"] if self.options.toy else []
        command += ["--text", str(self.options.text)] if self.options.text else []
        return command + (["--also", *self.options.also] if self.options.also else [])

    def run(self, stage: Stage, deadline: float) -> None:
        """Run a stage, or skip it if too little time is left before `deadline`, as `time.monotonic` counts."""
        ended = self.record["stages"][stage.name] = {"status": "skipped", "seconds": 0.0}
        left = deadline - time.monotonic() - RESERVE
        if left < stage.least:
            ended["reason"] = f"it needs {stage.least:.0f} s, and {max(0, left):.0f} s are left"
            print(f"=== {stage.name} is skipped: {ended['reason']}", flush=True)
            return self.publish()
        seconds = min(stage.limit, left)
        print(f"=== {stage.name}: {stage.purpose} (at most {seconds:.0f} s)", flush=True)
        ended |= {"status": "interrupted", "limit": seconds, "reason": "it had not ended when this was written"}
        started, log = time.monotonic(), self.work / f"{stage.name}.log"
        with open(log, "wb") as file:
            program = subprocess.Popen(
                self.command(stage, seconds),
                cwd=ROOT,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # a group of its own, which ends as a whole
            )
        try:
            with open(log, "rb") as shown:
                while (status := _wait(program, started + seconds)) is None and time.monotonic() < started + seconds:
                    self._show(shown.read())
                    self.merge(stage, log, time.monotonic() - started)
                end(program)
                self._show(shown.read())
            if status is None:
                ended |= {"status": "out of time", "reason": f"it was ended after {seconds:.0f} s"}
            elif status:
                last = _last_line(log.read_bytes()[-1000:].decode(errors="replace"))
                cause = f"exit status {status}: {last}" if status > 0 else signal.Signals(-status).name
                ended |= {"status": "failed", "reason": cause}
            else:
                ended["status"] = "done"
                del ended["reason"]
        except SystemExit as signalled:
            number = signal.Signals(signalled.code - 128)
            ended["reason"] = "interrupted by the user" if number == signal.SIGINT else f"the trial got {number.name}"
            raise
        finally:
            end(program)
            self.merge(stage, log, time.monotonic() - started)
            self.publish()
        print(f"=== {stage.name}: {ended['status']} after {ended['seconds']:.0f} s", flush=True)

    def merge(self, stage: Stage, log: Path, seconds: float) -> None:
        """Write what a stage has found so far into the record of all."""
        ended = self.record["stages"][stage.name]
        ended["seconds"] = round(seconds, 1)
        try:
            ended["results"] = json.loads((self.work / f"{stage.name}.json").read_bytes())
        except (OSError, ValueError):
            pass  # nothing is written yet
        ended.pop("log", None)
        if ended["status"] != "done":
            ended["log"] = log.read_bytes()[-3000:].decode(errors="replace")
        self.save()

    def save(self) -> None:
        """Write the record and its summary."""
        self.record |= {"problems": problems(self.record), "toy": toy_size(self.record)}
        self.record["seconds"] = round(time.monotonic() - self.started, 1)
        self._write("results.json", json.dumps(self.record, indent=1).encode())
        self._write("summary.md", ("\n".join(summary(self.record)) + "\n").encode())

    def publish(self) -> None:
        """Write the record, its summary, and the archive of both and of what stages have written."""
        self.save()
        partial, size = self.options.output / "trial.partial", 0
        files = [self.options.output / "results.json", self.options.output / "summary.md"]
        files += [path for path in self.work.iterdir() if path.is_file()]
        with tarfile.open(partial, "w:gz") as archive:
            # Traces last: they are what may not fit.
            for path in sorted(files, key=lambda path: (path.suffix == ".gz", path.name)):
                content = path.read_bytes()[-LOG_BYTES:] if path.suffix == ".log" else path.read_bytes()
                size += len(content)
                if path.suffix != ".gz" or size <= ARCHIVE_BYTES:
                    entry = tarfile.TarInfo(f"trial/{path.name}")
                    entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
                    archive.addfile(entry, io.BytesIO(content))
        os.replace(partial, self.options.output / "trial.tar.gz")

    def _show(self, text: bytes) -> None:
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()

    def _write(self, name: str, content: bytes) -> None:
        """Replace a file of the output folder, so that it is whole at any moment."""
        partial = self.options.output / "trial.partial"
        partial.write_bytes(content)
        os.replace(partial, self.options.output / name)


def _wait(program: subprocess.Popen, until: float) -> int | None:
    """Return a program's exit status, or None if it runs on after a short while."""
    try:
        return program.wait(max(0.0, min(MERGED_EVERY, until - time.monotonic())))
    except subprocess.TimeoutExpired:
        return None


def end(program: subprocess.Popen) -> None:
    """End what is left of a program and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
            program.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def refuse(sentence: str) -> NoReturn:
    """End with a sentence that says why the trial cannot begin."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def prepare(options: argparse.Namespace, packages: Path) -> None:
    """Make the output folder, install wheels into `packages`, and refuse to begin where no stage could run."""
    try:
        if (options.output / "results.json").exists():
            refuse(f"{options.output} holds the results of another trial; choose another --output")
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        refuse(f"--output {options.output} cannot be written: {error.strerror}; choose another")
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if options.wheels:
        print(f"=== installing {options.wheels} into a temporary folder", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        pip += ["--disable-pip-version-check", "--target", str(packages), *sorted(options.wheels.glob("*.whl"))]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            refuse(f"--wheels {options.wheels} cannot be installed for {python}: {_last_line(done.stderr)}")
        sys.path.insert(0, str(packages))  # where the next lines look
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        refuse(
            f"{sys.executable} ({python}) lacks {', '.join(missing)}; run `make install` and use .venv/bin/python, or "
            "install torch, Triton and numpy, and give the rest with --wheels"
        )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_trial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "\n".join(f"  {stage.name:12} {stage.purpose}" for stage in STAGES),
    )
    add, names = parser.add_argument, [stage.name for stage in STAGES]
    add("--minutes", type=float, default=8.0, help="end within this time (default: %(default)s)")
    add("--output", type=command_line.path, required=True, metavar="DIR", help="where the results go")
    add("--wheels", type=command_line.path, metavar="DIR", help="folder of wheels, made by benchmarks.wheels")
    add("--stage", nargs="+", choices=names, metavar="NAME", help="only these (default: all but pretraining)")
    add("--also", nargs="+", choices=("flex", "megatron"), default=[],
        help="also time FlexAttention, or Megatron-core's GPTModel")  # fmt: skip
    add("--text", type=command_line.path, help="JSON lines for pretraining (default: the standard library's source)")
    add("--toy", action="store_true", help="toy size on the CPU, even where there is a GPU")
    add("--commit", help="commit of this code, if there is no git")
    options = parser.parse_args(argv)
    if not 0 < options.minutes <= 600:
        parser.error(f"--minutes {options.minutes:g} is not between 0 and 600")
    if options.text and not options.text.is_file():
        parser.error(f"--text {options.text} is not a file")
    if options.wheels and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels} holds no wheels; collect them with: python -m benchmarks.wheels DIR")
    for name in ("output", "text", "wheels"):
        if path := getattr(options, name):
            setattr(options, name, path.resolve())  # stages run in the repository
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the stages, print the summary, and return the exit status."""
    started, options = time.monotonic(), parse(argv)
    for number in ENDING:
        signal.signal(number, _end)
    stages = [stage for stage in STAGES if (stage.name in options.stage if options.stage else stage.default)]
    status = None
    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as work:
        prepare(options, Path(work, "packages"))
        trial = Trial(options, Path(work), stages, started)
        trial.save()
        try:
            for stage in stages:
                trial.run(stage, started + 60 * options.minutes)
        except SystemExit as signalled:
            status = signalled.code
        trial.publish()
    print("", *summary(trial.record), sep="\n")
    return int(bool(trial.record["problems"])) if status is None else status


def _end(ended_by: int, _: object) -> NoReturn:
    """End the running stage, and then the trial; a second signal does not cut that short."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + ended_by)


if __name__ == "__main__":
    sys.exit(main())
