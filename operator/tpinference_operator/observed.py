"""What is seen of the world, as small frozen records; `observe.py` makes them from raw objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.api.v1alpha1 import TPInferenceSpec

Raw = Mapping[str, Any]


class KubeRay(Enum):
    """What the API server serves of ray.io/v1."""

    SERVED = "served"
    MISSING = "missing"
    TOO_OLD = "too old"


class Ownership(Enum):
    """Whose an object is, by the UID of its controller; labels don't count."""

    OURS = "ours"
    ORPHAN = "orphan"
    """Nobody's, and it has our labels: adopted."""
    PREDECESSOR = "predecessor"
    """Of a TPInference of this name that was deleted: the garbage collector is on its way."""
    FOREIGN = "foreign"
    """Somebody else's under a name of ours: never touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Of one object, what decisions need."""

    name: str
    uid: str
    ownership: Ownership
    controller_uid: str | None
    labels: Mapping[str, str]
    created: datetime
    deleting: bool

    @property
    def mine(self) -> bool:
        return self.ownership in (Ownership.OURS, Ownership.ORPHAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCondition:
    """A condition on somebody else's object."""

    type: str
    status: str
    reason: str
    message: str
    changed: datetime
    """When its status last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRayCluster:
    """A RayCluster. Its state, Provisioned and replica counts are left out on purpose: they stay
    "ready" through every failure."""

    meta: Meta
    ordinal: int
    revision: str
    epoch: int
    num_hosts: int
    """Worker pods that it asks for: of its own revision, not of the spec as it is now."""
    generation: int
    """Grows with each edit of the spec; we make none."""
    spec: Raw
    """For comparing it with the stored rendering."""
    has_status: bool
    """KubeRay has written anything at all."""
    conditions: tuple[SeenCondition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerProblem:
    """Why a container does not run: a waiting reason such as ImagePullBackOff, or how it ended.
    One that ended because its pod was deleted has no problem."""

    reason: str
    message: str
    exit_code: int | None
    ended_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPod:
    """A head or worker pod; `cluster_uid` is the RayCluster that controls it."""

    meta: Meta
    cluster_uid: str | None
    role: str
    traffic: str
    ordinal: int
    epoch: int
    phase: str
    ready: bool
    ready_changed: datetime
    """When it last became ready or unready."""
    scheduled: bool
    unschedulable: str
    """The scheduler's words, or empty."""
    ip: str
    node: str
    problem: ContainerProblem | None

    @property
    def lost(self) -> bool:
        """Ended or going: it can't come back (restartPolicy Never)."""
        return self.meta.deleting or self.phase in ("Failed", "Succeeded")

    @property
    def what_is_wrong(self) -> str:
        """In the kubelet's words; empty when nothing is."""
        if self.problem is None:
            return ""
        said = f"pod {self.meta.name}: {self.problem.reason}: {self.problem.message}".rstrip(": ")
        code = self.problem.exit_code
        return said if code is None else f"{said} (exit code {code})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenService:
    """The Service `<tpi>`. `raw` is for comparing it with the rendered one."""

    meta: Meta
    raw: Raw
    cluster_ip: str
    ingress: tuple[str, ...]
    """Addresses that a load balancer gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRevision:
    """A ControllerRevision; `data` is what `revision.py` wrote."""

    meta: Meta
    revision: int
    data: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEvent:
    """A Warning event about a child of ours."""

    involved_uid: str
    reason: str
    message: str
    last_seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStage:
    name: str
    started_at: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRank:
    rank: int
    pod: str
    node: str
    device: str
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    rank: int | None
    pod: str
    node: str
    reason: str
    exit_code: int | None
    message: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEngine:
    """Answer of GET /engine/status of one head pod. Enrichment: never what Ready stands on."""

    engine_id: str
    epoch: int
    state: str
    """starting, ready, draining, failed or stopped."""
    reason: str
    message: str
    stages: tuple[EngineStage, ...]
    ranks: tuple[EngineRank, ...]
    last_failure: EngineFailure | None
    in_flight: int
    """Requests that run or wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TPInference:
    """The object itself; `status` is what was recorded last."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    created: datetime
    deleting: bool
    spec: TPInferenceSpec
    status: TPInferenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """Raw objects as the indexes hold them. All that carry our name label, and besides any object
    whose name the plan wanted and found taken (apply gets it when a create says AlreadyExists)."""

    ray_clusters: tuple[Raw, ...] = ()
    pods: tuple[Raw, ...] = ()
    services: tuple[Raw, ...] = ()
    revisions: tuple[Raw, ...] = ()
    events: tuple[Raw, ...] = ()
    """Events of our RayClusters and pods, by involvedObject.uid."""
    engines: Mapping[str, Raw] = field(default_factory=dict)
    """Body of /engine/status by UID of the head pod; absent when the last fetch failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One consistent view for one reconcile."""

    now: datetime
    kuberay: KubeRay
    tpi: TPInference
    ray_clusters: tuple[SeenRayCluster, ...]
    """By ordinal, then epoch."""
    pods: tuple[SeenPod, ...]
    service: SeenService | None
    revisions: tuple[SeenRevision, ...]
    """By revision number."""
    events: tuple[SeenEvent, ...]
    """Newest first."""
    engines: Mapping[str, SeenEngine]
    """By UID of the head pod."""
