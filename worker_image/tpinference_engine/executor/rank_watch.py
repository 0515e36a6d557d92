"""A thread that notices a dead rank while the engine's own thread waits for a step.

Two signs, since no one sees everything: the rank's lifeline, and Ray's word on the task that runs
the rank's part of a compiled graph. Short polls: a blocking wait would be under Ray when it is shut
down. It does not know what follows from a death.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray

from tpinference_engine.executor.lifeline import LifelineAddress, LifelineListener

_POLL_S = 0.05

logger = logging.getLogger(__name__)


class RankWatch:
    def __init__(
        self,
        host: str,
        num_ranks: int,
        on_end: Callable[[int], None],
        on_blind: Callable[[Exception], None],
    ) -> None:
        """On the watch's own thread: `on_end(rank)`, once a rank, or `on_blind(error)`, after which
        no death is noticed any more."""
        self._listener = LifelineListener(host)
        self._on_end = on_end
        self._on_blind = on_blind
        self._refs: dict[Any, int] = {}
        self._joined = frozenset(range(num_ranks))
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def address(self) -> LifelineAddress:
        return self._listener.address

    def watch_tasks(self, refs: Sequence[Any]) -> None:
        """Refs, in rank order, that get ready only when their rank has ended; they replace the ones
        before."""
        self._refs = {ref: rank for rank, ref in enumerate(refs)}

    def wait_until_all_ended(self, timeout_s: float) -> bool:
        return self._all_ended.wait(timeout_s)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            self._watch()
        # The outermost frame of the thread.
        except Exception as error:
            logger.exception("the ranks can't be watched any more")
            self._on_blind(error)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            lost = self._listener.poll(_POLL_S) + self._finished_tasks()
            for rank in lost:
                self._report(rank)
            if self._joined <= self._ended:
                self._all_ended.set()

    def _finished_tasks(self) -> list[int]:
        refs = self._refs
        if not refs:
            return []
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        if refs is not self._refs:
            return []  # Replaced meanwhile, so they may have ended with their graph.
        if ready:
            self._refs = {}
        return [refs[ref] for ref in ready]

    def _report(self, rank: int) -> None:
        if rank not in self._ended:
            self._ended.add(rank)
            self._on_end(rank)
