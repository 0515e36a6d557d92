"""Which network interface an address belongs to.

Collectives must use the interface of the address that Ray chose for a node: a host name may map to
loopback, and a pod may have several. It does not know who asks.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

logger = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Name of the interface that has `address`; None if none of this machine's has it."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        return _ipv6_interface(wanted)
    return next((name for _, name in socket.if_nameindex() if _ipv4_address(name) == wanted), None)


def choose_interface(address: str) -> None:
    """Collectives use the interface of the address that Ray chose, unless the user chose one."""
    name = interface_of(address)
    if name is None:
        logger.warning("no network interface has %s, collectives choose one themselves", address)
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def _ipv4_address(name: str) -> ipaddress.IPv4Address | None:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # An interface without an IPv4 address.
    return ipaddress.IPv4Address(answer[20:24])


def _ipv6_interface(wanted: ipaddress.IPv6Address) -> str | None:
    if not _IPV6_TABLE.exists():
        return None
    for line in _IPV6_TABLE.read_text().splitlines():
        digits, *_, name = line.split()
        if ipaddress.IPv6Address(int(digits, 16)) == wanted:
            return name
    return None
