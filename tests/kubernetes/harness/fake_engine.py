"""Engines for pods that do not exist: kwok gives pods loopback addresses, and this answers on all
of them. The product asks a pod's address as it always does; nothing in it knows of this.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

ADMIN_PORT = 8001
POD_CIDR = "127.20.0.1/16"

Answer = Callable[[str], dict[str, Any]]


def ready_status(_: str) -> dict[str, Any]:
    return {
        "engineId": "fake",
        "epoch": 0,
        "state": "ready",
        "reason": None,
        "message": None,
        "stages": [],
        "ranks": [],
        "lastFailure": None,
        "requests": {"running": 0, "waiting": 0},
        "model": {"servedNames": ["fake"], "maxModelLen": 2048},
        "cache": {"numBlocks": 1, "freeBlocks": 1},
    }


class FakeEngines:
    """`answer` gets the address that was asked and says what that engine's status is."""

    def __init__(self) -> None:
        self.answer: Answer = ready_status
        self.asked: list[str] = []
        self.drained: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    def reset(self) -> None:
        self.answer = ready_status
        self.asked.clear()
        self.drained.clear()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/engine/status", self._status)
        app.router.add_post("/drain", self._drain)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", ADMIN_PORT).start()
        return runner

    async def _status(self, request: web.Request) -> web.Response:
        address = _asked_address(request)
        self.asked.append(address)
        return web.json_response(self.answer(address))

    async def _drain(self, request: web.Request) -> web.Response:
        self.drained.append(_asked_address(request))
        return web.json_response({}, status=202)


def _asked_address(request: web.Request) -> str:
    transport = request.transport
    return str(transport.get_extra_info("sockname")[0]) if transport is not None else ""
