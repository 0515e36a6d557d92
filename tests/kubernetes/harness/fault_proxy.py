"""A proxy between an operator and the API server that counts, cuts and lies, as a test asks.

Plain HTTP towards the operator, TLS towards the API server, both on loopback. It runs on a thread
of its own, so that tests can be plain functions. Knows nothing of TPInference.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

T = TypeVar("T")

HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "upgrade"}
WRITE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True)
class Seen:
    """One request that came."""

    client: str
    method: str
    path: str
    query: dict[str, str]
    at: float
    status: int = 0

    @property
    def is_watch(self) -> bool:
        return "watch" in self.query

    @property
    def is_write(self) -> bool:
        return self.method in WRITE_METHODS

    @property
    def is_lease(self) -> bool:
        return "/leases" in self.path

    @property
    def is_discovery(self) -> bool:
        return "/namespaces/" not in self.path and self.path.startswith(("/api", "/openapi"))

    def __str__(self) -> str:
        return f"{self.method} {self.path} -> {self.status}"


@dataclass(frozen=True)
class Fault:
    """What to do to requests that match, `times` times: refuse them with `status`, or one of the
    other three, after `delay_s`."""

    matches: Callable[[Seen], bool]
    status: int = 503
    reason: str = "ServiceUnavailable"
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    only_delay: bool = False
    lose_answer: bool = False
    """It is carried out, and the connection breaks before the answer comes."""
    expire_watch: bool = False
    """The stream says, as the API server does, that its resourceVersion is too old."""
    times: int = 1_000_000


class FaultProxy:
    """One listener a client name: a request's `client` says which operator sent it."""

    def __init__(self, api_url: str, ca_file: Path) -> None:
        self._api_url = api_url
        self._ssl = ssl.create_default_context(cafile=str(ca_file))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._seen: list[Seen] = []
        self._faults: list[tuple[Fault, list[int]]] = []
        self._streams: set[web.StreamResponse] = set()
        self._on_write: Callable[[Seen], None] | None = None
        self._runners: list[web.AppRunner] = []
        self._thread.start()
        self._session = self._call(self._open_session())

    def listen(self, client: str) -> str:
        """A URL that stands for the API server."""
        return self._call(self._listen(client))

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def inject(self, fault: Fault) -> None:
        self._faults.append((fault, [fault.times]))

    def heal(self) -> None:
        self._faults.clear()
        self._on_write = None

    def forget(self) -> None:
        """What came so far."""
        self._seen.clear()

    def kill_after_write(self, number: int, kill: Callable[[], None]) -> None:
        """`kill` is called when the n-th write (the Lease and Events not counted) was carried out,
        before its answer goes back."""
        left = [number]

        def on_write(_: Seen) -> None:
            left[0] -= 1
            if left[0] == 0:
                kill()

        self._on_write = on_write

    def cut_watches(self) -> None:
        """Ends every open stream in the middle of a line, as a broken connection does."""
        self._call(self._cut())

    def mark(self) -> int:
        return len(self._seen)

    def since(self, mark: int, client: str | None = None) -> list[Seen]:
        return [seen for seen in self._seen[mark:] if client in (None, seen.client)]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
        return aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def _listen(self, client: str) -> str:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(client, request)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _close(self) -> None:
        await self._cut()
        for runner in self._runners:
            await runner.cleanup()
        await self._session.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Closed transports let go of their sockets in the next turns of the loop.
        for _ in range(10):
            await asyncio.sleep(0)

    async def _cut(self) -> None:
        for stream in list(self._streams):
            request = getattr(stream, "_req", None)
            if request is not None and request.transport is not None:
                request.transport.abort()

    async def _handle(self, client: str, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        seen = Seen(client, request.method, request.path, query, time.monotonic())
        fault = self._next_fault(seen)
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if not (fault.only_delay or fault.lose_answer):
                return self._refuse(seen, fault)
        answer = await self._forward(seen, request)
        if fault is not None and fault.lose_answer and request.transport is not None:
            request.transport.abort()
        return answer

    async def _forward(self, seen: Seen, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        async with self._session.request(
            request.method,
            f"{self._api_url}{request.path_qs}",
            headers=headers,
            data=await request.read() or None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            skip_auto_headers=("Content-Type", "User-Agent", "Accept"),
        ) as answer:
            if seen.is_watch and answer.status == 200:
                self._note(seen, answer.status)
                return await self._stream(request, answer)
            body = await answer.read()
            self._note(seen, answer.status)
            self._tell(seen, answer.status)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            return web.Response(status=answer.status, body=body, headers=kept)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": answer.content_type})
        await stream.prepare(request)
        self._streams.add(stream)
        try:
            async for chunk in answer.content.iter_any():
                await stream.write(chunk)
        except (aiohttp.ClientError, ConnectionError):
            # Either side went away: so does the stream.
            return stream
        finally:
            self._streams.discard(stream)
        return stream

    def _next_fault(self, seen: Seen) -> Fault | None:
        for fault, left in self._faults:
            if left[0] > 0 and fault.matches(seen):
                left[0] -= 1
                return fault
        return None

    def _refuse(self, seen: Seen, fault: Fault) -> web.Response:
        status = 410 if fault.expire_watch else fault.status
        self._note(seen, status)
        said = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": f"injected {fault.reason}",
            "reason": fault.reason,
            "code": status,
        }
        headers = {"Content-Type": "application/json", **fault.headers}
        if fault.expire_watch:
            line = json.dumps({"type": "ERROR", "object": said}) + "\n"
            return web.Response(status=200, text=line, headers=headers)
        return web.Response(status=status, text=json.dumps(said), headers=headers)

    def _note(self, seen: Seen, status: int) -> None:
        noted = Seen(seen.client, seen.method, seen.path, seen.query, seen.at, status)
        self._seen.append(noted)

    def _tell(self, seen: Seen, status: int) -> None:
        counts = seen.is_write and not seen.is_lease and not seen.path.endswith("/events")
        if counts and status < 400 and self._on_write is not None:
            self._on_write(seen)
