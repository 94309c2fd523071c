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
import functools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from megatron_tape import command_line
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import EXIT_RESTART, ConfigError, NodeError
from megatron_tape.io.files import write_whole
from megatron_tape.io.versions import code_digest, cuda_build_fix, node_name, versions
from megatron_tape.parallel.launcher import (
    check_launcher_environment,
    check_master_address,
    gloo_address,
    local_rank,
    master_port,
    rank_and_size,
    unreachable_nodes,
)
from megatron_tape.planning.flops import flops_per_step
from megatron_tape.planning.memory import checkpoint_bytes, memory
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.planning.plan import Plan
from megatron_tape.run import nodes
from megatron_tape.run.attempts import REFUSED, UNREADY, Attempt
from megatron_tape.text import byte_size, counted, flop_count

MIB = 2**20
SHOWN = 20
"""Maximum number of problems in the message; the nodes of all problems are recorded."""


class Unready(Exception):
    """The nodes cannot train together now, but a new attempt may succeed. The message names nodes
    and reason.

    `bad_nodes` are the nodes that the next attempt should exclude.
    """

    def __init__(self, message: str, bad_nodes: Iterable[str] = ()):
        super().__init__(message)
        self.bad_nodes = list(bad_nodes)


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
    add(
        "--gpus",
        type=int,
        default=0,
        help="number of GPUs that each node must have (default: %(default)s)",
    )
    timeout = (
        "seconds to wait for all ranks after rank 0 has imported torch, and again for the"
        " all-reduce"
    )
    add("--timeout", type=float, default=300, help=f"{timeout} (default: %(default)s)")
    add(
        "--no-memory-check",
        action="store_true",
        help="pass even if the estimated memory of the run exceeds a GPU's",
    )
    with command_line.exit_on_user_error():
        check_launcher_environment()
        options, rest = parser.parse_known_args(argv)
        config = parse_run_config(rest)
        rank, size = rank_and_size()
        attempt = Attempt.launched(config.logging.directory, config.checkpoint.directory)
    # USR1 warns of preemption or the time limit. SIGTERM does not: srun also sends it when another
    # rank has failed.
    signal.signal(signal.SIGUSR1, lambda number, frame: _interrupted(attempt, number))
    try:
        check(config, Level.SETTINGS, size)
        verdict = _check(config, options, rank, size, attempt)
    except Exception as error:
        foreseen = isinstance(error, (Unready, ConfigError))
        if foreseen:
            message = str(error)
        else:
            message = f"{node_name()}: {type(error).__name__}: {error}"
        bad_nodes = error.bad_nodes if isinstance(error, Unready) else []
        _record(
            attempt,
            rank,
            REFUSED if isinstance(error, ConfigError) else UNREADY,
            message,
            bad_nodes,
        )
        print(f"error: preflight: {message}", file=sys.stderr, flush=True)
        return 1
    if verdict and rank == 0:
        print(f"error: preflight: {verdict}", file=sys.stderr, flush=True)
    return int(verdict != "")


def _record(
    attempt: Attempt | None, rank: int, outcome: str, message: str, bad_nodes: Iterable[str]
) -> None:
    if attempt is not None:
        with contextlib.suppress(OSError):  # the message is also printed
            attempt.record_end(rank, outcome, f"preflight: {message}", bad_nodes=bad_nodes)


def _interrupted(attempt: Attempt | None, number: int) -> None:
    if attempt is not None:
        attempt.request_stop(signal.Signals(number).name)
    os._exit(EXIT_RESTART)


def _check(
    config: RunConfig, options: argparse.Namespace, rank: int, size: int, attempt: Attempt | None
) -> str:
    """Return the problems that rank 0 has found on all nodes, as text on every rank, or "" without
    problems.

    Raises Unready if rank 0 does not answer or the all-reduce fails.
    """
    started = time.monotonic()
    if rank == 0:
        log = functools.partial(print, "preflight:", flush=True)
    else:

        def log(_: str) -> None:
            pass

    log(f"{counted(size, 'rank')} ({config.parallel.describe(size)}), importing torch")
    import torch
    from torch.distributed import TCPStore

    imported = time.monotonic()
    timeout = timedelta(seconds=options.timeout)
    try:
        check_master_address()
    except NodeError as error:
        raise Unready(str(error), error.subjects) from None
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = master_port()
    try:
        store = TCPStore(
            address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ConnectionError) as error:
        raise Unready(
            f"{node_name()}: rank 0 at {address}:{port} does not answer ({_first_line(error)})"
        ) from None
    home = None if attempt is None else attempt.home
    token = secrets.token_hex(8)
    if rank == 0:
        if home is not None:
            write_whole(home / "preflight", [token.encode()], durable=False)
        store.set("ready", "yes")
    store.wait(["ready"])
    facts: dict[str, Any] = {
        "node": node_name(),
        "gpu": _gpu(torch),
        "cuda": torch.backends.cuda.is_built(),
    }
    if local_rank() == 0:
        facts |= {"host": os.uname().nodename, "gloo": gloo_address()}
        facts |= nodes.node_facts(config, home, code_digest(("megatron_tape", "pretrain")))
    store.set(f"facts/{rank}", json.dumps(facts))
    if rank == 0:
        problems = _problems(store, config, options, size, home, token, imported)
        verdict = _describe(problems)
        if problems:
            # Recorded before the other ranks read the verdict and exit, because srun then ends this
            # rank, too.
            if any(problem.mistake for problem in problems):
                outcome = REFUSED
            else:
                outcome = UNREADY
            _record(
                attempt,
                rank,
                outcome,
                verdict,
                [node for problem in problems for node in problem.nodes],
            )
        store.set("verdict", verdict)
    try:
        store.wait(["verdict"], 2 * timeout)
    except RuntimeError:
        raise Unready(
            f"{node_name()}: rank 0 did not report a result within {2 * options.timeout:g} s"
        ) from None
    verdict = store.get("verdict").decode()
    store.set(f"heard/{rank}", "yes")
    if verdict:
        if rank == 0:
            # The store ends with this rank, so wait until the other ranks have read the verdict.
            with contextlib.suppress(RuntimeError):
                store.wait([f"heard/{other}" for other in range(size)], timedelta(seconds=5))
        return verdict
    if rank == 0:
        plan = Plan(config, size)
        parameters = parameter_count(config.model, config.extension)
        log(", ".join(f"{name} {value}" for name, value in facts["versions"].items()))
        log(f"{len(nodes.inputs(config))} input files are the same on every node")
        log(
            f"{parameters:,} parameters, about {byte_size(memory(plan).peak)} per rank, "
            f"{flop_count(flops_per_step(plan))} per step, "
            f"{byte_size(checkpoint_bytes(plan))} per checkpoint"
        )
    if size > 1:
        _measure(torch, store, rank, size, options, log)
    log(f"passed in {time.monotonic() - started:.1f} s")
    return ""


def _problems(store, config, options, size, home, token, imported) -> list[nodes.Problem]:
    """Gather the facts that all ranks wrote to `store` on rank 0, and return the problems that they
    show.

    `imported` is the monotonic time at which rank 0 had imported torch, when the timeout for the
    other ranks begins.
    """
    keys = [f"facts/{rank}" for rank in range(size)]
    try:
        store.wait(
            keys, timedelta(seconds=max(0.1, options.timeout - (time.monotonic() - imported)))
        )
    except RuntimeError:
        if silent := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            silent_nodes = _nodes_of(silent, options, size)
            where = f" on {', '.join(silent_nodes[:SHOWN])}" if silent_nodes else ""
            which = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent[:SHOWN]))}"
            return [
                nodes.Problem(
                    f"{which}{where} did not answer within {options.timeout:g} s",
                    tuple(silent_nodes),
                )
            ]
    gathered = [json.loads(facts) for facts in store.multi_get(keys)]
    by_node = {facts["node"]: facts for facts in gathered if "versions" in facts}
    plan = Plan(config, size)
    needed = memory(plan).peak
    problems = nodes.differences(by_node)
    if home is not None:
        problems += nodes.directory_problems(
            by_node, home, token, checkpoint_bytes(plan), config.checkpoint.keep
        )
        for path in home.glob("preflight*"):
            path.unlink(missing_ok=True)
    with_driver = [node for node, facts in by_node.items() if "driver" in facts["versions"]]
    finds_gpus = any(facts["gpu"] for facts in gathered)
    if not finds_gpus or config.train.device == "cpu":
        problems += _unreachable(by_node)
    if not options.gpus and with_driver and not finds_gpus and config.train.device != "cpu":
        sentence = f"{', '.join(with_driver)}: the node has GPUs, but none are allocated to the job"
        fix = "submit with --gpus-per-node, or set train.device to cpu"
        problems.append(nodes.Problem(f"{sentence}; {fix}", mistake=True))
    if options.gpus:
        if not any(facts["cuda"] for facts in gathered):
            problem = (
                f"torch {versions(['torch'])['torch']} is built without CUDA, but the job has GPUs"
            )
            problems.append(nodes.Problem(f"{problem}; {cuda_build_fix()}", mistake=True))
        gpus = {
            node: [f["gpu"] for f in gathered if f["node"] == node and f["gpu"]] for node in by_node
        }
        problems += nodes.gpu_problems(gpus, options.gpus, 0 if options.no_memory_check else needed)
    return problems


def _unreachable(by_node: dict[str, dict[str, Any]]) -> list[nodes.Problem]:
    """Return a problem that names the nodes whose gloo ranks other nodes cannot connect to, or an
    empty list.
    """
    unreachable = tuple(unreachable_nodes({node: facts["gloo"] for node, facts in by_node.items()}))
    if not unreachable or len({facts["host"] for facts in by_node.values()}) == 1:
        return []
    problem = (
        f"{', '.join(unreachable)}: other nodes cannot reach the address that the node resolves its"
        " own name to"
    )
    fix = "set TAPE_NETWORK_INTERFACE in slurm/site.env, or correct /etc/hosts on the node"
    return [
        nodes.Problem(f"{problem}; {fix}", unreachable, mistake=len(unreachable) == len(by_node))
    ]


def _describe(problems: list[nodes.Problem]) -> str:
    if len(problems) > SHOWN:
        more = f"; and {counted(len(problems) - SHOWN, 'more problem')}"
    else:
        more = ""
    return "; ".join(problem.sentence for problem in problems[:SHOWN]) + more


def _nodes_of(ranks: list[int], options: argparse.Namespace, size: int) -> list[str]:
    """Return the nodes on which the ranks run, without repetitions; an empty list without
    --nodes.
    """
    names = [name for name in options.nodes.split(",") if name]
    if names:
        return list(dict.fromkeys(names[rank * len(names) // size] for rank in ranks))
    return []


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _gpu(torch) -> dict[str, Any] | None:
    index = local_rank()
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "total": properties.total_memory}


def _measure(torch, store, rank: int, size: int, options: argparse.Namespace, log) -> None:
    """Print the bus bandwidth of an all-reduce over all n ranks: 2 (n - 1) / n times the bytes,
    divided by the time.

    Raises Unready if the all-reduce fails or its sums are wrong.
    """
    import torch.distributed as dist

    if on_gpu := torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    device, megabytes = ("cuda", 256) if on_gpu else ("cpu", 16)
    store.set(f"joining/{rank}", "yes")
    try:
        backend = "nccl" if on_gpu else "gloo"
        timeout = timedelta(seconds=options.timeout)
        group_store = dist.PrefixStore("preflight", store)
        dist.init_process_group(
            backend, store=group_store, rank=rank, world_size=size, timeout=timeout
        )
        numbers = torch.empty(megabytes * MIB // 4, device=device)
        seconds = []
        for _ in range(4):  # the first is a warm-up
            numbers.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        sums_correct = bool((numbers == size).all())
        dist.destroy_process_group()
    except RuntimeError as error:
        absent = []
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0
            absent = [other for other in range(size) if not store.check([f"joining/{other}"])]
        bad_nodes = _nodes_of(absent, options, size)
        where = f" without {', '.join(bad_nodes)}" if bad_nodes else ""
        problem = (
            f"{node_name()}: the all-reduce over all ranks failed{where}: {_first_line(error)}"
        )
        raise Unready(problem, bad_nodes) from None
    if not sums_correct:
        raise Unready(f"{node_name()}: the all-reduce over all ranks returned wrong sums")
    bandwidth = 2 * (size - 1) / size * megabytes * MIB / sorted(seconds[1:])[1]
    log(f"all-reduce of {megabytes} MiB over {size} ranks: {bandwidth / 1e9:.2f} GB/s")


if __name__ == "__main__":
    sys.exit(main())
