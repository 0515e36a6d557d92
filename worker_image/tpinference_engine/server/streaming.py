"""Server-sent events, and the watch over the client: who leaves aborts what runs for him.

Plain ASGI on purpose: a middleware between connection and handler hides the client's leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

Work = Callable[[Send], Coroutine[Any, Any, None]]
"""Answers one call on the `send` that it is given."""

DONE = b"data: [DONE]\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(body: dict[str, Any]) -> bytes:
    """JSON escapes line ends, so an event is always one line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def send_events(events: AsyncIterator[bytes], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
    async for data in events:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, send: Send, work: Work) -> None:
    """Carries `work` out. Cancels it and raises ClientDisconnect as soon as the client has gone.

    The body was read before. A server also says "disconnect" after an answer is complete.
    """
    answered = False

    async def tracked_send(message: Message) -> None:
        nonlocal answered
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        answered = answered or last
        await send(message)

    working = asyncio.create_task(work(tracked_send))
    leaving = asyncio.create_task(_client_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or answered:
            return await working
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
