"""Check all nodes of a job before training begins; every rank runs this under the same launcher as training.

    srun ... python -m pretrain.preflight --config X.yaml [--section.key value ...]

Stops with the node's name and the reason when versions or code differ, a GPU is missing or too small, the data are not
the same bytes everywhere, the checkpoint directory is not shared, writable and large enough, or a rank does not answer.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from megatron_tape.config.checks import validate
from megatron_tape.config.parse import parse_run_config
from megatron_tape.config.schema import RunConfig
from megatron_tape.costs import estimate
from megatron_tape.errors import ConfigError
from megatron_tape.run import nodes
from megatron_tape.run.attempts import REFUSED, Attempt
from megatron_tape.run.watch import EXIT_INTERRUPTED
from pretrain.train import ATTEMPT_VARIABLE

MIB = 2**20


class Refused(Exception):
    """The job must not start; the message says which node, and why."""


def main(argv: list[str] | None = None) -> int:
    """Check, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.preflight",
        usage="%(prog)s --config X.yaml [--nodes A,B] [--gpus N] [--timeout S] [--no-memory-check] [--key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Settings of the run are explained by `python -m pretrain.train --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", default="", help="names of the job's nodes, in order, separated by commas")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each node must have (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=45, help="seconds that a rank may take to answer (default: %(default)s)"
    )
    parser.add_argument(
        "--no-memory-check", action="store_true", help="start although the estimate says that the GPUs are too small"
    )
    options, rest = parser.parse_known_args(argv)
    config = parse_run_config(rest)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attempt = None
    if number := os.environ.get(ATTEMPT_VARIABLE):
        attempt = Attempt.open(config.logging.directory, config.checkpoint.directory, int(number))
    # SIGTERM also comes from srun when another rank has failed: it must not be taken for a warning.
    signal.signal(signal.SIGUSR1, lambda number, frame: _interrupted(attempt, number))
    try:
        validate(config, size)
        _check(config, options, rank, size, attempt)
    except Exception as error:
        foreseen = isinstance(error, (Refused, ConfigError))
        message = f"preflight: {error if foreseen else f'{_here()}: {type(error).__name__}: {error}'}"
        if rank == 0 or not isinstance(error, Verdict):
            _record(attempt, rank, message)
            print(f"error: {message}", file=sys.stderr, flush=True)
        return 1
    return 0


class Verdict(Refused):
    """What rank 0 found, and tells."""


def _record(attempt: Attempt | None, rank: int, message: str) -> None:
    if attempt is not None:
        attempt.record_end(rank, REFUSED, message)


def _interrupted(attempt: Attempt | None, number: int) -> None:
    if attempt is not None:
        attempt.request_stop(signal.Signals(number).name)
    os._exit(EXIT_INTERRUPTED)


def _check(config: RunConfig, options: argparse.Namespace, rank: int, size: int, attempt: Attempt | None) -> None:
    started = time.monotonic()
    say = print if rank == 0 else lambda *_, **__: None
    say(f"preflight: {size} rank{'s' * (size != 1)}, importing torch", flush=True)
    import torch
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=options.timeout)
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        store = TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ConnectionError) as error:
        told = str(error).splitlines()[0]
        raise Refused(f"{_here()}: rank 0 at {address}:{port} does not answer ({told})") from None
    home = None if attempt is None else attempt.home
    token = secrets.token_hex(8)
    if rank == 0:
        if home is not None:
            (home / "preflight").write_text(token, encoding="utf-8")
        store.set("ready", "yes")
    store.wait(["ready"])
    facts: dict[str, Any] = {"node": _here(), "gpu": _gpu(torch)}
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        facts |= nodes.node_facts(config, home)
    store.set(f"facts/{rank}", json.dumps(facts))
    if rank == 0:
        problems = _problems(store, config, options, size, home, token, started)
        if problems:
            # Before the others learn of it and end, upon which srun ends this rank.
            _record(attempt, rank, f"preflight: {'; '.join(problems)}")
        store.set("problems", json.dumps(problems))
    try:
        store.wait(["problems"], 2 * timeout)
    except RuntimeError:
        raise Refused(f"{_here()}: rank 0 reached no verdict") from None
    problems = json.loads(store.get("problems"))
    store.set(f"told/{rank}", "yes")
    if problems:
        if rank == 0:
            # The store ends with this rank: let the others learn why.
            with contextlib.suppress(RuntimeError):
                store.wait([f"told/{other}" for other in range(size)], timedelta(seconds=5))
        raise Verdict("; ".join(problems))
    _describe(config, facts, size, say)
    if size > 1:
        _measure(torch, store, rank, size, say)
    say(f"preflight: passed in {time.monotonic() - started:.1f} s", flush=True)


def _problems(store, config, options, size, home, token, started) -> list[str]:
    """Gather every rank's facts and compare them, on rank 0."""
    names = [name for name in options.nodes.split(",") if name]
    gathered: list[dict[str, Any] | None] = []
    for rank in range(size):
        left = max(0.1, options.timeout - (time.monotonic() - started))
        try:
            store.wait([f"facts/{rank}"], timedelta(seconds=left))
            gathered.append(json.loads(store.get(f"facts/{rank}")))
        except RuntimeError:
            gathered.append(None)
    silent = [rank for rank, facts in enumerate(gathered) if facts is None]
    if silent:
        return [
            f"rank {rank}{f' on {names[rank * len(names) // size]}' if names else ''} did not answer within "
            f"{options.timeout:g} s"
            for rank in silent
        ]
    by_node = {facts["node"]: facts for facts in gathered if "versions" in facts}
    needed = estimate(config, size)
    problems = nodes.differences(by_node)
    if home is not None:
        problems += nodes.directory_problems(by_node, home, token, needed.checkpoint_bytes, config.checkpoint.keep)
        for path in home.glob("preflight*"):
            path.unlink(missing_ok=True)
    if options.gpus:
        gpus = {node: [f["gpu"] for f in gathered if f["node"] == node and f["gpu"]] for node in by_node}
        problems += nodes.gpu_problems(gpus, options.gpus, 0 if options.no_memory_check else needed.peak)
        for warning in nodes.gpu_warnings(gpus, needed.peak):
            print(f"warning: preflight: {warning}", file=sys.stderr, flush=True)
    return problems


def _describe(config: RunConfig, facts: dict[str, Any], size: int, say) -> None:
    needed = estimate(config, size)
    if "versions" in facts:
        say("preflight: " + ", ".join(f"{name} {value}" for name, value in facts["versions"].items()), flush=True)
    say(f"preflight: {len(nodes.inputs(config))} input files are the same on every node", flush=True)
    say(
        f"preflight: {needed.parameters:,} parameters, about {needed.peak / nodes.GIB:.2f} GiB a rank, "
        f"{needed.flops_per_step / 1e12:,.2f} TFLOP a step, {needed.checkpoint_bytes / nodes.GIB:.2f} GiB a checkpoint",
        flush=True,
    )


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _gpu(torch) -> dict[str, Any] | None:
    """Describe the device that this rank will train on, if there is one."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "free": free, "total": total}


def _measure(torch, store, rank: int, size: int, say) -> None:
    """Print the bandwidth of an all-reduce over all ranks: 2 (n - 1) / n times its bytes over its time."""
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device, megabytes = ("cuda", 256) if on_gpu else ("cpu", 16)
    try:
        backend = "nccl" if on_gpu else "gloo"
        store = dist.PrefixStore("preflight", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        numbers, seconds = torch.empty(megabytes * MIB // 4, device=device), []
        for _ in range(4):  # the first is a warm-up
            numbers.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        sums_right = bool((numbers == size).all())
        dist.destroy_process_group()
    except RuntimeError as error:
        raise Refused(f"{_here()}: the all-reduce over all ranks failed: {str(error).splitlines()[0]}") from None
    if not sums_right:
        raise Refused(f"{_here()}: the all-reduce over all ranks gave wrong sums")
    bandwidth = 2 * (size - 1) / size * megabytes * MIB / sorted(seconds[1:])[1]
    say(f"preflight: all-reduce of {megabytes} MiB over {size} ranks: {bandwidth / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
