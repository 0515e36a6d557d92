"""Why one group does not work yet: chains of small named checks, the first that finds something
wins. Each answers with the cluster's or the engine's own words where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from tpinference_operator.api.reasons import (
    ENGINE_REASONS,
    FAILING,
    RESTARTABLE,
    Reason,
    known_reason,
)
from tpinference_operator.groups import Group, backoff_left_s, budget_back_at, budget_spent
from tpinference_operator.observe import format_time
from tpinference_operator.observed import Observed, SeenPod

OBSERVE_SOON = timedelta(seconds=6)
"""KubeRay writes a first status within a second or two when it watches the namespace."""
OBSERVE_DEADLINE = timedelta(seconds=30)
"""Also when it was just being installed, updated or elected."""

EVENT_HOLDS = timedelta(minutes=3)
"""The kubelet tells a mount that fails again within two minutes; an older event may be over."""

_PULL_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reason of the closed list, and what to tell."""

    reason: Reason
    message: str


Check = Callable[[Group, Observed], Problem | None]


def first_problem(
    checks: Iterable[Check], groups: Iterable[Group], observed: Observed
) -> Problem | None:
    """Of all groups, one that fails rather than one that waits; else the first that waits."""
    found = [
        (problem, group)
        for group in groups
        for problem in [next(filter(None, (c(group, observed) for c in checks)), None)]
        if problem
    ]
    found.sort(key=lambda item: item[0].reason not in FAILING)
    if not found:
        return None
    problem, group = found[0]
    if observed.tpi.spec.replicas > 1:
        message = f"group {group.ordinal}: {problem.message}"
        return Problem(reason=problem.reason, message=message)
    return problem


# Scheduled


def kuberay_is_slow(group: Group, observed: Observed) -> Problem | None:
    """No failure yet, and most likely the only hint that it looks elsewhere."""
    return _unnoticed(group, observed, OBSERVE_SOON, Reason.WAITING_FOR_KUBERAY)


def _unnoticed(
    group: Group, observed: Observed, after: timedelta, reason: Reason
) -> Problem | None:
    cluster = group.cluster
    if cluster is None or cluster.has_status or group.pods or kuberay_refuses(group, observed):
        return None
    if observed.now - cluster.meta.created < after:
        return None
    return Problem(
        reason=reason,
        message=f"KubeRay has not taken notice of RayCluster {cluster.meta.name} for "
        f"{after.seconds} s: is it running, and does it watch namespace "
        f"{observed.tpi.namespace!r}?",
    )


def quota_refuses(group: Group, observed: Observed) -> Problem | None:
    last = group.record.last_failure
    if group.cluster is None and last and last.reason == Reason.QUOTA_EXCEEDED:
        return Problem(reason=Reason.QUOTA_EXCEEDED, message=last.message)
    refusal = _replica_failure(group)
    if "exceeded quota" in refusal:
        return Problem(reason=Reason.QUOTA_EXCEEDED, message=refusal)
    return None


def pods_are_refused(group: Group, observed: Observed) -> Problem | None:
    refusal = _replica_failure(group)
    if refusal and len(group.pods) <= _num_hosts(group):
        return Problem(reason=Reason.PODS_REFUSED, message=refusal)
    return None


def pods_are_missing(group: Group, observed: Observed) -> Problem | None:
    want, have = 1 + _num_hosts(group), len(group.pods)
    if group.cluster is not None and have >= want:
        return None
    message = f"{have} of {want} pods exist" if group.cluster else "no RayCluster yet"
    return Problem(reason=Reason.WAITING_FOR_PODS, message=message)


def no_node_fits(group: Group, observed: Observed) -> Problem | None:
    for pod in group.pods:
        if pod.unschedulable:
            volume = "persistentvolumeclaim" in pod.unschedulable.lower()
            return Problem(
                reason=Reason.VOLUME_NOT_READY if volume else Reason.UNSCHEDULABLE,
                message=f"pod {pod.meta.name}: {pod.unschedulable}",
            )
    return None


def pods_wait_for_a_node(group: Group, observed: Observed) -> Problem | None:
    waiting = [pod.meta.name for pod in group.pods if not pod.scheduled]
    if not waiting:
        return None
    return Problem(reason=Reason.WAITING_FOR_PODS, message=f"{len(waiting)} pods have no node yet")


SCHEDULED: tuple[Check, ...] = (
    quota_refuses,
    pods_are_refused,
    no_node_fits,
    kuberay_is_slow,
    pods_are_missing,
    pods_wait_for_a_node,
)

# RayClusterReady


def cluster_is_not_there(group: Group, observed: Observed) -> Problem | None:
    """Before its creation, or between a loss and the next incarnation."""
    if group.cluster is not None and not group.cluster.meta.deleting:
        return None
    last = group.record.last_failure
    reason = known_reason(last.reason) if last else None
    if last and reason:
        quota = reason is Reason.QUOTA_EXCEEDED
        waits = backoff_left_s(group.record, observed.now, quota=quota) > 0
        then = "; the next try waits for its back-off" if waits else ""
        return Problem(reason=reason, message=f"{last.message}{then}")
    message = f"RayCluster {group.record.name} comes next"
    if group.leftovers:
        message += f", once {len(group.leftovers)} pods of the one before it have ended"
    return Problem(reason=Reason.RAY_CLUSTER_NOT_CREATED, message=message)


def kuberay_refuses(group: Group, observed: Observed) -> Problem | None:
    if group.cluster is None or group.pods:
        return None
    for event in observed.events:
        ours = event.involved_uid == group.cluster.meta.uid
        if ours and event.reason.startswith("InvalidRayCluster"):
            return Problem(reason=Reason.RAY_CLUSTER_INVALID, message=event.message)
    return None


def kuberay_is_silent(group: Group, observed: Observed) -> Problem | None:
    return _unnoticed(group, observed, OBSERVE_DEADLINE, Reason.RAY_CLUSTER_NOT_OBSERVED)


def head_is_lost(group: Group, observed: Observed) -> Problem | None:
    """Seen only when the restart budget is spent; otherwise the group is already replaced."""
    if group.head is None and group.provisioned_once and budget_spent(group.record, observed.now):
        message = f"{_spent(group, observed)}: the head pod is gone again"
        return Problem(reason=Reason.RESTART_BUDGET_EXHAUSTED, message=message)
    return None


def image_can_not_be_pulled(group: Group, observed: Observed) -> Problem | None:
    for pod in group.pods:
        if pod.problem is not None and pod.problem.reason in _PULL_REASONS:
            return Problem(reason=Reason.IMAGE_PULL_FAILED, message=_told(pod, observed))
    return None


def container_failed(group: Group, observed: Observed) -> Problem | None:
    """Of live pods; until the group has worked, also of those before them: KubeRay makes new pods
    again and again, and each of them only starts."""
    said = next((_told(pod, observed) for pod in group.pods if pod.problem), "")
    if not said and not group.provisioned_once and not group.all_running:
        said = _last_end(group)
    return Problem(reason=Reason.CONTAINER_FAILED, message=said) if said else None


def volume_can_not_be_mounted(group: Group, observed: Observed) -> Problem | None:
    pending = {p.meta.uid: p.meta.name for p in group.pods if p.phase == "Pending"}
    for event in observed.events:
        if observed.now - event.last_seen > EVENT_HOLDS:
            continue
        if event.involved_uid in pending and event.reason in ("FailedMount", "FailedAttachVolume"):
            return Problem(
                reason=Reason.VOLUME_NOT_READY,
                message=f"pod {pending[event.involved_uid]}: {event.message}",
            )
    return None


def not_all_pods_run(group: Group, observed: Observed) -> Problem | None:
    if group.all_running:
        return None
    running = sum(pod.phase == "Running" for pod in group.pods)
    message = f"{running} of {1 + _num_hosts(group)} pods run"
    if not group.provisioned_once:
        return Problem(reason=Reason.PODS_STARTING, message=message)
    return Problem(reason=Reason.WORKERS_LOST, message=_joined(message, _last_end(group)))


RAY_CLUSTER_READY: tuple[Check, ...] = (
    cluster_is_not_there,
    kuberay_refuses,
    kuberay_is_silent,
    kuberay_is_slow,
    head_is_lost,
    image_can_not_be_pulled,
    container_failed,
    volume_can_not_be_mounted,
    not_all_pods_run,
)

# EngineReady


def engine_failed(group: Group, observed: Observed) -> Problem | None:
    engine = group.engine
    if engine is None:
        return _engine_failed_before(group, observed)
    if engine.state != "failed":
        return None
    failure, message = engine.last_failure, engine.message or engine.reason
    if failure is not None:
        message = _at_rank(failure.rank, failure.pod, failure.message or engine.message)
    known = engine.reason in ENGINE_REASONS
    reason = Reason(engine.reason) if known else Reason.ENGINE_CRASHED
    return _engine_problem(group, observed, reason, message)


def _engine_failed_before(group: Group, observed: Observed) -> Problem | None:
    """A failure that an engine never leaves holds while it can't be asked: a fetch that failed, or
    an operator that was just started, is no news about it."""
    last = group.recorded_failure
    if last is None or group.head is None or group.head.ready:
        return None
    reason = known_reason(last.reason)
    if reason not in ENGINE_REASONS:
        return None
    if reason in RESTARTABLE and not budget_spent(group.record, observed.now):
        return None
    return _engine_problem(group, observed, reason, _at_rank(last.rank, last.pod, last.message))


def _engine_problem(group: Group, observed: Observed, reason: Reason, message: str) -> Problem:
    if reason in RESTARTABLE and budget_spent(group.record, observed.now):
        spent = f"{_spent(group, observed)}, still {reason}: {message}"
        return Problem(reason=Reason.RESTART_BUDGET_EXHAUSTED, message=spent)
    return Problem(reason=reason, message=message)


def group_drains(group: Group, observed: Observed) -> Problem | None:
    if group.record.drain_started_at is None:
        return None
    left = f", {group.engine.in_flight} left" if group.engine else ""
    return Problem(reason=Reason.DRAINING, message=f"running requests may finish{left}")


def engine_starts(group: Group, observed: Observed) -> Problem | None:
    """Readiness is the head pod's; the engine's own words only explain it."""
    if group.provisioned_once or (group.head is not None and group.head.ready):
        return None
    message = "the engine does not answer yet"
    if group.engine:
        stages = group.engine.stages
        message = f"stage {stages[-1].name}" if stages else f"state {group.engine.state}"
    return Problem(reason=Reason.ENGINE_STARTING, message=_joined(message, _last_end(group)))


def head_is_not_ready(group: Group, observed: Observed) -> Problem | None:
    if group.head is not None and group.head.ready:
        return None
    said = group.engine.message if group.engine else ""
    return Problem(
        reason=Reason.ENGINE_NOT_READY, message=said or "the head pod's readiness probe fails"
    )


ENGINE_READY: tuple[Check, ...] = (engine_failed, group_drains, engine_starts, head_is_not_ready)


def _at_rank(rank: int | None, pod: str, message: str) -> str:
    return message if rank is None else f"rank {rank} on pod {pod}: {message}"


def _spent(group: Group, observed: Observed) -> str:
    """A spent budget comes back by itself, so the message has the time."""
    again = format_time(budget_back_at(group.record, observed.now))
    return f"restarted {group.record.restarts} times, tried again at {again}"


def _last_end(group: Group) -> str:
    """How a pod of this incarnation ended last, as seen or as recorded."""
    seen = next((pod.what_is_wrong for pod in group.lost_pods if pod.problem), "")
    last = group.recorded_failure
    recorded = last.message if last and last.reason == Reason.CONTAINER_FAILED else ""
    return seen or recorded


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _replica_failure(group: Group) -> str:
    for condition in group.cluster.conditions if group.cluster else ():
        if condition.type == "ReplicaFailure" and condition.status == "True":
            # KubeRay puts its own word for it on a line of its own.
            return ": ".join(condition.message.split("\n"))
    return ""


def _num_hosts(group: Group) -> int:
    return group.cluster.num_hosts if group.cluster else 0


def _told(pod: SeenPod, observed: Observed) -> str:
    """The kubelet's message; where it is only "Back-off pulling", the event with the cause too."""
    said = pod.what_is_wrong
    for event in observed.events:
        if event.involved_uid == pod.meta.uid and event.reason == "Failed":
            if event.message not in said and not event.message.startswith("Error: "):
                return f"{said}; {event.message}"
    return said
