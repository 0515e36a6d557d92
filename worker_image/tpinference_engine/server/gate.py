"""Admission: how many requests are inside, and whether more may come.

Bounded, so that a burst is refused and not queued without end. A choice counts as a request. It
knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpinference_engine.errors import EngineBusy, EngineStopped, RequestRefused


class Admission:
    """Room inside, held by one call until it is answered."""

    def __init__(self, enter: Callable[[int], None], max_requests: int) -> None:
        self._enter = enter
        self._max_requests = max_requests
        self.num_requests = 0

    def widen_to(self, num_requests: int) -> None:
        """Raises EngineBusy and takes nothing more if so many do not fit now, or RequestRefused if
        they never will."""
        if num_requests > self._max_requests:
            raise RequestRefused(
                f"{num_requests} choices are asked for in one call, must be at most "
                f"{self._max_requests}, the requests that may be running and waiting together",
                param="n",
                code="invalid_value",
            )
        self._enter(num_requests - self.num_requests)
        self.num_requests = num_requests


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

    @contextmanager
    def admit(self) -> Iterator[Admission]:
        """A call enters as one request, since its body tells later how many it is."""
        if self._closed is not None:
            raise EngineStopped(self._closed)
        admission = Admission(self._enter, self._max_requests)
        admission.widen_to(1)
        try:
            yield admission
        finally:
            self._leave(admission.num_requests)

    def _enter(self, num_requests: int) -> None:
        if self._inside + num_requests > self._max_requests:
            raise EngineBusy(
                f"{self._inside} requests are running or waiting, {num_requests} more would exceed "
                f"the limit of {self._max_requests}"
            )
        self._inside += num_requests
        self._empty.clear()

    def _leave(self, num_requests: int) -> None:
        self._inside -= num_requests
        if self._inside == 0:
            self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()
