"""What torchrun, or a Slurm script, says in the environment about processes, and whether these can find each other."""

import contextlib
import ipaddress
import os
import re
import socket
import time

from megatron_tape.errors import NodeError, UserError, refuse
from megatron_tape.io.versions import node_name

FIX = "start the program with torchrun or a script in slurm/, or unset these variables to run a single process"
MOST_PROCESSES, LAST_PORT = 1_000_000, 65535
TRIES = 5
"""Times that a name is looked up: where thousands of ranks start at once, a name server may miss one."""


def environment_number(name: str, default: int, least: int = 0, most: int = MOST_PROCESSES, fix: str = FIX) -> int:
    """Return the whole number in an environment variable, or `default` if it is not set.

    Raises UserError unless it is written in ASCII digits, without leading zeros, and from `least` to `most`.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text) or not least <= int(text) <= most:
        raise UserError(name, f"is {text[:40]!r}, not a whole number from {least} to {most}", fix)
    return int(text)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as the launcher says. Raises UserError."""
    return environment_number("RANK", 0), environment_number("WORLD_SIZE", 1, least=1)


def local_rank() -> int:
    """Return this process's rank among those of its node, as the launcher says. Raises UserError."""
    return environment_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of processes on this node, as the launcher says. Raises UserError."""
    return environment_number("LOCAL_WORLD_SIZE", 1, least=1)


def master_port() -> int:
    """Return the port of rank 0, or 0 if the launcher says none. Raises UserError."""
    return environment_number("MASTER_PORT", 0, least=1, most=LAST_PORT)


def restart_count() -> int:
    """Return how often Slurm has started this job again. Raises UserError."""
    return environment_number("SLURM_RESTART_COUNT", 0, fix="unset it, or submit the job with a script in slurm/")


def check_launched() -> None:
    """Raise UserError for variables of a launcher with impossible values, or that do not fit together.

    Those of an earlier one may be left in a shell. A process would take them for its own, and wait for others or take
    itself for one of them.
    """
    (rank, size), on_node = rank_and_size(), local_rank()
    local_world_size()
    restart_count()
    has_size = "WORLD_SIZE" in os.environ
    if size > 1 or _finds_rank_0():
        given, value = ("WORLD_SIZE", size) if has_size else ("RANK", rank)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError((given, name), f"is {value}, but {name} is not set", FIX)
        master_port()
    for name, value in (("RANK", rank), ("LOCAL_RANK", on_node)):
        if value >= size:
            size_is = f"WORLD_SIZE is {size if has_size else 'not set'}"
            raise UserError((name, "WORLD_SIZE"), f"is {value}, but {size_is}", FIX)


def refuse_launcher(program: str, reason: str) -> None:
    """Raise UserError if a launcher has started a program that must be started alone, or its variables do not fit."""
    fix = "run it without torchrun or srun, and unset RANK and MASTER_ADDR if an earlier launcher has left them"
    refuse(_finds_rank_0(), program, reason, fix)
    check_launched()


def _finds_rank_0() -> bool:
    """Return whether there is what only a launcher sets: DeepSpeed leaves RANK behind, but not where rank 0 is."""
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys()


def check_master_address() -> None:
    """Raise NodeError if this node cannot resolve MASTER_ADDR; torch would try until the timeout of its groups."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    for number in range(TRIES):
        time.sleep(number)
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
    problem = f"cannot resolve MASTER_ADDR, which is {address} ({reason})"
    fix = "add it to DNS or /etc/hosts of every node; on a single one, pass --local-addr 127.0.0.1 to torchrun"
    raise NodeError(node_name(), problem, fix)


def gloo_address() -> str | None:
    """Return the address at which gloo lets other ranks reach this node's: that of its name. None if it is told one."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
                tried.bind(place)
                return str(place[0])
    return "127.0.0.1"  # which it takes then, too


def out_of_reach(addresses: dict[str, str | None]) -> list[str]:
    """Return the nodes that are not reached at these addresses from the others."""
    found = [node for node, address in addresses.items() if address is not None and _is_loopback(address)]
    # Nodes that share a machine can have loopback addresses of their own.
    apart = len({addresses[node] for node in found}) == len(addresses)
    return [] if apart else found


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
