"""One look at one TPInference: observe, plan, apply, status. The deciding is done elsewhere.

Whatever woke it, the same happens. It returns when to look again if nothing happens before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tpinference_operator import cache as views
from tpinference_operator.actions import DeleteChild, Plan
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.apply import Applier, PlanAgain
from tpinference_operator.cache import Cache
from tpinference_operator.child_events import ChildEvents
from tpinference_operator.controller import Key
from tpinference_operator.discovery import Discovery
from tpinference_operator.engine_client import EngineWatch
from tpinference_operator.errors import InvalidSpec, NamespaceEnding
from tpinference_operator.events import EventPoster, Note, transitions
from tpinference_operator.kube import TPINFERENCE_STATUS, Kube
from tpinference_operator.metrics import Metrics
from tpinference_operator.observe import observe, parse_status
from tpinference_operator.observed import Children, Observed
from tpinference_operator.plan import Defaults, plan
from tpinference_operator.status import compute_status, status_of_invalid_spec, urgent

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

MIN_STATUS_INTERVAL_S = 2.0
AGAIN_S = 0.05
"""After a plan that stood on an old view: the new one is at hand."""


class StatusWriter:
    """Writes a status on change only; what is not urgent waits for two seconds to pass."""

    def __init__(self, kube: Kube, cache: Cache, events: EventPoster, metrics: Metrics) -> None:
        self._kube = kube
        self._cache = cache
        self._events = events
        self._metrics = metrics
        self._written_at: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        self._written_at.pop(key, None)

    async def write(self, key: Key, owner: Body, new: TPInferenceStatus) -> None:
        """Now. Raises ApiConflict when the object changed since `owner` was read."""
        old = parse_status(owner.get("status"))
        if new == old and owner.get("status"):
            return
        body = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "metadata": owner["metadata"],
            "spec": owner.get("spec") or {},
            "status": new.to_raw(),
        }
        written = await self._kube.replace(TPINFERENCE_STATUS, key[0], body)
        self._written_at[key] = time.monotonic()
        self._cache.wrote(views.OWNERS, key, written)
        self._metrics.on_status(key, new)
        self._events.post(owner, transitions(old.conditions, new.conditions))

    async def write_soon(self, key: Key, owner: Body, new: TPInferenceStatus) -> float | None:
        """Now if a condition flipped or the last write is old enough; else, when to try again."""
        old = parse_status(owner.get("status"))
        waited_s = time.monotonic() - self._written_at.get(key, float("-inf"))
        if new != old and not urgent(old, new) and waited_s < MIN_STATUS_INTERVAL_S:
            return MIN_STATUS_INTERVAL_S - waited_s
        await self.write(key, owner, new)
        return None


@dataclass(frozen=True, kw_only=True)
class Reconciler:
    """What one look needs. `__call__` is the controller's reconcile."""

    cache: Cache
    applier: Applier
    engines: EngineWatch
    discovery: Discovery
    child_events: ChildEvents
    statuses: StatusWriter
    events: EventPoster
    metrics: Metrics
    defaults: Defaults

    async def __call__(self, key: Key) -> float | None:
        with self.metrics.reconcile_seconds.time():
            try:
                return await self._reconcile(key)
            except PlanAgain as reason:
                logger.info("%s/%s: plans again: %s", *key, reason)
                return AGAIN_S
            except NamespaceEnding as reason:
                # The object goes next, and that comes as an event.
                logger.info("%s/%s: nothing more to do: %s", *key, reason)
                return None
            except Exception as error:
                self.metrics.reconcile_errors.labels(type(error).__name__).inc()
                raise

    async def _reconcile(self, key: Key) -> float | None:
        owner = self.cache.owner(key)
        if owner is None:
            self._forget(key)
            return None
        try:
            observed = self._observe(key, owner)
        except InvalidSpec as error:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await self.statuses.write(key, owner, status_of_invalid_spec(owner, error, now=now))
            return None
        if observed.tpi.deleting:
            return None
        return await self._act(key, owner, observed)

    async def _act(self, key: Key, owner: Body, observed: Observed) -> float | None:
        decided = plan(observed, self.defaults)
        status = compute_status(observed, decided)

        async def record() -> None:
            await self.statuses.write(key, owner, status)

        await self.applier.carry_out(key, decided.actions, record)
        self._tell_deletes(owner, decided)
        # RecordStatus may have written it: then the cache has the answer, and nothing differs.
        newest = self.cache.owner(key) or owner
        later_s = await self.statuses.write_soon(key, newest, status)
        events_s = await self.child_events.refresh(key, decided.watch_events_of)
        return self._next_look_s(decided, later_s, events_s)

    def _next_look_s(
        self, decided: Plan, later_s: float | None, events_s: float | None
    ) -> float | None:
        wake_s = decided.wake_after_s
        if decided.refresh_engines:
            asked = self.engines.refresh(decided.refresh_engines, wake_s or 1.0)
            # The engines' answers wake us, so that the next plan has them.
            wake_s = None if asked else wake_s
        times = [max(s, AGAIN_S) for s in (wake_s, later_s, events_s) if s is not None]
        return min(times, default=None)

    def _observe(self, key: Key, owner: Body) -> Observed:
        def children(plural: str) -> tuple[Body, ...]:
            return tuple(self.cache.children(plural, key))

        self.cache.begin_look(key)
        pods = children(views.PODS)
        return observe(
            owner,
            Children(
                ray_clusters=children(views.RAYCLUSTERS),
                pods=pods,
                services=children(views.SERVICES),
                revisions=children(views.REVISIONS),
                events=self.child_events.of(key),
                engines=self.engines.answers(pods),
            ),
            kuberay=self.discovery.kuberay,
            now=datetime.now(UTC),
        )

    def _tell_deletes(self, owner: Body, decided: Plan) -> None:
        notes = [
            Note(warning=False, reason="Deleted", message=f"{a.kind.value} {a.name}: {a.why}")
            for a in decided.actions
            if isinstance(a, DeleteChild)
        ]
        self.events.post(owner, notes)

    def _forget(self, key: Key) -> None:
        self.statuses.forget(key)
        self.child_events.forget(key)
        self.metrics.forget(key)
