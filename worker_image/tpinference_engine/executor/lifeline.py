"""A TCP connection from every rank to the engine core: who loses it knows that the peer is gone.

The kernel does the work. It closes the connection of a killed process at once, and its keepalive
probes notice a node that fell silent after three seconds; neither needs the peer's interpreter, so
a rank that loads weights or holds the interpreter lock is not taken for dead. A process that is
merely stopped is not either: that is the step timeout's to find. It does not know Ray, so it also
sees what Ray reports late or not at all.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SILENCE_S = 3
_HELLO_TIMEOUT_S = 1.0
EXIT_CODE_ALONE = 75
"""Of a rank that ends because the engine core has."""
_TOKEN_BYTES = 16
_HELLO_BYTES = 2 * _TOKEN_BYTES + 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LifelineAddress:
    host: str
    port: int
    token: str
    """Only ranks of this group are listened to."""


class LifelineListener:
    """The engine core's end. `poll` belongs to one thread."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._rank_of: dict[socket.socket, int] = {}
        port = int(self._server.getsockname()[1])
        self.address = LifelineAddress(host, port, secrets.token_hex(_TOKEN_BYTES))

    def poll(self, timeout_s: float) -> list[int]:
        """Ranks whose connection ended since the last call, in the order it was noticed."""
        lost: list[int] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and _has_ended(key.fileobj):
                lost.append(self._forget(key.fileobj))
        return lost

    def close(self) -> None:
        for connection in list(self._rank_of):
            self._forget(connection)
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        connection, peer = self._server.accept()
        rank = self._read_hello(connection)
        if rank is None:
            logger.warning("refused a lifeline from %s: not a rank of this group", peer[0])
            connection.close()
            return
        _keep_alive(connection)
        connection.setblocking(False)
        self._rank_of[connection] = rank
        self._selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, connection: socket.socket) -> int | None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            hello = connection.recv(_HELLO_BYTES, socket.MSG_WAITALL).decode("ascii", "replace")
        except OSError:
            return None
        token, number = hello[: 2 * _TOKEN_BYTES], hello[2 * _TOKEN_BYTES :]
        known = hmac.compare_digest(token.encode(), self.address.token.encode())
        return int(number) if known and number.isdecimal() else None

    def _forget(self, connection: socket.socket) -> int:
        self._selector.unregister(connection)
        connection.close()
        return self._rank_of.pop(connection)


def hold_lifeline(
    address: LifelineAddress, rank: int, on_lost: Callable[[], None] | None = None
) -> None:
    """The rank's end: connects now, and ends this process when the engine core is gone."""
    connection = socket.create_connection((address.host, address.port), timeout=_HELLO_TIMEOUT_S)
    _keep_alive(connection)
    connection.sendall(f"{address.token}{rank:08d}".encode())
    connection.settimeout(None)
    threading.Thread(
        target=_wait_for_the_end,
        args=(connection, on_lost or _end_process),
        name="lifeline",
        daemon=True,
    ).start()


def _wait_for_the_end(connection: socket.socket, on_lost: Callable[[], None]) -> None:
    with connection:
        while not _has_ended(connection):
            pass
    on_lost()


def _end_process() -> None:
    # At once and without clean-up: the device, the store and the peers' collectives go with it, and
    # clean-up could wait for a peer that is gone too.
    os.write(2, f"{time.strftime('%F %T')} the engine core is gone, this rank ends\n".encode())
    os._exit(EXIT_CODE_ALONE)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(64)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
