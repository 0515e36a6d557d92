"""The process between two network namespaces: takes packets from one and gives them to the other.

It holds the far ends of two TUN devices, so the kernel has summed and cut every packet before it is
here, and both devices are gone when this process is. A line of JSON on standard input is the next
profile, answered by the fates of packets under the one before; it ends when its input does.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import Counter

from soak_benchmark.link import Link, Profile

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_MAX_PACKET_BYTES = 65536
_MAX_READS = 64
"""In a row from one device: then due packets of the other have their turn."""
_STDIN = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs=2)
    parser.add_argument("--seed", required=True)
    args = parser.parse_args()
    relay = Relay([open_tun(name) for name in args.devices], args.seed)
    print("ready", flush=True)
    try:
        relay.run()
    except OSError as error:
        # A device goes with the namespace that it is in: then there is nothing left to do.
        if error.errno != errno.EBADFD:
            raise


def open_tun(name: str) -> int:
    """A file of whole IP packets. The device is in this process's namespace until it is moved."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


class Relay:
    def __init__(self, devices: list[int], seed: str) -> None:
        first, second = devices
        # Each device with where its packets go, and over which link.
        self._ways = {
            first: (second, Link(f"{seed} there")),
            second: (first, Link(f"{seed} back")),
        }

    def run(self) -> None:
        inputs = [*self._ways, _STDIN]
        while True:
            ready, _, _ = select.select(inputs, (), (), self._wait_s())
            for device in self._ways.keys() & ready:
                self._take_in(device)
            self._give_out()
            if _STDIN in ready and not self._obey():
                return

    def _wait_s(self) -> float | None:
        dues = [link.next_due_s for _, link in self._ways.values()]
        known = [due_s for due_s in dues if due_s is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _take_in(self, device: int) -> None:
        _, link = self._ways[device]
        for _ in range(_MAX_READS):
            try:
                packet = os.read(device, _MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if _is_ipv4(packet):
                link.admit(packet, time.monotonic())

    def _give_out(self) -> None:
        for target, link in self._ways.values():
            for packet in link.take_due(time.monotonic()):
                _write(target, packet)

    def _obey(self) -> bool:
        line = os.read(_STDIN, _MAX_PACKET_BYTES)
        if not line:
            return False
        profile, now_s = Profile(**json.loads(line)), time.monotonic()
        counts: Counter[str] = Counter()
        for _, link in self._ways.values():
            counts.update(link.change(profile, now_s))
        print(json.dumps(counts), flush=True)
        return True


def _is_ipv4(packet: bytes) -> bool:
    """Both sides speak IPv4; what the kernel says of IPv6 by itself is no traffic."""
    return packet[0] >> 4 == 4


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError as error:
        # A device that is not up yet, or a queue that is full: a network loses packets then.
        if error.errno not in (errno.EIO, errno.EAGAIN, errno.ENOBUFS):
            raise
        print(f"packet of {len(packet)} bytes not taken: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
