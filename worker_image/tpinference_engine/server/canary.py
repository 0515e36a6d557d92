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
        self,
        send: Callable[[float], Awaitable[None]],
        *,
        interval_s: float,
        timeout_s: float,
        failure_threshold: int,
    ) -> None:
        """`send` raises if no token came back in the time that it is given."""
        self._send = send
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._failure_threshold = failure_threshold
        self._failures = 0
        self._has_passed = False

    @property
    def is_fresh(self) -> bool:
        """Of an engine that no token has passed yet, nothing is known."""
        return self._has_passed and self._failures < self._failure_threshold

    @property
    def num_failures(self) -> int:
        """In a row, up to now."""
        return self._failures

    async def pass_first(self, timeout_s: float) -> None:
        """The one that an engine has to pass before it serves. Raises what `send` raises."""
        await self._send(timeout_s)
        self._has_passed = True

    async def run(self) -> None:
        """Those after the first, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.try_once()

    async def try_once(self) -> None:
        try:
            await self._send(self._timeout_s)
        except TPInferenceError as error:
            self._failures += 1
            logger.warning("canary failed, %d in a row: %s", self._failures, error)
        else:
            self._failures = 0
