"""How long after the cluster or an engine first said something a condition says it too.

That time is what the operator answers for; how long the cluster takes to find out is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from embedded.wait import wait_for

T = TypeVar("T")

PROMISE_S = 10.0


class LagMeter:
    """Measures, prints and checks. `uncaptured`: a context in which print reaches the terminal."""

    def __init__(self, uncaptured: Callable[[], AbstractContextManager[None]]) -> None:
        self._uncaptured = uncaptured

    def __call__(
        self,
        what: str,
        *,
        sign: Callable[[], object],
        told: Callable[[], T | None],
        timeout_s: float,
        describe: Callable[[], str] = str,
    ) -> T:
        """What `told` answers first. `sign` is true from the moment that the fact can be read from
        the cluster or the engine; both are asked in turn."""
        started = time.monotonic()
        # The last moment at which there was no sign: what comes out is rather too long.
        unsaid = started
        said = False

        def look() -> T | None:
            nonlocal unsaid, said
            # In this order: a condition that is first would be of something else.
            found = told()
            if not said:
                asked = time.monotonic()
                said = bool(sign())
                unsaid = unsaid if said else asked
            return found

        found = wait_for(what, look, timeout_s=timeout_s, describe=describe)
        lag_s = time.monotonic() - unsaid
        assert said, f"{what}: told {found!r}, but nobody said so"
        with self._uncaptured():
            before_s = unsaid - started
            print(f"\n{what}: {lag_s:.1f} s from the first sign, which took {before_s:.1f} s")
        assert lag_s <= PROMISE_S, f"{what}: {lag_s:.1f} s from the first sign\n{describe()}"
        return found
