"""The status of each group: what was decided about it, and what is seen of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tpinference_operator.api.reasons import Reason
from tpinference_operator.api.status import (
    MAX_MESSAGE,
    MAX_RANKS,
    MAX_REASON,
    GroupStatus,
    LastFailure,
    Rank,
    Stage,
    Startup,
)
from tpinference_operator.groups import Group
from tpinference_operator.observe import format_time, parse_time
from tpinference_operator.observed import SeenEngine


def group_statuses(groups: Iterable[Group]) -> list[GroupStatus]:
    """At most MAX_RANKS ranks over all groups, failing ones first."""
    room = MAX_RANKS
    statuses = []
    for group in groups:
        status = _group_status(group)
        ranks = sorted(status.ranks, key=lambda r: (r.state == "alive", r.rank))[:room]
        room -= len(ranks)
        statuses.append(status.model_copy(update={"ranks": ranks}))
    return statuses


def _group_status(group: Group) -> GroupStatus:
    """What the engine said last stays when it can't be asked now."""
    uid = group.cluster.meta.uid if group.cluster else group.record.uid
    record = group.record.model_copy(update={"ready": group.ready, "uid": uid})
    engine, failure = group.engine, _engine_failure(group) or _pod_failure(group)
    if failure:
        record = record.model_copy(update={"last_failure": failure})
    if engine is None:
        return record
    return record.model_copy(
        update={
            "startup": _startup(engine) if engine.stages else record.startup,
            "ranks": _ranks(engine) if engine.ranks else record.ranks,
        }
    )


def _startup(engine: SeenEngine) -> Startup:
    stages = [
        Stage(
            name=stage.name,
            started_at=format_time(parse_time(stage.started_at)),
            seconds=None if stage.seconds is None else max(0, round(stage.seconds)),
        )
        for stage in engine.stages
    ]
    return Startup(stage=stages[-1].name if stages else "", stages=stages)


def _ranks(engine: SeenEngine) -> list[Rank]:
    return [
        Rank(
            rank=rank.rank,
            pod=rank.pod,
            node=rank.node,
            gpu=rank.device,
            state="alive" if rank.alive else "dead",
        )
        for rank in engine.ranks
    ]


def _engine_failure(group: Group) -> LastFailure | None:
    engine = group.engine
    if engine is None:
        return None
    failure = engine.last_failure
    if failure is None:
        if engine.state != "failed":
            return None
        return LastFailure(
            reason=engine.reason[:MAX_REASON],
            message=engine.message[:MAX_MESSAGE],
            epoch=group.record.epoch,
        )
    return LastFailure(
        rank=failure.rank,
        pod=failure.pod,
        node=failure.node,
        reason=failure.reason[:MAX_REASON],
        exit_code=failure.exit_code,
        message=(failure.message or engine.message)[:MAX_MESSAGE],
        time=format_time(parse_time(failure.time)) if failure.time else None,
        epoch=group.record.epoch,
    )


def _pod_failure(group: Group) -> LastFailure | None:
    """KubeRay deletes a pod that ended within a second: only the record can tell it later."""
    for pod in group.lost_pods:
        if pod.problem is not None:
            ended_at = pod.problem.ended_at
            return LastFailure(
                pod=pod.meta.name,
                node=pod.node,
                reason=Reason.CONTAINER_FAILED.value,
                exit_code=pod.problem.exit_code,
                message=pod.what_is_wrong[:MAX_MESSAGE],
                time=format_time(parse_time(ended_at)) if ended_at else None,
                epoch=group.record.epoch,
            )
    return None
