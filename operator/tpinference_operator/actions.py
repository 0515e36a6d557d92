"""What a plan consists of: small frozen orders that `apply.py` carries out one after the other.

A plan is safe to cut anywhere: each prefix of its actions leaves a state from which the next plan
goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tpinference_operator.api.status import GroupStatus

Manifest = Mapping[str, Any]


class ChildKind(Enum):
    """Kinds that plan creates, adopts or deletes."""

    RAY_CLUSTER = "RayCluster"
    REVISION = "ControllerRevision"
    SERVICE = "Service"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateChild:
    """POST, never an update. AlreadyExists: get the namesake, show it to the next observe, stop
    this plan and plan again (a dying one is waited for, a foreign one becomes NameConflict)."""

    kind: ChildKind
    manifest: Manifest

    @property
    def name(self) -> str:
        name: str = self.manifest["metadata"]["name"]
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptChild:
    """Make us the controller of an orphan: merge patch of the owner references with the orphan's
    uid and resourceVersion in the body, so that a namesake or one that changed is refused."""

    kind: ChildKind
    name: str
    uid: str
    owner_reference: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild:
    """DELETE with preconditions.uid, propagation Background. NotFound and a failed precondition
    are success: the object that was meant is gone."""

    kind: ChildKind
    name: str
    uid: str
    why: str
    """For the log and our Event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyService:
    """Server-side apply: sent only when the Service is absent or ours and different. Ports that it
    leaves because they are another manager's are taken away by a merge patch of spec.ports."""

    manifest: Manifest
    uid: str | None
    """The Service that is ours, its fields taken by force. None: there is none; whatever has the
    name after all is not touched, and it ends this plan as it does for CreateChild."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPodLabel:
    """Merge patch of one label with the pod's uid in the body, so that a namesake is refused."""

    pod: str
    uid: str
    label: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEngine:
    """POST /drain on the admin port. Failing is no error: the deadline decides."""

    pod_uid: str
    pod_ip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStatus:
    """Write the whole status with resourceVersion, now. When that is refused the rest of the plan
    must not run: what follows stands on it."""


Action = (
    CreateChild
    | AdoptChild
    | DeleteChild
    | ApplyService
    | PatchPodLabel
    | DrainEngine
    | RecordStatus
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why plan could not go on: becomes a condition."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now, in this order, and when to look again if nothing happens before."""

    actions: tuple[Action, ...]
    groups: tuple[GroupStatus, ...]
    """Decisions about each group, as they are to be recorded; compute_status adds what is seen."""
    epoch: int
    """Highest epoch given, this plan's included."""
    update_revision: str
    """hash8 of the revision that the spec is; empty when plan could not tell."""
    current_revision: str
    """hash8 of the revision that all groups last agreed on; empty before the first."""
    findings: tuple[Finding, ...] = ()
    wake_after_s: float | None = None
    """None = only an event can change anything."""
    refresh_engines: frozenset[str] = frozenset()
    """UIDs of head pods whose /engine/status should be fetched again before the next plan."""
    watch_events_of: frozenset[str] = frozenset()
    """UIDs of children that make no progress: list their Events."""
