"""The work queue: which TPInference is reconciled when, never the same one twice at once.

A key is `(namespace, name)`. A key that is queued is not queued again; one that changes while it is
worked on is queued once more afterwards. Failures back off per key, and only a new generation of
the object itself cuts that short: events about children would else make a storm of a failure.
Workers wait for the Lease and for complete indexes. Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tpinference_operator.errors import ApiConflict, ApiError

logger = logging.getLogger(__name__)

Key = tuple[str, str]

MAX_RETRY_AFTER_S = 60.0
"""What a server may ask for at most."""

K = TypeVar("K")


class HasLease(Protocol):
    async def wait_held(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles with each failure in a row."""

    first_s: float = 0.5
    max_s: float = 60.0

    def delay_s(self, num_failures: int) -> float:
        return float(min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 30)))


class WorkQueue(Generic[K]):
    """Keys to work on: deduplicated, one worker a key, with delays."""

    def __init__(self) -> None:
        self._ready: deque[K] = deque()
        self._queued: set[K] = set()
        self._working: set[K] = set()
        self._dirty: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        if key in self._working:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """The earliest of the delays asked for counts."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, delay_s)
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._fire, key)

    async def take(self) -> K:
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        key = self._ready.popleft()
        self._queued.remove(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        self._working.remove(key)
        if key in self._dirty:
            self._dirty.remove(key)
            self.add(key)

    def drop_dirty(self, key: K) -> None:
        """What came while it was worked on is left to a timer."""
        self._dirty.discard(key)

    def is_idle(self) -> bool:
        return not self._ready and not self._working

    def __len__(self) -> int:
        return len(self._ready)

    def _fire(self, key: K) -> None:
        del self._timers[key]
        self.add(key)


class Controller:
    """Runs `reconcile(key)` for every key that is enqueued; it returns when to look again."""

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[float | None]],
        *,
        known_keys: Callable[[], Iterable[Key]],
        wait_indexed: Callable[[], Awaitable[None]],
        resync_s: float,
        num_workers: int,
        backoff: Backoff = Backoff(),
    ) -> None:
        self._reconcile = reconcile
        self._known_keys = known_keys
        self._wait_indexed = wait_indexed
        self._resync_s = resync_s
        self._num_workers = num_workers
        self._backoff = backoff
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}
        self._generations: dict[Key, int] = {}
        self.queue: WorkQueue[Key] = WorkQueue()

    def enqueue(self, key: Key) -> None:
        """Something of it changed. While it backs off, the timer that runs is soon enough."""
        left_s = self._not_before.get(key, 0.0) - asyncio.get_running_loop().time()
        if left_s > 0:
            self.queue.add_after(key, left_s)
        else:
            self.queue.add(key)

    def enqueue_owner(self, key: Key, generation: int) -> None:
        """The object itself changed: a new generation may be what ends a failure."""
        if self._generations.get(key) != generation:
            self._generations[key] = generation
            self._forget_failures(key)
        self.enqueue(key)

    def enqueue_gone(self, key: Key) -> None:
        self._generations.pop(key, None)
        self._forget_failures(key)
        self.enqueue(key)

    async def run(self, lease: HasLease) -> None:
        """Until cancelled. All its tasks are made at once, before the Lease is held: kopf, when it
        stops, cancels every task that is younger than itself."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._num_workers):
                tasks.create_task(self._work(lease), name=f"worker {number}")
            tasks.create_task(self._resync(), name="resync")

    async def _work(self, lease: HasLease) -> None:
        await lease.wait_held()
        while True:
            key = await self.queue.take()
            try:
                await self._wait_indexed()
                await self._work_on(key)
            finally:
                self.queue.done(key)

    async def _work_on(self, key: Key) -> None:
        generation = self._generations.get(key)
        try:
            again_in_s = await self._reconcile(key)
        except Exception as error:
            # The outermost frame of one object's work: its failure must not stop the others'.
            self._fail(key, error, is_current=self._generations.get(key) == generation)
        else:
            self._forget_failures(key)
            if again_in_s is not None:
                self.queue.add_after(key, again_in_s)

    def _fail(self, key: Key, error: Exception, *, is_current: bool) -> None:
        num_failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = self._backoff.delay_s(num_failures)
        if isinstance(error, ApiError):
            delay_s = max(delay_s, min(error.retry_after_s, MAX_RETRY_AFTER_S))
        self.queue.add_after(key, delay_s)
        where = "/".join(key)
        if isinstance(error, ApiConflict):
            # The newer version is about to come as an event, and that one is not held back.
            logger.info("%s: changed while it was worked on, again in %.1f s", where, delay_s)
            return
        if is_current:
            self._not_before[key] = asyncio.get_running_loop().time() + delay_s
            self.queue.drop_dirty(key)
        if isinstance(error, ApiError):
            logger.warning("%s: %s; again in %.1f s", where, error, delay_s)
        else:
            logger.error("%s: failed; again in %.1f s", where, delay_s, exc_info=error)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._resync_s)
            for key in list(self._known_keys()):
                self.enqueue(key)

    def _forget_failures(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
