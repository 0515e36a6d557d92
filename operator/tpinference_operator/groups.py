"""Pairs what was recorded about each group with what is seen of it. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpinference_operator import names
from tpinference_operator.api.status import GroupStatus, LastFailure
from tpinference_operator.observe import parse_time
from tpinference_operator.observed import (
    Observed,
    SeenEngine,
    SeenPod,
    SeenRayCluster,
)

FLAP = timedelta(minutes=1)
"""Longer than that, an unready head is not about to come back."""
MAX_RESTARTS = 5
RESTART_WINDOW = timedelta(hours=1)
BACKOFF = timedelta(seconds=10)
MAX_BACKOFF = timedelta(seconds=300)
QUOTA_BACKOFF = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group: its record, and of its present incarnation what exists."""

    record: GroupStatus
    cluster: SeenRayCluster | None
    older: tuple[SeenRayCluster, ...]
    """RayClusters of this ordinal that are not the recorded incarnation."""
    head: SeenPod | None
    """The live head pod."""
    lost_head: SeenPod | None
    workers: tuple[SeenPod, ...]
    """Live worker pods."""
    lost_workers: tuple[SeenPod, ...]
    leftovers: tuple[SeenPod, ...]
    """Pods of this ordinal that are not the present RayCluster's: they still hold their room."""
    engine: SeenEngine | None

    @property
    def ordinal(self) -> int:
        return self.record.ordinal

    @property
    def ready(self) -> bool:
        """By the pods alone. RayCluster states lie, and a failed fetch of the engine's status says
        nothing."""
        return (
            self.cluster is not None
            and not self.cluster.meta.deleting
            and self.head is not None
            and self.head.ready
            and self.head.traffic == names.TRAFFIC_ON
            and self.record.drain_started_at is None
            and self.all_running
        )

    @property
    def all_running(self) -> bool:
        running = [pod for pod in self.pods if pod.phase == "Running"]
        return self.cluster is not None and len(running) > self.cluster.num_hosts

    @property
    def pods(self) -> tuple[SeenPod, ...]:
        return ((self.head,) if self.head else ()) + self.workers

    def unready_for_long(self, now: datetime) -> bool:
        """It answers nobody, and not for a moment only: a readiness probe may fail once."""
        if self.head is None or self.cluster is None or self.cluster.meta.deleting:
            return True
        return not self.head.ready and now - self.head.ready_changed > FLAP

    @property
    def lost_pods(self) -> tuple[SeenPod, ...]:
        """Of this incarnation, those that ended or are going; KubeRay makes others."""
        return ((self.lost_head,) if self.lost_head else ()) + self.lost_workers

    @property
    def recorded_failure(self) -> LastFailure | None:
        """The last one of this incarnation; the record may still tell why it was made."""
        last = self.record.last_failure
        return last if last is not None and last.epoch == self.record.epoch else None

    @property
    def provisioned_once(self) -> bool:
        """From then on KubeRay makes no new head (our annotation). This latch is the one thing
        that Provisioned is good for."""
        return self.record.ready or (
            self.cluster is not None
            and any(
                c.type == "RayClusterProvisioned" and c.status == "True"
                for c in self.cluster.conditions
            )
        )


def pair_groups(observed: Observed) -> tuple[Group, ...]:
    """By ordinal. A RayCluster that is newer than its record, or has none, means that the status
    was lost: then its labels are the record."""
    mine = [c for c in observed.ray_clusters if c.meta.mine]
    records = {r.ordinal: r for r in sorted(observed.tpi.status.groups, key=lambda r: r.epoch)}
    for cluster in mine:
        record = records.get(cluster.ordinal)
        if record is None or cluster.epoch > record.epoch:
            records[cluster.ordinal] = _record_of(cluster)
    return tuple(_pair(records[ordinal], mine, observed) for ordinal in sorted(records))


def highest_epoch(observed: Observed) -> int:
    """Of all that was ever given, as far as it can be known."""
    status = observed.tpi.status
    return max(
        status.epoch,
        *(record.epoch for record in status.groups),
        *(cluster.epoch for cluster in observed.ray_clusters if cluster.meta.mine),
        0,
    )


def recent_restarts(record: GroupStatus, now: datetime) -> list[str]:
    return [text for text in record.recent_restarts if now - parse_time(text) < RESTART_WINDOW]


def budget_spent(record: GroupStatus, now: datetime) -> bool:
    return len(recent_restarts(record, now)) >= MAX_RESTARTS


def budget_back_at(record: GroupStatus, now: datetime) -> datetime:
    """Before: the budget is spent. When so few restarts lie within the window that one is free."""
    return parse_time(recent_restarts(record, now)[-MAX_RESTARTS]) + RESTART_WINDOW


def backoff_left_s(record: GroupStatus, now: datetime, *, quota: bool) -> float:
    """How long the next incarnation must still wait. The first restart within the window is
    immediate; then the wait doubles."""
    if quota and record.last_failure and record.last_failure.time:
        until = parse_time(record.last_failure.time) + QUOTA_BACKOFF
        return max(0.0, (until - now).total_seconds())
    recent = recent_restarts(record, now)
    if len(recent) < 2:
        return 0.0
    wait = min(BACKOFF * (1 << (len(recent) - 2)), MAX_BACKOFF)
    return max(0.0, (parse_time(recent[-1]) + wait - now).total_seconds())


def _record_of(cluster: SeenRayCluster) -> GroupStatus:
    return GroupStatus(
        name=cluster.meta.name,
        ordinal=cluster.ordinal,
        revision=cluster.revision,
        epoch=cluster.epoch,
        uid=cluster.meta.uid,
    )


def _pair(record: GroupStatus, clusters: Iterable[SeenRayCluster], observed: Observed) -> Group:
    of_ordinal = [c for c in clusters if c.ordinal == record.ordinal]
    same = [c for c in of_ordinal if c.epoch == record.epoch]
    cluster = next((c for c in same if c.meta.name == record.name), next(iter(same), None))
    pods = [p for p in observed.pods if cluster and p.cluster_uid == cluster.meta.uid]
    heads = [p for p in pods if p.role == names.ROLE_HEAD]
    workers = [p for p in pods if p.role == names.ROLE_WORKER]
    head = next((p for p in heads if not p.lost), None)
    return Group(
        record=record,
        cluster=cluster,
        older=tuple(c for c in of_ordinal if c is not cluster),
        head=head,
        lost_head=next((p for p in heads if p.lost), None),
        workers=tuple(p for p in workers if not p.lost),
        lost_workers=tuple(p for p in workers if p.lost),
        leftovers=tuple(
            p
            for p in observed.pods
            if p.ordinal == record.ordinal and p not in pods and p.epoch <= record.epoch
        ),
        engine=observed.engines.get(head.meta.uid) if head else None,
    )
