"""Events about children that make no progress: where KubeRay says why, and nowhere else.

Listed only for the objects that a plan names, at most once per five seconds each; in a steady
state nobody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tpinference_operator.controller import Key
from tpinference_operator.kube import EVENT, Kube

Body = Mapping[str, Any]

MIN_INTERVAL_S = 5.0


class ChildEvents:
    """The last listing of each named object, by owner and UID."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._listed: dict[Key, dict[str, tuple[float, list[Body]]]] = {}

    def of(self, key: Key) -> tuple[Body, ...]:
        listings = self._listed.get(key, {}).values()
        return tuple(event for _, events in listings for event in events)

    async def refresh(self, key: Key, uids: Iterable[str]) -> float | None:
        """Lists for those objects and forgets all others of that owner. When to look again: at
        once when there is news, or when a listing is due that would have come too early now."""
        before = self._listed.pop(key, {})
        wanted = sorted(uids)
        if wanted:
            self._listed[key] = {uid: before[uid] for uid in wanted if uid in before}
        waits_s: list[float] = []
        for uid in wanted:
            listed_at, old = before.get(uid, (float("-inf"), []))
            due_s = listed_at + MIN_INTERVAL_S - self._clock()
            if due_s > 0:
                waits_s.append(due_s)
                continue
            events: list[Body] = list(
                await self._kube.list_by_field(EVENT, key[0], f"involvedObject.uid={uid}")
            )
            self._listed[key][uid] = (self._clock(), events)
            if _versions(events) != _versions(old):
                waits_s.append(0.0)
        return min(waits_s, default=None)

    def forget(self, key: Key) -> None:
        self._listed.pop(key, None)


def _versions(events: Iterable[Body]) -> set[tuple[str, str]]:
    return {
        (event["metadata"]["uid"], event["metadata"].get("resourceVersion", "")) for event in events
    }
