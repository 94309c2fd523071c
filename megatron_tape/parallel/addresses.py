"""Whether nodes can find each other, before torch waits for it."""

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


def gloo_is_reachable() -> bool:
    """Return whether gloo gives ranks of other nodes an address of this one: that of an interface, or of its name."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return True
    try:
        first = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0]
        return not ipaddress.ip_address(first[4][0].partition("%")[0]).is_loopback
    except (OSError, ValueError):  # it takes the loopback address
        return False
