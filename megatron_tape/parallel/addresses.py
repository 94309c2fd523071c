"""Whether nodes can find each other, before torch waits for it."""

import contextlib
import ipaddress
import os
import socket
import time

from megatron_tape.errors import NodeError
from megatron_tape.io.versions import node_name

TRIES = 5
"""Times that a name is looked up: where thousands of ranks start at once, a name server may miss one."""


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
