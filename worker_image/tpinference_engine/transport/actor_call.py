"""Steps by plain actor calls: about 2 ms a step instead of 0.1, and no spinning reader.

The way out if Ray drops compiled graphs, and for engines that are mostly idle. Calls to one actor
keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpinference_engine.errors import GroupFailed
from tpinference_engine.transport.ray_gather import gather


class ActorCallTransport:
    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = tuple(actors)
        self._refs: list[Any] = []

    def submit(self, payload: bytes) -> None:
        self._refs = [actor.step.remote(payload) for actor in self._actors]

    def result(self, timeout_s: float) -> list[bytes]:
        if not self._refs:
            raise GroupFailed("no step is in flight")
        refs, self._refs = self._refs, []
        answers: list[bytes] = gather(refs, timeout_s, "a step")
        return answers

    def watched_refs(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._refs = []
