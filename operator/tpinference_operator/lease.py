"""Only one replica writes: the holder of a coordination.k8s.io Lease.

The holder renews every `retry_s`. When the last renewal that is known to have succeeded is
`renew_deadline_s` old, for whatever reason, this process must end at once: another replica takes
over `duration_s` after it saw the last renewal, by its own clock, so clocks are never compared.
Knows nothing of what is done under the Lease.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic

from tpinference_operator.errors import ApiError, NotFound
from tpinference_operator.kube import LEASE, Body, Kube

logger = logging.getLogger(__name__)


class Clock:
    """Time as this process sees it; a test gives its own."""

    def now(self) -> float:
        return monotonic()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class LeaseLost(BaseException):
    """Not an Exception: nothing that retries may swallow it. The process ends."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """duration > renew deadline > retry, each with room for one slow request."""

    duration_s: float = 10.0
    renew_deadline_s: float = 7.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > 2 * self.retry_s > 0:
            raise ValueError(
                f"lease times: duration {self.duration_s} > renew deadline "
                f"{self.renew_deadline_s} > 2 × retry {self.retry_s} > 0 does not hold"
            )


class Lease:
    """One replica's view of the Lease."""

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes,
        clock: Clock | None = None,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times
        self._clock = clock or Clock()
        self._held = asyncio.Event()
        self._valid_until = 0.0
        self._seen: Body = {}
        self._seen_at = 0.0

    @property
    def is_held(self) -> bool:
        return self._held.is_set() and self._clock.now() < self._valid_until

    async def wait_held(self) -> None:
        await self._held.wait()

    def fence(self) -> None:
        """Before each write: a process that was stopped for a while must not go on writing."""
        if self._held.is_set() and not self.is_held:
            raise LeaseLost("the Lease ran out while this process was not running")
        if not self._held.is_set():
            raise RuntimeError("a write before the Lease is held")

    async def run(self) -> None:
        """Waits for the Lease and keeps it; LeaseLost when it can't; empties it when cancelled."""
        try:
            while not await self._attempt(self._times.renew_deadline_s / 2):
                await self._clock.sleep(self._times.retry_s)
            logger.info("holds the lease %s/%s as %s", self._namespace, self._name, self._identity)
            self._held.set()
            while True:
                await self._clock.sleep(self._times.retry_s)
                await self._renew()
        finally:
            await self._release()

    async def _renew(self) -> None:
        """Tries until it is renewed, lost for certain, or the deadline is there."""
        while (left := self._valid_until - self._clock.now()) > 0:
            if await self._attempt(min(left, self._times.renew_deadline_s / 2)):
                return
            if self._holder() not in ("", self._identity):
                raise LeaseLost(f"the Lease is now held by {self._holder()!r}")
            left = self._valid_until - self._clock.now()
            await self._clock.sleep(max(0.0, min(left, self._times.retry_s / 4)))
        raise LeaseLost(f"not renewed within {self._times.renew_deadline_s:g} s")

    async def _attempt(self, timeout_s: float) -> bool:
        """One try to take or renew. Its clock starts before it is sent: the answer may be late."""
        start = self._clock.now()
        try:
            async with asyncio.timeout(timeout_s):
                self._see(await self._get())
                if not self._may_take():
                    return False
                self._see(await self._put())
        except (ApiError, TimeoutError) as error:
            logger.warning("lease %s/%s: %r", self._namespace, self._name, error)
            return False
        self._valid_until = start + self._times.renew_deadline_s
        return True

    async def _get(self) -> Body:
        try:
            return await self._kube.get(LEASE, self._namespace, self._name)
        except NotFound:
            return {}

    async def _put(self) -> Body:
        """Raises ApiConflict or AlreadyExists when another replica was faster."""
        wanted = self._render(self._identity)
        if self._seen:
            return await self._kube.replace(LEASE, self._namespace, wanted)
        return await self._kube.create(LEASE, self._namespace, wanted)

    def _see(self, lease: Body) -> None:
        """The clock of a foreign renewal starts when it was seen: never before it was made."""
        if not self._seen or lease.get("spec") != self._seen.get("spec"):
            self._seen_at = self._clock.now()
        self._seen = lease

    def _may_take(self) -> bool:
        free = self._holder() in ("", self._identity)
        return free or self._clock.now() - self._seen_at >= self._times.duration_s

    def _holder(self) -> str:
        return str((self._seen.get("spec") or {}).get("holderIdentity") or "")

    def _render(self, holder: str) -> Body:
        old = self._seen.get("spec") or {}
        taken = old.get("holderIdentity") != holder
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._times.duration_s)),
            "acquireTime": now if taken else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + int(taken and bool(holder)),
        }
        metadata = self._seen.get("metadata") or {"name": self._name, "namespace": self._namespace}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    async def _release(self) -> None:
        """So that a successor need not wait; not when the Lease is no longer ours."""
        if not self.is_held or self._holder() != self._identity:
            return
        self._held.clear()
        try:
            async with asyncio.timeout(self._times.retry_s):
                await self._kube.replace(LEASE, self._namespace, self._render(""))
            logger.info("released the lease %s/%s", self._namespace, self._name)
        except (ApiError, TimeoutError) as error:
            logger.warning("the lease was not released: %r", error)
