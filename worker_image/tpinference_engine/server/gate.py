"""Admission: how many requests are inside, and whether more may come.

Bounded, so that a burst is refused and not queued without end. A choice counts as a request. It
knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tpinference_engine.errors import EngineBusy, EngineStopped


class Gate:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._inside = 0
        self._closed: str | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_inside(self) -> int:
        return self._inside

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def close(self, reason: str) -> None:
        """Nobody enters from now on; who is inside stays. The first reason is the one told."""
        self._closed = self._closed or reason

    def check_room(self, num_requests: int = 1) -> None:
        """Raises what `admit` would raise; asked before a body is read, for nothing."""
        if self._closed is not None:
            raise EngineStopped(self._closed)
        if self._inside + num_requests > self._max_requests:
            raise EngineBusy(
                f"{self._inside} requests are running or waiting, {num_requests} more would exceed "
                f"the limit of {self._max_requests}"
            )

    @contextmanager
    def admit(self, num_requests: int) -> Iterator[None]:
        self.check_room(num_requests)
        self._inside += num_requests
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= num_requests
            if self._inside == 0:
                self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()
