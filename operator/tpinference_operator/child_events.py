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

    async def refresh(self, key: Key, uids: Iterable[str]) -> bool:
        """Lists for those objects and forgets all others of that owner. Whether there is news."""
        before = self._listed.pop(key, {})
        wanted = sorted(uids)
        if wanted:
            self._listed[key] = {uid: before[uid] for uid in wanted if uid in before}
        news = False
        for uid in wanted:
            listed_at, old = before.get(uid, (float("-inf"), []))
            if self._clock() - listed_at < MIN_INTERVAL_S:
                continue
            events: list[Body] = list(
                await self._kube.list_by_field(EVENT, key[0], f"involvedObject.uid={uid}")
            )
            self._listed[key][uid] = (self._clock(), events)
            news = news or _versions(events) != _versions(old)
        return news

    def forget(self, key: Key) -> None:
        self._listed.pop(key, None)


def _versions(events: Iterable[Body]) -> set[tuple[str, str]]:
    return {
        (event["metadata"]["uid"], event["metadata"].get("resourceVersion", "")) for event in events
    }
