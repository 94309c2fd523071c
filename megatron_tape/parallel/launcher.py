"""The launcher's environment variables (torchrun, Slurm), and checks that the nodes can reach each
other.
"""

import contextlib
import ipaddress
import os
import re
import socket
import time

from megatron_tape.errors import ConfigError, NodeError, UserError
from megatron_tape.io.versions import node_name

FIX = (
    "start the program with torchrun or a script in slurm/, or unset the launcher's variables to"
    " run a single process"
)
MOST_PROCESSES = 1_000_000
"""Largest rank or number of processes that is accepted."""
LAST_PORT = 65535
SHARED_GPU = "TAPE_TEST_RANKS_SHARE_GPU"
"""Environment variable that only tests may set; see `ranks_share_gpu`."""
TRIES = 5
"""Number of attempts to resolve a host name. A name server may drop requests if thousands of ranks
start at once.
"""


def environment_number(
    name: str,
    default: int = 0,
    least: int = 0,
    most: int = MOST_PROCESSES,
    fix: str = FIX,
) -> int:
    """Return the integer in an environment variable, or `default` if it is not set.

    Raises UserError unless the value is ASCII digits without leading zeros, and is between `least`
    and `most`. `fix` is the advice in the message.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text) or not least <= int(text) <= most:
        raise UserError(name, f"is {text[:40]!r}, not a whole number from {least} to {most}", fix)
    return int(text)


def rank_and_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE; the defaults are 0 and 1. Raises UserError if they are
    invalid.
    """
    rank = environment_number("RANK")
    return rank, environment_number("WORLD_SIZE", default=1, least=1)


def local_rank() -> int:
    """Return LOCAL_RANK, the rank within this node; the default is 0. Raises UserError if it is
    invalid.
    """
    return environment_number("LOCAL_RANK")


def local_world_size() -> int:
    """Return LOCAL_WORLD_SIZE, the number of processes on this node; default 1. Raises UserError if
    it is invalid.
    """
    return environment_number("LOCAL_WORLD_SIZE", default=1, least=1)


def master_port() -> int:
    """Return MASTER_PORT, the port of rank 0, or 0 if it is not set. Raises UserError if it is
    invalid.
    """
    return environment_number("MASTER_PORT", least=1, most=LAST_PORT)


def restart_count() -> int:
    """Return how often Slurm has restarted this job (SLURM_RESTART_COUNT). Raises UserError if it
    is invalid.
    """
    return environment_number(
        "SLURM_RESTART_COUNT", fix="unset it, or submit the job with a script in slurm/"
    )


def ranks_share_gpu() -> bool:
    """Return whether a test has set TAPE_TEST_RANKS_SHARE_GPU, in order to start several ranks on
    one GPU.

    All ranks then have LOCAL_RANK=0. They communicate through gloo, because NCCL refuses two ranks
    on one GPU. Gloo copies all tensors to the CPU and back, which is slow. Raises ConfigError if
    the variable is set outside of pytest.
    """
    if SHARED_GPU not in os.environ:
        return False
    # pytest sets PYTEST_CURRENT_TEST, and the processes that a test starts inherit it.
    if "PYTEST_CURRENT_TEST" not in os.environ:
        raise ConfigError(
            SHARED_GPU,
            "is set, but only tests may share a GPU, since that is slow",
            "unset it, and start one process per GPU",
        )
    return True


def check_launcher_environment() -> None:
    """Raise UserError if the launcher's environment variables are invalid or inconsistent.

    With variables that an earlier launcher has left in the shell, a single process would wait for
    other ranks or take the rank of another process.
    """
    rank, size = rank_and_size()
    ranks = {"RANK": rank, "LOCAL_RANK": local_rank()}
    # Call these only because they raise if the value is invalid.
    local_world_size()
    restart_count()
    if size > 1 or has_rank_0_address():
        # WORLD_SIZE is set if the size exceeds 1, and otherwise RANK is. Each of the two requires
        # all four variables.
        present = "WORLD_SIZE" if "WORLD_SIZE" in os.environ else "RANK"
        for missing in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(missing):
                raise UserError(
                    (present, missing), f"is {os.environ[present]}, but {missing} is not set", FIX
                )
        master_port()

    for name, value in ranks.items():
        if value >= size:
            world_size = os.environ.get("WORLD_SIZE", "not set")
            raise UserError(
                (name, "WORLD_SIZE"), f"is {value}, but WORLD_SIZE is {world_size}", FIX
            )


def refuse_launcher(program: str, reason: str) -> None:
    """Raise UserError if a launcher has started `program`, which runs as a single process.

    `reason` says in the message what is wrong with that. UserError is also raised if the launcher's
    variables are inconsistent.
    """
    if has_rank_0_address():
        raise ConfigError(
            program,
            reason,
            "run it without torchrun or srun, and unset RANK and MASTER_ADDR if an earlier launcher"
            " has left them",
        )
    check_launcher_environment()


def has_rank_0_address() -> bool:
    """Return whether RANK and MASTER_ADDR are set, as by a launcher.

    RANK alone may have been set by DeepSpeed, in a process without a launcher.
    """
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys()


def check_master_address() -> None:
    """Raise NodeError if this node cannot resolve MASTER_ADDR.

    Without this check, the rank would wait until torch's timeout.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    for earlier_tries in range(TRIES):
        time.sleep(earlier_tries)  # seconds; no wait before the first try
        try:
            socket.getaddrinfo(address, port=None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name
            # A UnicodeError has no `strerror`.
            reason = getattr(error, "strerror", None) or error
    raise NodeError(
        node_name(),
        f"cannot resolve MASTER_ADDR, which is {address} ({reason})",
        f"add {address} to DNS or to /etc/hosts of every node; on one node, pass --local-addr"
        " 127.0.0.1 to torchrun",
    )


def gloo_address() -> str | None:
    """Return the address at which gloo lets other ranks connect to this one.

    Return None if GLOO_SOCKET_IFNAME selects a network interface, whose address is not known here.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    # As gloo does, take the first address of the host name that belongs to this node.
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            # Binding fails if the address belongs to another node.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"  # gloo's own fallback


def unreachable_nodes(addresses: dict[str, str | None]) -> list[str]:
    """Return the nodes whose `gloo_address` is a loopback address, which other nodes cannot reach.

    `addresses` has the `gloo_address` of each node.
    """
    loopback = []
    for node, address in addresses.items():
        # `ip_address` does not accept the zone of an IPv6 address, such as `%eth0`.
        if address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            loopback.append(node)
    # If every node has a loopback address, all nodes are virtual ones on one machine, and can reach
    # each other.
    if len({addresses[node] for node in loopback}) == len(addresses):
        return []
    return loopback
