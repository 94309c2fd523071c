"""Start a job of many ranks on this machine without its model: how long that takes, and which files it touches.

    python -m benchmarks.launch                          512 ranks, 8 on a node
    python -m benchmarks.launch --ranks 64 --end fail

Runs what a job of slurm/pretrain_tape.sh runs, in its order: `pretrain.attempt begin`, `pretrain.preflight` and
`pretrain.train` on every rank, `pretrain.attempt decide`. Every rank is a process with the real checks, store, records
and watch. Left out are Slurm, the all-reduce of the preflight, and everything after "loading torch" in training, in
whose place the ranks wait for each other and then end as `--end` says. A rank is forked from a process that has
imported everything, because nodes import at the same time and this machine could only do so one after the other;
instead, "one rank's imports" are measured once. A virtual node has one rank that does what the first rank of a node
does.

The CPU seconds are those of all ranks together, and the most of one; their nodes spend them at the same time.
If no name server answers, a line "::ffff:127.0.0.1 localhost" in /etc/hosts saves torch's store from waiting for one.
Of the folder that the run shares, the table gives how often files were opened to read or to write, directories listed,
names created, renamed or removed, and looked up: by all ranks together, and most by one rank.
"""

import argparse
import contextlib
import functools
import gc
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.timing import positive
from megatron_tape.config.parse import parse_run_config

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "pretrain" / "recipes" / "tape_155m.yaml"
ENDS = ("finish", "fail", "hang")
CPU = "CPU seconds"
KINDS = ("read", "written", "listed", "changed", "looked up")
WATCHED_SECONDS = 7
"""How long ranks are watched: the watch looks for a newer attempt in its first second, and again 5 s later."""
REPORT_BYTES = 4096


class Launch:
    """One job in a folder of its own."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self.folder, self.ranks, self.per_node = folder, arguments.ranks, arguments.ranks_per_node
        self.end = arguments.end
        self.nodes = [f"node{i:04d}" for i in range(-(-self.ranks // self.per_node))]
        self.seconds: dict[str, float] = {}
        self.touched: dict[str, list[Counter]] = {}

    def run(self) -> str:
        """Take all steps, and return the verdict on the attempt."""
        settings = self._settings()
        begin = ["--job", "1", "--source", str(ROOT), "--job-link", str(self.folder / "link")]
        begin += ["--nodes", ",".join(self.nodes), "--processes", str(self.ranks), "--", str(RECIPE), *settings]
        printed = self._alone("attempt begin", "pretrain.attempt", "begin", *begin)
        variables = dict(line.split("=", 1) for line in shlex.split(printed))
        os.environ |= {"TAPE_ATTEMPT": variables["ATTEMPT"], "MASTER_ADDR": "127.0.0.1"}
        self._alone("one rank's imports", "benchmarks.launch", "--import-only")
        config = ["--config", variables["CONFIG"]]
        _import_all()
        parse_run_config(config)  # which imports more
        self._on_every_rank("preflight", lambda: _preflight([*config, "--nodes", ",".join(self.nodes)]))
        self._on_every_rank("training", lambda: _training(config, self.end), expect=self.end == "finish")
        attempt = ["--run", variables["RUN_DIRECTORY"], "--checkpoints", variables["CHECKPOINT_DIRECTORY"]]
        decide = ["decide", *attempt, "--attempt", variables["ATTEMPT"]]
        return self._alone("attempt decide", "pretrain.attempt", *decide).strip()

    def _settings(self) -> list[str]:
        import numpy as np

        from megatron_tape.data.indexed_dataset import IndexedDatasetWriter

        with IndexedDatasetWriter(self.folder / "data" / "corpus", np.dtype("<u2")) as writer:
            writer.add(bytes(2 * 4096 * 512), np.full(512, 4096))
            writer.finish()
        values = {
            "data.prefix": self.folder / "data" / "corpus",
            "data.tokenizer": "null",
            "logging.directory": self.folder / "run",
            "train.global_batch_size": self.ranks,
            "train.micro_batch_size": 1,
            "logging.sample_tokens": 0,
            "train.hang_timeout": 3 if self.end == "hang" else "null",
        }
        return [f"--{key}={value}" for key, value in values.items()]

    def _alone(self, stage: str, *command: str) -> str:
        started = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, cwd=self.folder
        )
        self.seconds[stage] = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"{stage} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _on_every_rank(self, stage: str, work: Callable[[], int], expect: bool = True) -> None:
        """Fork all ranks, and wait until the last one has ended."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        reading, writing = os.pipe()
        gc.freeze()  # so that collecting garbage does not copy the pages that all ranks share
        started = time.perf_counter()
        children = []
        for rank in range(self.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank % self.per_node, "WORLD_SIZE": self.ranks, "MASTER_PORT": port}
            place["SLURMD_NODENAME"] = self.nodes[rank // self.per_node]
            if child := os.fork():
                children.append(child)
                continue
            status = 1
            try:
                os.close(reading)
                os.environ |= {key: str(value) for key, value in place.items()}
                counts, begun = _count_files(self.folder), time.process_time()
                os._exit = functools.partial(_report_and_leave, os._exit, writing, counts, begun)
                status = work()
            finally:
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            reports = [json.loads(pipe.read(REPORT_BYTES)) for _ in children]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        self.seconds[stage] = time.perf_counter() - started
        self.touched[stage] = [Counter(report) for report in reports]
        if expect and any(statuses):
            raise RuntimeError(f"{stage}: {sum(map(bool, statuses))} of {self.ranks} ranks failed")


def _report_and_leave(leave: Callable, pipe: int, counts: Counter, begun: float, status: int) -> None:
    report = {**counts, CPU: time.process_time() - begun}
    # One write of so few bytes to a pipe is never divided.
    os.write(pipe, json.dumps(report).encode().ljust(REPORT_BYTES))
    leave(status)


def _import_all() -> None:
    import torch.distributed  # noqa: F401

    from pretrain import preflight, train  # noqa: F401


def _count_files(folder: Path) -> Counter:
    """Return counts of what this process will do to files in `folder`, as they grow."""
    counts, inside = Counter(dict.fromkeys(KINDS, 0)), str(folder)
    kinds = {"os.listdir": "listed", "os.scandir": "listed"}
    kinds |= dict.fromkeys(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"), "changed")

    def is_inside(path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(inside)

    def hook(event: str, values: tuple) -> None:
        if event == "open" and is_inside(values[0]):
            writes = values[2] & (os.O_WRONLY | os.O_RDWR)
            counts["written" if writes else "read"] += 1
        elif event in kinds and is_inside(values[0]):
            counts[kinds[event]] += 1

    sys.addaudithook(hook)
    look_up = os.stat  # which Python does not report

    def stat(path: object, *arguments: object, **options: object) -> os.stat_result:
        counts["looked up"] += is_inside(path)
        return look_up(path, *arguments, **options)

    os.stat = stat
    return counts


def _preflight(arguments: list[str]) -> int:
    from pretrain import preflight

    preflight._measure = lambda torch, store, rank, size, *_: _meet(store, rank, size)
    with _quiet():
        return preflight.main(arguments)


def _training(arguments: list[str], end: str) -> int:
    from torch.distributed import TCPStore

    from pretrain import train

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class Trainer:
        def __init__(self, config: object, watch: object):
            self.watch = watch

        def run(self) -> None:
            address = "127.0.0.1", int(os.environ["MASTER_PORT"])
            patience = timedelta(seconds=300)
            store = TCPStore(*address, size, is_master=rank == 0, timeout=patience, wait_for_workers=False)
            _meet(store, rank, size)
            self.watch.begin_training()
            time.sleep(600 if end == "hang" else WATCHED_SECONDS)
            _meet(store, rank, size)
            if end == "fail":
                raise RuntimeError("a step that was made to fail")

    layout, trainer = (types.ModuleType(f"megatron_tape.{name}") for name in ("parallel.layout", "training.trainer"))
    layout.deterministic_kernels = lambda enabled: contextlib.nullcontext()
    layout.abort_process_groups = lambda: None
    trainer.Trainer = Trainer
    sys.modules |= {module.__name__: module for module in (layout, trainer)}
    train._load_libraries = lambda config, is_rank_0: None
    with _quiet():
        return train.main(arguments)


def _meet(store: Any, rank: int, size: int) -> None:
    """Wait until all ranks are here, and on rank 0, with which the store ends, until they have left."""
    meeting = (store.add(f"came/{rank}", 1) - 1) * size
    for what, waits in (("met", True), ("left", rank == 0)):
        if store.add(what, 1) == meeting + size:
            store.set(f"{what}/{meeting}", "yes")
        if waits:
            store.wait([f"{what}/{meeting}"])


@contextlib.contextmanager
def _quiet():
    """Keep what is not an error of rank 0 from the terminal."""
    if os.environ["RANK"] == "0":
        with contextlib.redirect_stdout(None):
            yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def table(launch: Launch) -> list[str]:
    """Return the seconds of each stage, and what the ranks did to shared files."""
    lines = [f"{launch.ranks} ranks on {len(launch.nodes)} virtual nodes", "", f"{'stage':20}{'seconds':>9}"]
    lines += [f"{stage:20}{seconds:9.1f}" for stage, seconds in launch.seconds.items()]
    waited = WATCHED_SECONDS if launch.end != "hang" else 0
    overhead = sum(launch.seconds.values()) - waited
    lines += [f"{'all':20}{overhead:9.1f}" + f"   without the {waited} s that ranks are watched" * bool(waited), ""]
    lines.append(f"{'all ranks':20}{CPU:>20}" + "".join(f"{kind:>16}" for kind in KINDS))
    for stage, counts in launch.touched.items():
        cells = [f"{sum(c[kind] for c in counts):,} (most {max(c[kind] for c in counts)})" for kind in KINDS]
        taken = sorted(c[CPU] for c in counts)
        cpu = f"{sum(taken):.1f} (most {taken[-1]:.2f})"
        lines.append(f"{stage:20}{cpu:>20}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def main(argv: list[str] | None = None) -> int:
    """Launch, print the table and the attempt's files, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--end", choices=ENDS, default="finish", help="how all ranks end (default: %(default)s)")
    parser.add_argument("--import-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.import_only:
        _import_all()
        return 0
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        launch = Launch(Path(name).resolve(), arguments)
        try:
            verdict = launch.run()
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(*table(launch), "", f"verdict: {verdict}", sep="\n")
        files = Counter(path.name.split("-")[0] for path in (launch.folder / "run" / "attempts" / "000001").iterdir())
        print("the attempt's files: " + ", ".join(f"{count} {name}" for name, count in sorted(files.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
