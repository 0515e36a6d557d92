"""Computes the status from what is observed and what the plan decided. Pure: equal input gives an
equal status, so comparing with the recorded one decides whether to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tpinference_operator.actions import Plan
from tpinference_operator.api.reasons import FAILING, FINAL, ConditionType, Reason, known_reason
from tpinference_operator.api.status import (
    MAX_MESSAGE,
    Condition,
    GroupStatus,
    Layout,
    TPInferenceStatus,
)
from tpinference_operator.api.v1alpha1 import Device, ServiceType
from tpinference_operator.checks import (
    ENGINE_READY,
    RAY_CLUSTER_READY,
    SCHEDULED,
    Problem,
    first_problem,
)
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.group_status import group_statuses
from tpinference_operator.groups import Group, pair_groups
from tpinference_operator.observe import format_time, parse_status
from tpinference_operator.observed import Observed, Ownership, Raw
from tpinference_operator.render.service import head_selector

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One condition before it has a time and a generation."""

    status: Truth
    reason: Reason
    message: str = ""


Verdicts = dict[ConditionType, Verdict]


def compute_status(observed: Observed, plan: Plan) -> TPInferenceStatus:
    """After: conditions all carry the object's generation, and lastTransitionTime moves only where
    a status flipped."""
    tpi, now = observed.tpi, format_time(observed.now)
    groups = _groups_as_planned(observed, plan)
    existing = [g for g in groups if g.cluster is not None and not g.cluster.meta.deleting]
    num_ready = sum(g.ready for g in groups)
    verdicts = _verdicts(observed, plan, groups)
    return TPInferenceStatus(
        observed_generation=tpi.generation,
        conditions=_conditions(verdicts, tpi.status.conditions, generation=tpi.generation, now=now),
        replicas=len(existing),
        ready_replicas=num_ready,
        updated_replicas=sum(g.record.revision == plan.update_revision for g in existing),
        available_replicas=num_ready if _service_is_ours(observed) else 0,
        selector=",".join(f"{k}={v}" for k, v in head_selector(tpi.name).items()),
        layout=_layout(observed),
        url=f"http://{tpi.name}.{tpi.namespace}:{tpi.spec.service.port}/v1",
        current_revision=plan.current_revision,
        update_revision=plan.update_revision,
        epoch=plan.epoch,
        groups=group_statuses(groups),
    )


def status_of_invalid_spec(owner: Raw, error: InvalidSpec, *, now: str) -> TPInferenceStatus:
    """For an object that `observe` refused: keeps all that was recorded, Accepted is False. Its
    groups go on serving, so what was last known of them is kept too, under the new generation."""
    recorded = parse_status(owner.get("status"))
    generation = owner["metadata"].get("generation", 0)
    failed = Verdict(status="False", reason=Reason.INVALID_SPEC, message=str(error))
    true = Verdict(status="True", reason=Reason.INVALID_SPEC, message=str(error))
    verdicts = {
        **_recorded_about_groups(recorded),
        ConditionType.READY: failed,
        ConditionType.ACCEPTED: failed,
        ConditionType.PROGRESSING: failed,
        ConditionType.DEGRADED: true,
        ConditionType.STALLED: true,
    }
    return recorded.model_copy(
        update={
            "observed_generation": generation,
            "conditions": _conditions(
                verdicts, recorded.conditions, generation=generation, now=now
            ),
        }
    )


def _recorded_about_groups(recorded: TPInferenceStatus) -> Verdicts:
    kinds = (ConditionType.AVAILABLE, *_PARTS)
    by_type = {condition.type: condition for condition in recorded.conditions}
    return {
        kind: Verdict(status=known.status, reason=reason, message=known.message)
        for kind in kinds
        for known in [by_type.get(kind.value)]
        for reason in [known_reason(known.reason) if known else None]
        if known and reason
    }


def urgent(old: TPInferenceStatus, new: TPInferenceStatus) -> bool:
    """A condition's status or reason differs: write at once rather than coalesce."""

    def gist(status: TPInferenceStatus) -> dict[str, tuple[str, str]]:
        return {c.type: (c.status, c.reason) for c in status.conditions}

    return gist(old) != gist(new)


def _groups_as_planned(observed: Observed, plan: Plan) -> tuple[Group, ...]:
    """What is seen, under the records that the plan decided on. A record of a new epoch has
    nothing to be seen yet."""
    seen = {group.ordinal: group for group in pair_groups(observed)}
    return tuple(_under(record, seen.get(record.ordinal)) for record in plan.groups)


def _under(record: GroupStatus, group: Group | None) -> Group:
    same = group is not None and group.record.epoch == record.epoch
    shown = group if same else None
    return Group(
        record=record,
        cluster=shown.cluster if shown else None,
        older=group.older if group else (),
        head=shown.head if shown else None,
        lost_head=shown.lost_head if shown else None,
        workers=shown.workers if shown else (),
        lost_workers=shown.lost_workers if shown else (),
        leftovers=group.leftovers if group else (),
        engine=shown.engine if shown else None,
    )


def _verdicts(observed: Observed, plan: Plan, groups: Sequence[Group]) -> Verdicts:
    accepted = _accepted(plan)
    if accepted.status == "False":
        return _verdicts_of_refused(observed, groups, accepted)
    parts: Verdicts = {ConditionType.ACCEPTED: accepted}
    for kind, checks, good in (
        (ConditionType.SCHEDULED, SCHEDULED, Reason.ALL_SCHEDULED),
        (ConditionType.RAY_CLUSTER_READY, RAY_CLUSTER_READY, Reason.ALL_PODS_RUNNING),
        (ConditionType.ENGINE_READY, ENGINE_READY, Reason.ENGINE_READY),
    ):
        problem = first_problem(checks, groups, observed)
        parts[kind] = _part(problem, good if groups else Reason.SCALED_TO_ZERO)
    parts[ConditionType.ROUTE_READY] = _route(observed, groups)
    parts[ConditionType.PROGRESSING] = _progressing(observed, plan, groups, parts)
    parts[ConditionType.READY] = _ready(observed, plan, groups, parts)
    return {**parts, **_summaries(observed, groups, parts)}


def _verdicts_of_refused(
    observed: Observed, groups: Sequence[Group], accepted: Verdict
) -> Verdicts:
    """Nothing is done, so nothing is known about the rest; what runs may still answer."""
    parts = {ConditionType.ACCEPTED: accepted, ConditionType.READY: accepted}
    parts[ConditionType.PROGRESSING] = accepted
    unknown = Verdict(status="Unknown", reason=accepted.reason)
    for kind in (
        ConditionType.SCHEDULED,
        ConditionType.RAY_CLUSTER_READY,
        ConditionType.ENGINE_READY,
        ConditionType.ROUTE_READY,
    ):
        parts[kind] = unknown
    return {**parts, **_summaries(observed, groups, parts)}


def _accepted(plan: Plan) -> Verdict:
    if not plan.findings:
        return Verdict(status="True", reason=Reason.ACCEPTED)
    return Verdict(
        status="False",
        reason=Reason(plan.findings[0].reason),
        message="; ".join(finding.message for finding in plan.findings),
    )


def _part(problem: Problem | None, good: Reason) -> Verdict:
    if problem is None:
        return Verdict(status="True", reason=good)
    return Verdict(status="False", reason=problem.reason, message=problem.message)


def _service_is_ours(observed: Observed) -> bool:
    service = observed.service
    return (
        service is not None
        and not service.meta.deleting
        and service.meta.ownership is Ownership.OURS
    )


def _route(observed: Observed, groups: Sequence[Group]) -> Verdict:
    service = observed.service
    if service is None or not _service_is_ours(observed):
        return Verdict(
            status="False",
            reason=Reason.SERVICE_MISSING,
            message=f"Service {observed.tpi.name} does not exist yet",
        )
    if observed.tpi.spec.service.type is ServiceType.LOAD_BALANCER and not service.ingress:
        return Verdict(
            status="False",
            reason=Reason.ADDRESS_PENDING,
            message="the load balancer has no address yet",
        )
    if not any(group.ready for group in groups):
        return Verdict(status="False", reason=Reason.NO_READY_GROUP, message="no head pod is ready")
    return Verdict(status="True", reason=Reason.ROUTE_READY)


def _progressing(
    observed: Observed, plan: Plan, groups: Sequence[Group], parts: Verdicts
) -> Verdict:
    final = _first(parts, FINAL)
    if final:
        return Verdict(status="False", reason=final.reason, message=final.message)
    outdated = [g for g in groups if g.record.revision != plan.update_revision]
    unready = [g for g in groups if not g.ready]
    if len(groups) > observed.tpi.spec.replicas:
        reason, many = Reason.SCALING_DOWN, len(groups) - observed.tpi.spec.replicas
    elif outdated:
        reason, many = Reason.UPDATING, len(outdated)
    elif any(g.record.restarts for g in unready):
        reason, many = Reason.RESTARTING, len(unready)
    elif unready and plan.current_revision not in ("", plan.update_revision):
        reason, many = Reason.UPDATING, len(unready)
    elif unready:
        reason, many = Reason.CREATING, len(unready)
    else:
        return Verdict(status="False", reason=Reason.COMPLETE)
    return Verdict(status="True", reason=reason, message=f"{many} of {len(groups)} groups")


_PARTS = (
    ConditionType.ACCEPTED,
    ConditionType.SCHEDULED,
    ConditionType.RAY_CLUSTER_READY,
    ConditionType.ENGINE_READY,
    ConditionType.ROUTE_READY,
)


def _ready(observed: Observed, plan: Plan, groups: Sequence[Group], parts: Verdicts) -> Verdict:
    if observed.tpi.spec.replicas == 0 and not groups:
        return Verdict(status="True", reason=Reason.SCALED_TO_ZERO)
    broken = _first(parts, FAILING)
    waiting = next((parts[kind] for kind in _PARTS if parts[kind].status != "True"), None)
    shown = broken or waiting
    if shown:
        return Verdict(status="False", reason=shown.reason, message=shown.message)
    progressing = parts[ConditionType.PROGRESSING]
    if progressing.status == "True":
        return Verdict(status="False", reason=progressing.reason, message=progressing.message)
    return Verdict(status="True", reason=Reason.READY)


def _first(parts: Verdicts, reasons: frozenset[Reason]) -> Verdict | None:
    """The first part, in the order of start-up, that is False for one of these reasons."""
    return next(
        (
            parts[kind]
            for kind in _PARTS
            if kind in parts and parts[kind].status == "False" and parts[kind].reason in reasons
        ),
        None,
    )


def _summaries(observed: Observed, groups: Sequence[Group], parts: Verdicts) -> Verdicts:
    ready = parts[ConditionType.READY]
    answers = any(group.ready for group in groups) and _service_is_ours(observed)
    nobody = Reason.NO_READY_GROUP if observed.tpi.spec.replicas else Reason.SCALED_TO_ZERO
    broken = _first(parts, FAILING)
    out: Verdicts = {
        ConditionType.AVAILABLE: Verdict(
            status="True" if answers else "False", reason=Reason.AVAILABLE if answers else nobody
        ),
        ConditionType.DEGRADED: Verdict(
            status="True" if broken else "False",
            reason=broken.reason if broken else Reason.AS_EXPECTED,
            message=broken.message if broken else "",
        ),
    }
    if ready.status != "True":
        final = _first(parts, FINAL)
        kind = ConditionType.STALLED if final else ConditionType.RECONCILING
        shown = final or ready
        out[kind] = Verdict(status="True", reason=shown.reason, message=shown.message)
    return out


def _conditions(
    verdicts: Mapping[ConditionType, Verdict],
    before: Iterable[Condition],
    *,
    generation: int,
    now: str,
) -> list[Condition]:
    """In the order of ConditionType, whatever order they were decided in."""
    old = {condition.type: condition for condition in before}
    return [
        Condition(
            type=kind.value,
            status=verdicts[kind].status,
            reason=verdicts[kind].reason.value,
            message=verdicts[kind].message[:MAX_MESSAGE],
            observed_generation=generation,
            last_transition_time=old[kind].last_transition_time
            if kind in old and old[kind].status == verdicts[kind].status
            else now,
        )
        for kind in ConditionType
        if kind in verdicts
    ]


def _layout(observed: Observed) -> Layout:
    spec = observed.tpi.spec
    return Layout(
        tensor=spec.parallelism.tensor,
        nodes=spec.parallelism.nodes,
        gpus_per_node=spec.parallelism.ranks_per_pod,
        gpus=spec.parallelism.tensor if spec.engine.device is Device.CUDA else 0,
    )
