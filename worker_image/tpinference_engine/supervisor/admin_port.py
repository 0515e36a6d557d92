"""The admin port while no engine process answers it: always on workers, on the head after its end.

Runs in a thread, as the supervisor's own waits for signals.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

WhyNot = Callable[[], str | None]

logger = logging.getLogger(__name__)


def admin_app(why_not_ready: WhyNot, status: Callable[[], dict[str, Any]] | None) -> Starlette:
    """`/livez` is true as long as this process answers; `status` None = there is no engine here."""

    async def show_live(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def show_ready(_: Request) -> Response:
        why = why_not_ready()
        return PlainTextResponse(why or "ok", 503 if why else 200)

    routes = [Route("/livez", show_live)]
    routes += [Route(path, show_ready) for path in ("/readyz", "/health")]
    if status is not None:
        current = status

        async def show_status(_: Request) -> Response:
            return JSONResponse(current())

        routes.append(Route("/engine/status", show_status))
    return Starlette(routes=routes)


class AdminPort:
    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Bound when this returns. Raises OSError if the port is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        self.port: int = listening.getsockname()[1]
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        # Signals are the supervisor's.
        self._server.capture_signals = contextlib.nullcontext
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="admin-port", daemon=True
        )
        self._thread.start()
        logger.info("serving the admin port on %d", self.port)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
