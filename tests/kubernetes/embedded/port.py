"""Finds free TCP ports for a run's servers."""

from __future__ import annotations

import random
import socket

# Below the kernel's ephemeral ports (from 32768) and Kubernetes' node ports (from 30000), so that
# neither an outgoing connection nor a Service can take a port between the choice and its use.
FIRST, LAST = 20000, 29999


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listened on a moment ago."""
    found: list[int] = []
    for port in random.sample(range(FIRST, LAST + 1), LAST + 1 - FIRST):
        if len(found) == count:
            break
        if is_free(port, address):
            found.append(port)
    return found


def is_free(port: int, address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
