"""Check all nodes of a job before training. Start it on every rank, with the launcher that starts
training.

    srun ... python -m pretrain.preflight --config RECIPE [--section.key value ...]

It fails, with the name of the node and the reason, if

- versions, code or data differ between nodes,
- a GPU is missing or too small,
- the checkpoint directory is not shared, not writable or too full, or
- a rank does not answer, or an all-reduce over all ranks fails.

In a Slurm job, the reason is recorded in the run's directory. The job stops if the settings or the
installation are wrong. Otherwise it is requeued without the nodes that have problems.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import EXIT_RESTART, ConfigError, NodeError, one_line
from megatron_tape.io.versions import code_digest, cuda_build_fix, node_name
from megatron_tape.parallel.launcher import (
    check_launcher_environment,
    check_master_address,
    gloo_address,
    local_rank,
    master_port,
    rank_and_size,
    unreachable_nodes,
)
from megatron_tape.planning.memory import checkpoint_bytes, memory
from megatron_tape.planning.plan import Plan
from megatron_tape.run import nodes
from megatron_tape.run.attempts import REFUSED, UNREADY, Attempt
from megatron_tape.text import byte_size, counted

MIB = 2**20
SHOWN = 20
"""Maximum number of problems in the message; the nodes of all problems are recorded."""
READING_SECONDS = 2.0
"""Seconds that rank 0 waits for the other ranks to read which problems it has found."""


def main(argv: list[str] | None = None) -> int:
    """Check the nodes, print the result, and return the exit status: 1 if a check failed."""
    parser = command_line.Parser(
        prog="python -m pretrain.preflight",
        usage=(
            "%(prog)s [--config] RECIPE [--nodes A,B] [--gpus N] [--timeout S] [--no-memory-check]"
            " [--key value ...]"
        ),
        description=__doc__,
        epilog="`python -m pretrain.train --help` explains the settings of the run.",
    )
    add = parser.add_argument
    add("--nodes", default="", help="comma-separated names of the job's nodes, in order")
    add("--gpus", type=int, default=0, help="number of GPUs per node (default: %(default)s)")
    add(
        "--timeout",
        type=float,
        default=300,
        help="seconds to wait for all ranks, and again for the all-reduce (default: %(default)s)",
    )
    add(
        "--no-memory-check",
        action="store_true",
        help="pass even if the estimated memory of the run exceeds a GPU's",
    )

    with command_line.exit_on_user_error():
        check_launcher_environment()
        options, settings = parser.parse_known_args(argv)
        config = parse_run_config(settings)

        rank, size = rank_and_size()
        attempt = Attempt.launched(config.logging.directory, config.checkpoint.directory)

    def stop_for_warning(number: int, frame: object) -> None:
        if attempt is not None:
            attempt.request_stop(signal.Signals(number).name)
        os._exit(EXIT_RESTART)

    # USR1 warns of preemption or the time limit. SIGTERM does not: srun also sends it when another
    # rank has failed.
    signal.signal(signal.SIGUSR1, stop_for_warning)

    # Invalid settings stop the job, all other errors let it be requeued.
    bad_nodes = []
    outcome = UNREADY
    try:
        check(config, Level.SETTINGS, processes=size)
        problems = Preflight(config, options, rank, size, attempt).run()
        return int(problems != "")
    except ConfigError as error:
        message = str(error)
        outcome = REFUSED
    except NodeError as error:
        message = str(error)
        bad_nodes = list(error.subjects)
    except Exception as error:
        message = f"{node_name()}: {type(error).__name__}: {error}"
    _record(attempt, rank, outcome, message, bad_nodes)
    print(f"error: preflight: {message}", file=sys.stderr, flush=True)
    return 1


def _record(
    attempt: Attempt | None, rank: int, outcome: str, message: str, bad_nodes: Iterable[str]
) -> None:
    """Record that preflight ended an attempt, if it is part of one."""
    if attempt is not None:
        with contextlib.suppress(OSError):  # the message is also printed
            attempt.record_end(rank, outcome, f"preflight: {message}", bad_nodes=bad_nodes)


@dataclass
class Preflight:
    """The checks of one rank. The ranks exchange facts through a TCPStore, which rank 0 hosts."""

    config: RunConfig
    options: argparse.Namespace
    rank: int
    size: int
    attempt: Attempt | None

    def run(self) -> str:
        """Return the problems that rank 0 has found on all nodes, as text on every rank, or ""
        without problems.

        Raises NodeError or RuntimeError if rank 0 does not answer or the all-reduce fails.
        """
        started = time.monotonic()
        layout = self.config.parallel.describe(self.size)
        self._log(f"{counted(self.size, 'rank')} ({layout}), importing torch")
        import torch

        store = self._connect()
        # The attempt's directory in the checkpoint directory.
        staging = None if self.attempt is None else self.attempt.staging
        facts: dict[str, Any] = {
            "node": node_name(),
            "gpu": _gpu(torch),
            "cuda": torch.backends.cuda.is_built(),
        }
        # One rank per node reports the facts that its ranks share.
        if local_rank() == 0:
            facts |= {"host": os.uname().nodename, "gloo": gloo_address()}
            facts |= nodes.node_facts(
                self.config, staging, code_digest(("megatron_tape", "pretrain"))
            )
        store.set(f"facts/{self.rank}", json.dumps(facts))
        if self.rank == 0:
            store.set("verdict", self._verdict(store, staging))

        verdict = self._read_verdict(store)
        if verdict:
            return verdict
        if self.rank == 0:
            self._describe_run(facts["versions"])
        if self.size > 1:
            self._measure_all_reduce(torch, store)
        self._log(f"passed in {time.monotonic() - started:.1f} s")
        return ""

    def _log(self, message: str) -> None:
        """Print a message on rank 0."""
        if self.rank == 0:
            print("preflight:", message, flush=True)

    def _connect(self):
        """Return a TCPStore that rank 0 hosts. Raises RuntimeError if rank 0 does not answer."""
        from torch.distributed import TCPStore

        check_master_address()
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = master_port()
        timeout = timedelta(seconds=self.options.timeout)
        try:
            return TCPStore(
                address,
                port,
                self.size,
                is_master=self.rank == 0,
                timeout=timeout,
                # `_silent_ranks` waits for the others, and says which of them do not answer.
                wait_for_workers=False,
            )
        except (RuntimeError, ConnectionError) as error:
            raise RuntimeError(
                f"rank 0 at {address}:{port} does not answer ({one_line(error)})"
            ) from None

    def _verdict(self, store, staging: Path | None) -> str:
        """On rank 0, find and record the problems of all nodes; return them as text, or ""."""
        problems = self._silent_ranks(store) or self._problems(store, staging)
        if not problems:
            return ""

        verdict = "; ".join(problem.sentence for problem in problems[:SHOWN])
        outcome = UNREADY
        # Other nodes do not help if the user has made a mistake.
        if any(problem.mistake for problem in problems):
            outcome = REFUSED
        # Recorded and printed before the other ranks read the verdict and exit, because srun then
        # ends this rank, too.
        bad_nodes = [node for problem in problems for node in problem.nodes]
        _record(self.attempt, self.rank, outcome, verdict, bad_nodes)
        print(f"error: preflight: {verdict}", file=sys.stderr, flush=True)
        return verdict

    def _read_verdict(self, store) -> str:
        """Wait for the text of `_verdict` and return it, on every rank.

        Raises RuntimeError if rank 0 does not report one.
        """
        # Rank 0 itself waits up to one timeout in `_silent_ranks`, before it writes the verdict.
        seconds = 2 * self.options.timeout
        try:
            store.wait(["verdict"], timedelta(seconds=seconds))
        except RuntimeError:
            raise RuntimeError(f"rank 0 did not report a result within {seconds:g} s") from None
        verdict = store.get("verdict").decode()
        if verdict and self.rank == 0 and self.size > 1:
            # The store ends with this rank, so let the other ranks read the verdict before.
            time.sleep(READING_SECONDS)
        return verdict

    def _silent_ranks(self, store) -> list[nodes.Problem]:
        """Wait for the facts of all ranks, and return a problem if some do not answer."""
        keys = [f"facts/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):  # raised after the timeout
            store.wait(keys, timedelta(seconds=self.options.timeout))
            return []

        silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not silent:  # the last one has just answered
            return []
        silent_nodes: list[str] = []
        sentence = f"rank {', '.join(map(str, silent[:SHOWN]))}"
        if self.options.nodes:
            # Every node has the same number of consecutive ranks.
            names = self.options.nodes.split(",")
            nodes_of_ranks = (names[rank * len(names) // self.size] for rank in silent)
            silent_nodes = list(dict.fromkeys(nodes_of_ranks))
            sentence += f" on {', '.join(silent_nodes[:SHOWN])}"
        sentence += f" did not answer within {self.options.timeout:g} s"
        return [nodes.Problem(sentence, tuple(silent_nodes))]

    def _problems(self, store, staging: Path | None) -> list[nodes.Problem]:
        """Return the problems that the facts of all ranks show. `staging` is the attempt's
        directory in the checkpoint directory, or None without an attempt.
        """
        facts_of_ranks = [
            json.loads(facts)
            for facts in store.multi_get([f"facts/{rank}" for rank in range(self.size)])
        ]
        # Only the first rank of each node reports versions.
        by_node = {facts["node"]: facts for facts in facts_of_ranks if "versions" in facts}
        plan = Plan(self.config, self.size)
        problems = nodes.differences(by_node)
        if staging is not None:
            keep = self.config.checkpoint.keep
            problems += nodes.directory_problems(by_node, staging, checkpoint_bytes(plan), keep)
            # The files with which each node has shown that it can write there.
            for path in staging.glob("preflight*"):
                path.unlink(missing_ok=True)

        on_cpu = self.config.train.device == "cpu"
        finds_gpus = any(facts["gpu"] for facts in facts_of_ranks)
        # Ranks on CPUs communicate through gloo. NCCL chooses its addresses in another way.
        if on_cpu or not finds_gpus:
            problems += _unreachable(by_node)

        # Nodes that report the version of a GPU driver have GPUs, even if no rank may use them.
        with_driver = [node for node, facts in by_node.items() if "driver" in facts["versions"]]
        if with_driver and not (self.options.gpus or finds_gpus or on_cpu):
            sentence = (
                f"{', '.join(with_driver)}: the node has GPUs, but none are allocated to the job;"
                " submit with --gpus-per-node, or set train.device to cpu"
            )
            problems.append(nodes.Problem(sentence, mistake=True))
        if self.options.gpus:
            if not any(facts["cuda"] for facts in facts_of_ranks):
                sentence = f"torch is built without CUDA, but the job has GPUs; {cuda_build_fix()}"
                problems.append(nodes.Problem(sentence, mistake=True))
            # The GPUs of the ranks on each node.
            gpus: dict[str, list[dict]] = {node: [] for node in by_node}
            for facts in facts_of_ranks:
                if facts["gpu"]:
                    gpus[facts["node"]].append(facts["gpu"])
            required = 0 if self.options.no_memory_check else memory(plan).peak
            problems += nodes.gpu_problems(gpus, self.options.gpus, required)
        return problems

    def _describe_run(self, node_versions: dict[str, str]) -> None:
        """Print the versions, which are the same on all nodes, and the memory and checkpoints."""
        plan = Plan(self.config, self.size)
        self._log(", ".join(f"{name} {value}" for name, value in node_versions.items()))
        self._log(f"{len(nodes.input_files(self.config))} input files are the same on every node")
        per_rank = byte_size(memory(plan).peak)
        self._log(f"about {per_rank} per rank, {byte_size(checkpoint_bytes(plan))} per checkpoint")

    def _measure_all_reduce(self, torch, store) -> None:
        """Print the bus bandwidth of an all-reduce over all ranks.

        For n ranks, it is 2 (n - 1) / n times the bytes, divided by the time: so much does each
        rank send in a ring. Raises RuntimeError if the all-reduce fails.
        """
        import torch.distributed as dist

        size = self.size
        backend, device, mebibytes = "gloo", "cpu", 16
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank())
            backend, device, mebibytes = "nccl", "cuda", 256
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("preflight", store),
                rank=self.rank,
                world_size=size,
                timeout=timedelta(seconds=self.options.timeout),
            )
            numbers = torch.empty(mebibytes * MIB // 4, device=device)
            seconds = []
            for _ in range(4):  # the first is a warm-up
                numbers.fill_(1)
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(numbers)
                numbers[0].item()  # waits for the GPU
                seconds.append(time.perf_counter() - began)
            dist.destroy_process_group()
        except RuntimeError as error:
            raise RuntimeError(f"the all-reduce over all ranks failed: {one_line(error)}") from None

        # The median of the last three.
        bandwidth = 2 * (size - 1) / size * mebibytes * MIB / sorted(seconds[1:])[1]
        self._log(f"all-reduce of {mebibytes} MiB over {size} ranks: {bandwidth / 1e9:.2f} GB/s")


def _unreachable(by_node: dict[str, dict]) -> list[nodes.Problem]:
    """Return a problem that names the nodes that gloo's connections cannot reach, or an empty list.

    `by_node` are the facts of the nodes.
    """
    unreachable = tuple(unreachable_nodes({node: facts["gloo"] for node, facts in by_node.items()}))
    # The nodes may be virtual ones of the same machine, which reaches itself.
    if not unreachable or len({facts["host"] for facts in by_node.values()}) == 1:
        return []
    sentence = (
        f"{', '.join(unreachable)}: other nodes cannot reach the address that the node resolves its"
        " own name to; set TAPE_NETWORK_INTERFACE in slurm/site.env, or correct /etc/hosts on the"
        " node"
    )
    # If no node can be reached, the network is configured wrongly, and other nodes do not help.
    return [nodes.Problem(sentence, unreachable, mistake=len(unreachable) == len(by_node))]


def _gpu(torch) -> dict | None:
    """Return the name of this rank's GPU and its memory in bytes, or None if it has none."""
    index = local_rank()
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "total": properties.total_memory}


if __name__ == "__main__":
    sys.exit(main())
