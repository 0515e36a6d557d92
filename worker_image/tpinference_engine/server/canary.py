"""The canary: one token through all ranks now and then, so that a hung group is seen without users.

It flips readiness and never liveness. It does not know how a token gets to the ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tpinference_engine.errors import TPInferenceError

logger = logging.getLogger(__name__)


class Canary:
    """Sends one, waits for it, rests for the interval, and counts those that failed in a row."""

    def __init__(
        self, send: Callable[[], Awaitable[None]], *, interval_s: float, failure_threshold: int
    ) -> None:
        """`send` raises if no token came back in time."""
        self._send = send
        self._interval_s = interval_s
        self._failure_threshold = failure_threshold
        self._failures = 0

    @property
    def is_fresh(self) -> bool:
        return self._failures < self._failure_threshold

    @property
    def num_failures(self) -> int:
        """In a row, up to now."""
        return self._failures

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.try_once()
            await asyncio.sleep(self._interval_s)

    async def try_once(self) -> None:
        try:
            await self._send()
        except TPInferenceError as error:
            self._failures += 1
            logger.warning("canary failed, %d in a row: %s", self._failures, error)
        else:
            self._failures = 0
