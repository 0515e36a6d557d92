"""Waits for a state with a deadline, instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from embedded.errors import NotReached

T = TypeVar("T")

POLL_INTERVAL_S = 0.1


def wait_for(
    what: str,
    look: Callable[[], T | None],
    *,
    timeout_s: float,
    describe: Callable[[], str] = str,
    interval_s: float = POLL_INTERVAL_S,
) -> T:
    """The first truthy answer of `look`; at the deadline, an error that ends in `describe()`."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            details = describe()
            raise NotReached(
                f"{what}: not within {timeout_s:.0f} s" + (f"\n{details}" if details else "")
            )
        time.sleep(interval_s)
