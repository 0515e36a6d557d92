"""A port with an application behind it: reserved early, served when there is something to serve.

uvicorn does the HTTP. It would take over the process's signals, which belong to `app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from tpinference_engine.errors import InvalidConfig

LAST_WORDS_S = 1
"""For answers that are being written when a port closes."""


def reserve_port(name: str, host: str, port: int) -> socket.socket:
    """Bound and not listening: clients are refused, and so is another server on this port.

    So a port that is taken is found at once, and not after the model was loaded.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfig(f"host is {host!r}, which is no address here: {error}") from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise InvalidConfig(
            f"{name} is {port!r}, which can't be bound on {host!r}: {error.strerror}"
        ) from error
    return reserved


class Listener:
    """Serves `app` on a reserved port from construction until `close`."""

    def __init__(self, app: ASGIApp, reserved: socket.socket, *, access_log: bool) -> None:
        self.port: int = reserved.getsockname()[1]
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext
        # From here connections wait in the backlog, even before uvicorn's task first runs.
        reserved.listen(config.backlog)
        self._task = asyncio.create_task(self._server.serve(sockets=[reserved]))

    async def close(self) -> None:
        """No new connections; open answers get a moment to end."""
        self._server.should_exit = True
        await self._task
