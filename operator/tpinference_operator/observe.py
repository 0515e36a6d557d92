"""Parses what the watches and the engines said, once, into one frozen `Observed`.

Everything after this module sees these types only, never a raw dict. Knows nothing of what is
wanted, and reaches no cluster: the acting half hands the raw objects in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tpinference_operator import names
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.observed import (
    Children,
    ContainerProblem,
    EngineFailure,
    EngineRank,
    EngineStage,
    KubeRay,
    Meta,
    Observed,
    Ownership,
    Raw,
    SeenCondition,
    SeenEngine,
    SeenEvent,
    SeenPod,
    SeenRayCluster,
    SeenRevision,
    SeenService,
    TPInference,
)


def observe(owner: Raw, children: Children, *, kuberay: KubeRay, now: datetime) -> Observed:
    """Before: `owner` is a TPInference as stored. After: everything is parsed, a malformed child
    is read as far as it goes, and only an unreadable spec raises (InvalidSpec)."""
    tpi = parse_tpinference(owner)
    services = [_service(raw, tpi) for raw in children.services]
    return Observed(
        now=now,
        kuberay=kuberay,
        tpi=tpi,
        ray_clusters=tuple(
            sorted(
                (_ray_cluster(raw, tpi) for raw in children.ray_clusters),
                key=lambda c: (c.ordinal, c.epoch, c.meta.name),
            )
        ),
        pods=tuple(sorted((_pod(raw, tpi) for raw in children.pods), key=lambda p: p.meta.name)),
        service=next((s for s in services if s.meta.name == tpi.name), None),
        revisions=tuple(
            sorted(
                (_revision(raw, tpi) for raw in children.revisions),
                key=lambda r: (r.revision, r.meta.name),
            )
        ),
        events=tuple(
            sorted(_warnings(children.events), key=lambda e: (e.last_seen, e.message), reverse=True)
        ),
        engines={uid: parse_engine(raw) for uid, raw in children.engines.items()},
    )


def parse_tpinference(raw: Raw) -> TPInference:
    """Raises InvalidSpec with one line a field when the spec can't be read. A status that can't be
    read counts as lost."""
    meta = raw["metadata"]
    try:
        spec = TPInferenceSpec.model_validate(raw.get("spec") or {})
    except ValidationError as error:
        raise InvalidSpec(tuple(_problem(e) for e in error.errors())) from error
    return TPInference(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        resource_version=meta.get("resourceVersion", ""),
        created=parse_time(meta.get("creationTimestamp")),
        deleting="deletionTimestamp" in meta,
        spec=spec,
        status=parse_status(raw.get("status")),
    )


def parse_status(raw: Raw | None) -> TPInferenceStatus:
    try:
        return TPInferenceStatus.model_validate(raw or {})
    except ValidationError:
        # As if it was lost: plan then takes epochs from the children's labels.
        return TPInferenceStatus()


def parse_time(text: str | None) -> datetime:
    """RFC 3339 as Kubernetes and the engine write it; the epoch when there is none."""
    if not text:
        return datetime.fromtimestamp(0, UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC, to the second, as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_engine(raw: Raw) -> SeenEngine:
    requests = raw.get("requests") or {}
    return SeenEngine(
        engine_id=raw.get("engineId") or "",
        epoch=_number(raw.get("epoch")),
        state=raw.get("state") or "",
        reason=raw.get("reason") or "",
        message=raw.get("message") or "",
        stages=tuple(
            EngineStage(
                name=stage.get("name") or "",
                started_at=stage.get("startedAt") or "",
                seconds=stage.get("seconds"),
            )
            for stage in raw.get("stages") or ()
        ),
        ranks=tuple(
            EngineRank(
                rank=_number(rank.get("rank")),
                pod=rank.get("pod") or "",
                node=rank.get("node") or "",
                device=rank.get("device") or "",
                alive=rank.get("state") == "alive",
            )
            for rank in raw.get("ranks") or ()
        ),
        last_failure=_failure(raw.get("lastFailure")),
        in_flight=_number(requests.get("running")) + _number(requests.get("waiting")),
    )


def _problem(error: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in ("spec", *error["loc"]))
    return f"{path}: {error['msg']}"


def _failure(raw: Raw | None) -> EngineFailure | None:
    if not raw:
        return None
    return EngineFailure(
        rank=raw.get("rank"),
        pod=raw.get("pod") or "",
        node=raw.get("node") or "",
        reason=raw.get("reason") or "",
        exit_code=raw.get("exitCode"),
        message=raw.get("message") or "",
        time=raw.get("time") or "",
    )


def _meta(raw: Raw, tpi: TPInference) -> Meta:
    meta = raw["metadata"]
    labels = meta.get("labels") or {}
    references = meta.get("ownerReferences") or ()
    controller = next((ref for ref in references if ref.get("controller")), None)
    return Meta(
        name=meta["name"],
        uid=meta["uid"],
        ownership=_ownership(controller, tpi, labels),
        controller_uid=controller["uid"] if controller else None,
        labels=labels,
        created=parse_time(meta.get("creationTimestamp")),
        deleting="deletionTimestamp" in meta,
    )


def _ownership(controller: Raw | None, tpi: TPInference, labels: Mapping[str, str]) -> Ownership:
    if controller is None:
        ours = names.child_labels(tpi.name).items()
        is_ours = all(labels.get(key) == value for key, value in ours)
        return Ownership.ORPHAN if is_ours else Ownership.FOREIGN
    if controller["uid"] == tpi.uid:
        return Ownership.OURS
    namesake = (controller.get("kind"), controller.get("name")) == (names.KIND, tpi.name)
    return Ownership.PREDECESSOR if namesake else Ownership.FOREIGN


def _ray_cluster(raw: Raw, tpi: TPInference) -> SeenRayCluster:
    meta = _meta(raw, tpi)
    status = raw.get("status") or {}
    return SeenRayCluster(
        meta=meta,
        ordinal=_number(meta.labels.get(names.ORDINAL_LABEL)),
        revision=meta.labels.get(names.REVISION_LABEL, ""),
        epoch=_number(meta.labels.get(names.EPOCH_LABEL)),
        num_hosts=sum(
            _number(group.get("numOfHosts", 1))
            for group in (raw.get("spec") or {}).get("workerGroupSpecs") or ()
        ),
        generation=_number(raw["metadata"].get("generation")),
        spec=raw.get("spec") or {},
        has_status=bool(status),
        conditions=_conditions(status),
    )


def _conditions(status: Raw) -> tuple[SeenCondition, ...]:
    return tuple(
        SeenCondition(
            type=c.get("type") or "",
            status=c.get("status") or "",
            reason=c.get("reason") or "",
            message=c.get("message") or "",
            changed=parse_time(c.get("lastTransitionTime")),
        )
        for c in status.get("conditions") or ()
    )


def _pod(raw: Raw, tpi: TPInference) -> SeenPod:
    meta = _meta(raw, tpi)
    status = raw.get("status") or {}
    conditions = {c.type: c for c in _conditions(status)}
    scheduled = conditions.get("PodScheduled")
    ready = conditions.get("Ready")
    is_scheduled = scheduled is not None and scheduled.status == "True"
    return SeenPod(
        meta=meta,
        cluster_uid=meta.controller_uid,
        role=meta.labels.get(names.ROLE_LABEL, ""),
        traffic=meta.labels.get(names.TRAFFIC_LABEL, ""),
        ordinal=_number(meta.labels.get(names.ORDINAL_LABEL)),
        epoch=_number(meta.labels.get(names.EPOCH_LABEL)),
        ready_changed=ready.changed if ready else parse_time(None),
        phase=status.get("phase") or "Pending",
        ready=ready is not None and ready.status == "True" and not meta.deleting,
        scheduled=is_scheduled,
        unschedulable=scheduled.message if scheduled and not is_scheduled else "",
        ip=status.get("podIP") or "",
        node=(raw.get("spec") or {}).get("nodeName") or "",
        problem=_container_problem(status, _deletion_asked(raw["metadata"])),
    )


def _deletion_asked(meta: Raw) -> datetime | None:
    """When somebody asked for it: deletionTimestamp is that plus the grace period."""
    if "deletionTimestamp" not in meta:
        return None
    grace = timedelta(seconds=_number(meta.get("deletionGracePeriodSeconds")))
    return parse_time(meta["deletionTimestamp"]) - grace


def _container_problem(status: Raw, asked: datetime | None) -> ContainerProblem | None:
    """The first container, init containers first, that waits for a reason of its own or ended by
    itself; else why the kubelet ended the pod. Ours never end well: they serve."""
    succeeded = status.get("phase") == "Succeeded"
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            state = container.get("state") or {}
            waiting, ended = state.get("waiting"), state.get("terminated")
            if waiting and waiting.get("reason") not in _WAITING_IN_ORDER:
                return ContainerProblem(
                    reason=waiting.get("reason") or "",
                    message=waiting.get("message") or "",
                    exit_code=None,
                )
            wanted = succeeded and key == "containerStatuses"
            if ended and (ended.get("exitCode", 0) != 0 or wanted):
                finished = ended.get("finishedAt") or ""
                if asked is not None and parse_time(finished) > asked:
                    return None
                return ContainerProblem(
                    reason=ended.get("reason") or "",
                    message=ended.get("message") or "",
                    exit_code=ended.get("exitCode"),
                    ended_at=finished,
                )
    if status.get("phase") == "Failed" and status.get("reason"):
        return ContainerProblem(
            reason=status["reason"], message=status.get("message") or "", exit_code=None
        )
    return None


_WAITING_IN_ORDER = (None, "", "PodInitializing", "ContainerCreating")
"""Waiting reasons of every healthy start."""


def _service(raw: Raw, tpi: TPInference) -> SeenService:
    balancer = (raw.get("status") or {}).get("loadBalancer") or {}
    return SeenService(
        meta=_meta(raw, tpi),
        raw=raw,
        cluster_ip=(raw.get("spec") or {}).get("clusterIP") or "",
        ingress=tuple(
            i.get("ip") or i.get("hostname") or "" for i in balancer.get("ingress") or ()
        ),
    )


def _revision(raw: Raw, tpi: TPInference) -> SeenRevision:
    return SeenRevision(
        meta=_meta(raw, tpi),
        revision=_number(raw.get("revision")),
        data=raw.get("data") or {},
    )


def _warnings(events: Iterable[Raw]) -> Iterable[SeenEvent]:
    for raw in events:
        if raw.get("type") == "Warning":
            yield SeenEvent(
                involved_uid=(raw.get("involvedObject") or {}).get("uid") or "",
                reason=raw.get("reason") or "",
                message=raw.get("message") or "",
                last_seen=parse_time(
                    (raw.get("series") or {}).get("lastObservedTime")
                    or raw.get("lastTimestamp")
                    or raw.get("eventTime")
                    or raw["metadata"].get("creationTimestamp")
                ),
            )


def _number(value: object) -> int:
    """An int or the text of one, from a label or a foreign body; 0 for anything else."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
