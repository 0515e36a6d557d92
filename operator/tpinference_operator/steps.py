"""What becomes of one group: kept, restarted, drained, replaced or removed. Pure.

Every way to a new incarnation is the same: record the next epoch, delete the old RayCluster, wait
until it is gone, create.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpinference_operator import names
from tpinference_operator.actions import (
    Action,
    ChildKind,
    CreateChild,
    DeleteChild,
    DrainEngine,
    PatchPodLabel,
)
from tpinference_operator.api.reasons import RESTARTABLE, Reason
from tpinference_operator.api.status import (
    MAX_MESSAGE,
    MAX_RECENT_RESTARTS,
    GroupStatus,
    LastFailure,
)
from tpinference_operator.groups import Group, backoff_left_s, budget_spent, recent_restarts
from tpinference_operator.observe import format_time, parse_time
from tpinference_operator.observed import SeenPod
from tpinference_operator.render.compare import first_difference
from tpinference_operator.render.raycluster import Owner, Stamp, group_name, stamp_raycluster
from tpinference_operator.revision import Revision

GONE_WAIT_S = 5.0
"""Deletions come as events; this is for one that was missed."""
PODS_END = timedelta(seconds=30)
"""Pods whose engine has drained end in a few seconds."""
DRAIN_LOOK_S = 1.0
DRAIN_SETTLE_S = 2.0
"""Until every kube-proxy has heard that the head takes no more requests; only then is its engine
told, because from then on it refuses them."""
DRAIN_IDLE_S = 2.0
"""For requests that are on their way, and answers that are being read."""
NO_PROGRESS_S = 5.0
"""After that long without progress, Events are listed: some refusals are told nowhere else."""
UNTOLD_LOOK_S = 5.0
"""While something may go wrong that no watch tells: an engine that never was ready fails, a volume
can't be mounted. Everything is to be in a condition within ten seconds."""
QUOTA_WORDS = "exceeded quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What all groups of one plan share."""

    now: datetime
    owner: Owner
    drain_seconds: int
    target: Revision
    """What every new incarnation is made from."""
    stored: Mapping[str, Revision]
    """What present ones were made from, by hash8."""
    next_epoch: Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next move of one group."""

    record: GroupStatus | None
    """As it is to be recorded; None = the group is over."""
    first: tuple[Action, ...] = ()
    """Before the record is written, because they need what the old one says."""
    actions: tuple[Action, ...] = ()
    wake_after_s: float | None = None
    refresh_engines: frozenset[str] = frozenset()
    watch_events_of: frozenset[str] = frozenset()


def new_group(ordinal: int, context: Context) -> Step:
    record = _incarnate(ordinal, context)
    return Step(record=record, actions=(_create(record, context),))


def step_of(group: Group, context: Context, *, remove: bool, replace: bool) -> Step:
    """Before: `remove` and `replace` are not both True."""
    if remove:
        return _drain(group, context) or _remove(group, context)
    if replace or group.record.drain_started_at is not None:
        return _drain(group, context) or _replace(group, context)
    failure = _failure(group, context)
    if failure:
        return _restart(group, context, failure)
    if group.cluster is None:
        return _begin(group, group.record, context, why="of an older epoch")
    return _watch(group, context)


def _remove(group: Group, context: Context) -> Step:
    clusters = (*group.older, *((group.cluster,) if group.cluster else ()))
    if not clusters:
        return Step(record=None, first=_delete_unseen(group))
    return Step(
        record=group.record,
        actions=_deletes(group, "scaled down", all_of_it=True),
        wake_after_s=GONE_WAIT_S,
    )


def _replace(group: Group, context: Context) -> Step:
    """A new revision starts with a clean record: the old one's failures are of no interest."""
    record = _incarnate(group.ordinal, context)
    if group.record.revision == context.target.hash8:
        record = record.model_copy(
            update={
                "restarts": group.record.restarts,
                "recent_restarts": group.record.recent_restarts,
                "last_failure": group.record.last_failure,
            }
        )
    why = f"replaced by one of revision {context.target.hash8}"
    return _begin(group, record, context, why=why)


def _restart(group: Group, context: Context, failure: LastFailure) -> Step:
    quota = failure.reason == Reason.QUOTA_EXCEEDED
    recent = recent_restarts(group.record, context.now)
    if not quota:
        recent = [*recent, format_time(context.now)][-MAX_RECENT_RESTARTS:]
    record = _incarnate(group.ordinal, context).model_copy(
        update={
            "restarts": group.record.restarts + (0 if quota else 1),
            "recent_restarts": recent,
            "last_failure": failure,
        }
    )
    return _begin(group, record, context, why=f"{failure.reason}: {failure.message}")


def _begin(group: Group, record: GroupStatus, context: Context, *, why: str) -> Step:
    """Toward the incarnation in `record`: everything before it goes, its pods end, its back-off
    passes, then it is created."""
    unseen = _delete_unseen(group)
    before = (*group.older, *((group.cluster,) if group.cluster else ()))
    if before:
        deletes = _deletes(group, why, all_of_it=True)
        return Step(record=record, first=unseen, actions=deletes, wake_after_s=GONE_WAIT_S)
    wait_s = _pods_wait(group, record, context) or _backoff(record, context)
    if wait_s > 0:
        return Step(record=record, first=unseen, wake_after_s=wait_s)
    return Step(record=record, first=unseen, actions=(_create(record, context),))


def _pods_wait(group: Group, record: GroupStatus, context: Context) -> float:
    """How long pods of an older incarnation are still waited for: on a full cluster the new ones
    need their room, and would be told unschedulable. Some never end, on a node that is gone."""
    if not any(pod.epoch < record.epoch for pod in group.leftovers):
        return 0.0
    waited = context.now - parse_time(record.decided_at)
    return max(0.0, min(GONE_WAIT_S, (PODS_END - waited).total_seconds()))


def _watch(group: Group, context: Context) -> Step:
    """Before: the incarnation exists and is not lost."""
    assert group.cluster is not None, "callers have checked"
    record = group.record.model_copy(update={"uid": group.cluster.meta.uid})
    actions = _deletes(group, "of an older epoch")
    head = group.head
    if head and head.traffic != names.TRAFFIC_ON:
        if group.engine and group.engine.state == "draining":
            # A drain whose record was lost; it can't be taken back.
            record = record.model_copy(update={"drain_started_at": _from_now(context)})
            return Step(record=record, actions=actions, wake_after_s=DRAIN_LOOK_S)
        actions += (_label(head, names.TRAFFIC_ON),)
    if group.ready:
        return Step(record=record, actions=actions)
    age_s = (context.now - group.cluster.meta.created).total_seconds()
    asked = frozenset(p.meta.uid for p in (head,) if p and p.ip and p.phase == "Running")
    pending = [p for p in group.pods if p.phase == "Pending"]
    # KubeRay tells of a RayCluster only by Events why it makes no pods of it.
    stuck = {p.meta.uid for p in pending} | (set() if group.pods else {group.cluster.meta.uid})
    told_nowhere_else = asked or any(p.scheduled for p in pending)
    return Step(
        record=record,
        actions=actions,
        wake_after_s=max(2.0, min(UNTOLD_LOOK_S if told_nowhere_else else 30.0, age_s / 10)),
        refresh_engines=asked,
        watch_events_of=frozenset(stuck if age_s >= NO_PROGRESS_S else ()),
    )


def _drain(group: Group, context: Context) -> Step | None:
    """The next move of a drain, or None when there is nothing left to wait for: traffic leaves the
    head, then its engine refuses requests and finishes those it has."""
    head, engine = group.head, group.engine
    if head is None or not _may_serve(group, head) or group.cluster is None:
        return None
    started_at = group.record.drain_started_at or _from_now(context)
    elapsed_s = _elapsed_s(started_at, context)
    told = engine is not None and engine.state in ("draining", "stopped")
    idle = engine is not None and told and engine.in_flight == 0
    idle_at = (group.record.drain_idle_at or _from_now(context)) if idle else None
    if elapsed_s >= context.drain_seconds:
        return None
    if idle_at is not None and _elapsed_s(idle_at, context) >= DRAIN_IDLE_S:
        return None
    actions: tuple[Action, ...] = ()
    if head.traffic != names.TRAFFIC_OFF:
        actions += (_label(head, names.TRAFFIC_OFF),)
    if elapsed_s >= DRAIN_SETTLE_S and not told and head.ip:
        actions += (DrainEngine(pod_uid=head.meta.uid, pod_ip=head.ip),)
    return Step(
        record=group.record.model_copy(
            update={"drain_started_at": started_at, "drain_idle_at": idle_at}
        ),
        actions=actions,
        wake_after_s=DRAIN_LOOK_S,
        refresh_engines=frozenset({head.meta.uid}),
    )


def _may_serve(group: Group, head: SeenPod) -> bool:
    """Once it drains the head is not ready, and only its engine tells that it still works: one
    that can't be asked just now counts as working until the deadline."""
    if group.cluster is None or group.cluster.meta.deleting or head.phase != "Running":
        return False
    if group.engine is None:
        return head.ready or group.record.drain_started_at is not None
    return head.ready or group.engine.state in ("ready", "draining")


def _from_now(context: Context) -> str:
    """Recorded times have whole seconds: rounded up, so that no wait is shorter than it says."""
    return format_time(context.now + timedelta(microseconds=999_999))


def _elapsed_s(since: str, context: Context) -> float:
    return (context.now - parse_time(since)).total_seconds()


def _failure(group: Group, context: Context) -> LastFailure | None:
    """Why this incarnation must be given up, if it must. Pods that wait for nodes, images or
    weights have not failed."""
    cluster = group.cluster
    if cluster is None:
        return _deleted(group, context) if group.record.uid else None
    if cluster.meta.deleting or (group.record.uid and cluster.meta.uid != group.record.uid):
        return _deleted(group, context)
    refusal = next((c.message for c in cluster.conditions if QUOTA_WORDS in c.message), None)
    if refusal and not group.all_running:
        return _failed(group, context, Reason.QUOTA_EXCEEDED, refusal)
    if budget_spent(group.record, context.now):
        return None
    if group.head is None and group.provisioned_once:
        return _lost_head(group, context)
    edited = _edited(group, context)
    if edited:
        return _failed(group, context, Reason.RAY_CLUSTER_EDITED, edited)
    engine = group.engine
    if engine and engine.state == "failed" and engine.reason in RESTARTABLE:
        return _engine_failure(group, context)
    return None


def _deleted(group: Group, context: Context) -> LastFailure:
    return _failed(
        group,
        context,
        Reason.RAY_CLUSTER_DELETED,
        f"RayCluster {group.record.name} was deleted by somebody else",
    )


def _edited(group: Group, context: Context) -> str:
    """What is not as it was made; empty if all is. The API server counts edits of a spec, so one
    that was never edited is not compared."""
    cluster, revision = group.cluster, context.stored.get(group.record.revision)
    if cluster is None or revision is None or cluster.generation <= 1:
        return ""
    # Of a group the rendering is a part, so it need not be stamped first.
    path = first_difference(revision.ray_cluster["spec"], cluster.spec, "spec")
    return f"{path} of RayCluster {cluster.meta.name} was edited" if path else ""


def _lost_head(group: Group, context: Context) -> LastFailure:
    pod = group.lost_head
    if pod is None:
        return _failed(group, context, Reason.HEAD_LOST, "the head pod is gone")
    problem = pod.problem
    how = f": {problem.reason} {problem.message}".rstrip() if problem else ""
    failure = _failed(group, context, Reason.HEAD_LOST, f"head pod {pod.meta.name} ended{how}")
    return failure.model_copy(
        update={
            "pod": pod.meta.name,
            "node": pod.node,
            "exit_code": problem.exit_code if problem else None,
        }
    )


def _engine_failure(group: Group, context: Context) -> LastFailure:
    assert group.engine is not None, "callers have checked"
    seen = group.engine.last_failure
    message = (seen.message if seen else "") or group.engine.message
    failure = _failed(group, context, Reason(group.engine.reason), message)
    if seen is None:
        return failure
    return failure.model_copy(
        update={
            "rank": seen.rank,
            "pod": seen.pod,
            "node": seen.node,
            "exit_code": seen.exit_code,
            # The engine's own, which is before this look at it.
            "time": format_time(parse_time(seen.time)) if seen.time else failure.time,
        }
    )


def _failed(group: Group, context: Context, reason: Reason, message: str) -> LastFailure:
    return LastFailure(
        reason=reason.value,
        message=message[:MAX_MESSAGE],
        time=format_time(context.now),
        epoch=group.record.epoch,
    )


def _incarnate(ordinal: int, context: Context) -> GroupStatus:
    epoch = context.next_epoch()
    stamp = Stamp(ordinal=ordinal, revision=context.target.hash8, epoch=epoch)
    return GroupStatus(
        name=group_name(context.owner, stamp),
        ordinal=ordinal,
        revision=context.target.hash8,
        epoch=epoch,
        decided_at=format_time(context.now),
    )


def _create(record: GroupStatus, context: Context) -> CreateChild:
    """Before: the record is of the target; any other that runs nothing was replaced."""
    stamp = Stamp(ordinal=record.ordinal, revision=record.revision, epoch=record.epoch)
    manifest = stamp_raycluster(context.target.ray_cluster, context.owner, stamp)
    return CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=manifest)


def _deletes(group: Group, why: str, *, all_of_it: bool = False) -> tuple[Action, ...]:
    doomed = (*group.older, *((group.cluster,) if all_of_it and group.cluster else ()))
    return tuple(
        DeleteChild(
            kind=ChildKind.RAY_CLUSTER, name=c.meta.name, uid=c.meta.uid, why=why[:MAX_MESSAGE]
        )
        for c in doomed
        if not c.meta.deleting
    )


def _delete_unseen(group: Group) -> tuple[Action, ...]:
    """A RayCluster that was there and is in no watch any more. Most likely it is gone; if somebody
    took its labels off, it still runs, and its head may still be in the Service."""
    uid = group.record.uid
    if group.cluster is not None or not uid or any(c.meta.uid == uid for c in group.older):
        return ()
    return (
        DeleteChild(
            kind=ChildKind.RAY_CLUSTER, name=group.record.name, uid=uid, why="not seen any more"
        ),
    )


def _label(pod: SeenPod, value: str) -> PatchPodLabel:
    return PatchPodLabel(
        pod=pod.meta.name, uid=pod.meta.uid, label=names.TRAFFIC_LABEL, value=value
    )


def _backoff(record: GroupStatus, context: Context) -> float:
    quota = record.last_failure is not None and record.last_failure.reason == Reason.QUOTA_EXCEEDED
    return backoff_left_s(record, context.now, quota=quota)
