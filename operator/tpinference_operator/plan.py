"""Decides, from what is observed, what to do. Pure; `actions.py` says what comes out.

In order: what forbids acting at all, which revision the spec is, what becomes of each group
(`steps.py`), and then one list of actions in which every decision is recorded before anything
stands on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count

from tpinference_operator import names
from tpinference_operator.actions import (
    Action,
    AdoptChild,
    ApplyService,
    ChildKind,
    CreateChild,
    DeleteChild,
    DrainEngine,
    Finding,
    PatchPodLabel,
    Plan,
    RecordStatus,
)
from tpinference_operator.api.reasons import Reason
from tpinference_operator.api.status import GroupStatus
from tpinference_operator.errors import CorruptRevision, InvalidQuantity, InvalidSpec
from tpinference_operator.groups import Group, highest_epoch, pair_groups
from tpinference_operator.observed import KubeRay, Meta, Observed, Ownership
from tpinference_operator.render.controllerrevision import render_controllerrevision
from tpinference_operator.render.raycluster import Defaults, Owner, render_raycluster
from tpinference_operator.render.service import render_service, service_differs
from tpinference_operator.revision import Revision, is_revision_of, make_revision, parse_revision
from tpinference_operator.steps import Context, new_group, step_of

__all__ = ["Defaults", "plan"]

REVISION_HISTORY = 3
"""Unused revisions that are kept, newest first."""

DYING_NAMESAKE_WAIT_S = 2.0
CONFLICT_LOOK_S = 8.0
"""What is in the way may lack our labels, so nothing tells when it goes."""

_ORDER: tuple[type, ...] = (
    AdoptChild,
    CreateChild,
    RecordStatus,
    ApplyService,
    PatchPodLabel,
    DrainEngine,
    DeleteChild,
)


def plan(observed: Observed, defaults: Defaults) -> Plan:
    """Before: `observed` is one consistent view. After: carrying the plan out, in whole or cut
    anywhere, and planning again converges; with everything in place there is no action."""
    if observed.tpi.deleting:
        # Everything has the object as its owner: the garbage collector does the rest.
        return _nothing(observed)
    finding = _kuberay_finding(observed)
    if finding:
        return _nothing(observed, finding)
    if _predecessors_left(observed):
        return _nothing(observed, wake_after_s=DYING_NAMESAKE_WAIT_S)
    stored = stored_revisions(observed)
    try:
        target = choose_revision(observed, stored, defaults)
    except (InvalidSpec, InvalidQuantity) as error:
        return _nothing(observed, Finding(reason=Reason.INVALID_SPEC, message=str(error)))
    decided = _act(observed, stored, target)
    taken = _taken_names(observed, decided)
    if taken and all(meta.deleting for _, meta in taken):
        return _nothing(observed, wake_after_s=DYING_NAMESAKE_WAIT_S)
    if taken:
        return _nothing(observed, *map(_conflict, taken), wake_after_s=CONFLICT_LOOK_S)
    return decided


def stored_revisions(observed: Observed) -> dict[str, Revision]:
    """Ours, by hash8, oldest first. One that was spoilt by hand can't be used and is passed over:
    its groups go on running."""
    stored: dict[str, Revision] = {}
    for seen in observed.revisions:
        if not seen.meta.mine or seen.meta.deleting:
            continue
        try:
            revision = parse_revision(seen)
        except CorruptRevision:
            continue
        stored[revision.hash8] = revision
    return stored


def choose_revision(
    observed: Observed, stored: dict[str, Revision], defaults: Defaults
) -> Revision:
    """The newest stored revision that the spec equals; a new one only if there is none. Raises
    InvalidSpec or InvalidQuantity when none can be made."""
    spec = observed.tpi.spec
    for revision in reversed(stored.values()):
        if is_revision_of(revision, spec):
            return revision
    return make_revision(spec, render_raycluster(spec, observed.tpi.name, defaults))


def _act(observed: Observed, stored: dict[str, Revision], target: Revision) -> Plan:
    tpi = observed.tpi
    owner = Owner(name=tpi.name, namespace=tpi.namespace, uid=tpi.uid)
    epochs = count(highest_epoch(observed) + 1)
    groups = pair_groups(observed)
    context = Context(
        now=observed.now,
        owner=owner,
        drain_seconds=tpi.spec.update_strategy.drain_seconds,
        target=target,
        stored=stored,
        next_epoch=epochs.__next__,
    )
    removed = _surplus(groups, tpi.spec.replicas)
    staying = [g for g in groups if g.ordinal not in removed]
    replaced = _to_replace(staying, target, observed.now)
    steps = [
        step_of(group, context, remove=group.ordinal in removed, replace=group.ordinal in replaced)
        for group in groups
    ]
    steps += [new_group(ordinal, context) for ordinal in _missing(groups, removed, observed)]
    records = tuple(
        sorted((s.record for s in steps if s.record is not None), key=lambda r: r.ordinal)
    )
    service, service_wake_s = _service_actions(observed, owner)
    actions = [
        *_adoptions(observed, owner),
        *_revision_actions(observed, owner, target, stored),
        *([RecordStatus()] if _decided(records) != _decided(tpi.status.groups) else []),
        *service,
        *(action for step in steps for action in step.actions),
        *_prunings(observed, target, records),
    ]
    wakes = [s for s in (*(step.wake_after_s for step in steps), service_wake_s) if s is not None]
    return Plan(
        actions=(*(a for s in steps for a in s.first), *sorted(actions, key=_position)),
        groups=records,
        epoch=max(highest_epoch(observed), *(r.epoch for r in records), 0),
        update_revision=target.hash8,
        current_revision=_current_revision(observed, groups, records, target),
        wake_after_s=min(wakes, default=None),
        refresh_engines=frozenset().union(*(step.refresh_engines for step in steps)),
        watch_events_of=frozenset().union(*(step.watch_events_of for step in steps)),
    )


def _nothing(observed: Observed, *findings: Finding, wake_after_s: float | None = None) -> Plan:
    status = observed.tpi.status
    return Plan(
        actions=(),
        groups=tuple(status.groups),
        epoch=highest_epoch(observed),
        update_revision=status.update_revision,
        current_revision=status.current_revision,
        findings=findings,
        wake_after_s=wake_after_s,
    )


def _kuberay_finding(observed: Observed) -> Finding | None:
    match observed.kuberay:
        case KubeRay.MISSING:
            return Finding(
                reason=Reason.KUBERAY_NOT_INSTALLED,
                message="the API server does not serve RayCluster (ray.io/v1): install KubeRay "
                "1.6 or newer",
            )
        case KubeRay.TOO_OLD:
            return Finding(
                reason=Reason.KUBERAY_TOO_OLD,
                message="the RayCluster that the API server serves lacks authOptions or "
                "upgradeStrategy: KubeRay must be 1.6 or newer, its CRDs too",
            )
        case KubeRay.SERVED:
            return None


def _predecessors_left(observed: Observed) -> bool:
    metas = [cluster.meta for cluster in observed.ray_clusters]
    metas += [revision.meta for revision in observed.revisions]
    metas += [observed.service.meta] if observed.service else []
    return any(meta.ownership is Ownership.PREDECESSOR for meta in metas)


def _taken_names(observed: Observed, decided: Plan) -> list[tuple[ChildKind, Meta]]:
    """Objects whose names the plan needs: somebody else's, dying ones, or a revision of ours that
    holds nothing. A dying Service is its own case: all the rest goes on without it."""
    wanted = {(a.kind, a.name) for a in decided.actions if isinstance(a, CreateChild)}
    service = observed.service
    if service is not None and not service.meta.deleting and not service.meta.mine:
        wanted.add((ChildKind.SERVICE, service.meta.name))
    present = [
        *((ChildKind.SERVICE, s.meta) for s in (service,) if s),
        *((ChildKind.RAY_CLUSTER, c.meta) for c in observed.ray_clusters),
        *((ChildKind.REVISION, r.meta) for r in observed.revisions),
    ]
    return [(kind, meta) for kind, meta in present if (kind, meta.name) in wanted]


def _conflict(taken: tuple[ChildKind, Meta]) -> Finding:
    kind, meta = taken
    wrong = "holds no revision" if meta.mine else "is not controlled by this TPInference"
    return Finding(
        reason=Reason.NAME_CONFLICT,
        message=f"{kind.value} {meta.name!r} exists and {wrong}: delete it, or use another name",
    )


def _surplus(groups: Sequence[Group], replicas: int) -> frozenset[int]:
    """Ordinals to remove: those already on their way out, the newest unready, the highest."""

    def last_wanted_first(group: Group) -> tuple[bool, bool, float, int]:
        leaving = group.record.drain_started_at is not None or (
            group.cluster is not None and group.cluster.meta.deleting
        )
        created = group.cluster.meta.created.timestamp() if group.cluster else float("inf")
        return (not leaving, group.ready, 0.0 if group.ready else -created, -group.ordinal)

    num_surplus = max(0, len(groups) - replicas)
    return frozenset(g.ordinal for g in sorted(groups, key=last_wanted_first)[:num_surplus])


def _missing(groups: Sequence[Group], removed: frozenset[int], observed: Observed) -> Iterable[int]:
    """Free ordinals, lowest first, as many as replicas are short."""
    have = {group.ordinal for group in groups}
    num_missing = observed.tpi.spec.replicas - (len(groups) - len(removed))
    free = (ordinal for ordinal in count() if ordinal not in have)
    return [next(free) for _ in range(max(0, num_missing))]


def _to_replace(groups: Sequence[Group], target: Revision, now: datetime) -> frozenset[int]:
    """Outdated groups whose turn it is. Those that never answered or stay unready go at once; all
    others one at a time, only while no other is being replaced: an unready one first, then the
    highest ordinal, as long as all the rest answer."""
    outdated = [g for g in groups if g.record.revision != target.hash8]
    at_once = {
        g.ordinal
        for g in outdated
        if not g.ready and (not g.provisioned_once or g.unready_for_long(now))
    }
    in_turn = [g for g in outdated if g.ordinal not in at_once]
    busy = any(
        g.record.drain_started_at is not None
        or (not g.ready and (g.ordinal in at_once or g not in outdated))
        for g in groups
    )
    if busy or not in_turn:
        return frozenset(at_once)
    first = max(in_turn, key=lambda g: (not g.ready, g.ordinal))
    return frozenset({*at_once, first.ordinal})


def _adoptions(observed: Observed, owner: Owner) -> Iterable[Action]:
    children = [
        *((ChildKind.REVISION, r.meta) for r in observed.revisions),
        *((ChildKind.RAY_CLUSTER, c.meta) for c in observed.ray_clusters),
        *((ChildKind.SERVICE, s.meta) for s in (observed.service,) if s),
    ]
    for kind, meta in children:
        if meta.ownership is Ownership.ORPHAN and not meta.deleting:
            yield AdoptChild(
                kind=kind, name=meta.name, uid=meta.uid, owner_reference=owner.reference()
            )


def _revision_actions(
    observed: Observed, owner: Owner, target: Revision, stored: dict[str, Revision]
) -> Iterable[Action]:
    if target.hash8 not in stored:
        number = max((r.revision for r in observed.revisions), default=0) + 1
        manifest = render_controllerrevision(target, owner, number=number)
        yield CreateChild(kind=ChildKind.REVISION, manifest=manifest)


def _service_actions(observed: Observed, owner: Owner) -> tuple[list[Action], float | None]:
    manifest = render_service(observed.tpi.spec, owner)
    live = observed.service
    if live is None:
        return [ApplyService(manifest=manifest, uid=None)], None
    if live.meta.deleting:
        return [], DYING_NAMESAKE_WAIT_S
    if live.meta.ownership is Ownership.OURS and service_differs(live.raw, manifest):
        return [ApplyService(manifest=manifest, uid=live.meta.uid)], None
    return [], None


def _prunings(
    observed: Observed, target: Revision, records: Sequence[GroupStatus]
) -> Iterable[Action]:
    used = {target.hash8, observed.tpi.status.current_revision, *(r.revision for r in records)}
    unused = [
        seen.meta
        for seen in observed.revisions
        if seen.meta.ownership is Ownership.OURS
        and not seen.meta.deleting
        and names.hash8_of(seen.meta.name) not in used
    ]
    for meta in unused[: max(0, len(unused) - REVISION_HISTORY)]:
        yield DeleteChild(
            kind=ChildKind.REVISION, name=meta.name, uid=meta.uid, why="old, and no group uses it"
        )


def _current_revision(
    observed: Observed,
    groups: Sequence[Group],
    records: Sequence[GroupStatus],
    target: Revision,
) -> str:
    """Moves when every group is of the target and has answered."""
    ready = {g.ordinal for g in groups if g.ready}
    done = all(r.revision == target.hash8 and r.ordinal in ready for r in records)
    return target.hash8 if done else observed.tpi.status.current_revision


def _decided(records: Iterable[GroupStatus]) -> list[dict[str, object]]:
    """Of each record, what was decided rather than seen."""
    seen = {"uid", "ready", "startup", "ranks"}
    return [record.model_dump(exclude=seen) for record in records]


def _position(action: Action) -> int:
    """RayClusters are created last, after old ones are told to go."""
    if isinstance(action, CreateChild) and action.kind is ChildKind.RAY_CLUSTER:
        return len(_ORDER)
    return _ORDER.index(type(action))
