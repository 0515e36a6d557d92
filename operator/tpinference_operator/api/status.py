"""The status of a TPInference. What can't be seen later is recorded here before it is acted on:
`epoch` and, of each group, `epoch`, `restarts`, `recentRestarts`, `drainStartedAt`, `lastFailure`.

Every field has a default: a status that was lost or cut still parses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tpinference_operator.api.base import ApiModel, list_map

Short = Annotated[str, Field(max_length=253)]
MAX_REASON = 128
Reason = Annotated[str, Field(max_length=MAX_REASON)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0)]

MAX_MESSAGE = 1024
MAX_RANKS = 128
MAX_GROUPS = 66
MAX_RECENT_RESTARTS = 8


class Condition(ApiModel):
    """A metav1.Condition."""

    type: Annotated[str, Field(max_length=64)]
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=128)]
    """One word of the closed list in docs/reference.md."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """In the cluster's or the engine's own words where there are any."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation that this is about."""
    last_transition_time: Time
    """When status last changed."""


class Layout(ApiModel):
    """What the spec's parallelism comes to, for one group."""

    tensor: Count
    """Ranks."""
    nodes: Count
    """Worker pods."""
    gpus_per_node: Count
    """Ranks of one worker pod."""
    gpus: Count
    """GPUs of one group; 0 on device CPU."""


class Stage(ApiModel):
    """One step of a start-up."""

    name: Short
    """Name of the stage."""
    started_at: Time
    """When it began."""
    seconds: Annotated[int, Field(ge=0)] | None = None
    """How long it took; absent while it lasts."""


class Startup(ApiModel):
    """How far an engine has come."""

    stage: Short = ""
    """The stage that lasts, or the last one that ended."""
    stages: Annotated[list[Stage], Field(max_length=16), list_map("name")] = []
    """All stages so far, in order."""


class Rank(ApiModel):
    """One rank and where it is."""

    rank: Count
    """Number of the rank."""
    pod: Short = ""
    """Its pod."""
    node: Short = ""
    """Its node."""
    gpu: Short = ""
    """Its device."""
    state: Short = ""
    """alive or dead."""


class LastFailure(ApiModel):
    """Why a group last failed."""

    rank: Count | None = None
    """The first rank that failed, where it is known."""
    pod: Short = ""
    """Its pod."""
    node: Short = ""
    """Its node."""
    reason: Reason = ""
    """One word of the closed list in docs/reference.md."""
    exit_code: int | None = None
    """Exit code or minus the signal of the process that ended."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """In the engine's own words."""
    time: Time | None = None
    """When it failed."""
    epoch: Count = 0
    """Incarnation of the group that failed."""


class GroupStatus(ApiModel):
    """One group: what was decided about it, then what is seen of it."""

    name: Short
    """Its RayCluster."""
    ordinal: Count
    """Which replica it is."""
    revision: Short
    """hash8 of the revision it was stamped from."""
    epoch: Count
    """Its incarnation; older RayClusters of this ordinal are deleted."""
    decided_at: Time | None = None
    """When this incarnation was decided on. Pods of the one before it may end for 30 s from then
    on."""
    uid: Short = ""
    """UID of its RayCluster once that was seen; gone after that means lost."""
    ready: bool = False
    """The engine answers and gets traffic."""
    restarts: Count = 0
    """Restarts by the operator because the group was lost."""
    recent_restarts: Annotated[list[Time], Field(max_length=MAX_RECENT_RESTARTS)] = []
    """Their times within the last hour; the back-off stands on them."""
    drain_started_at: Time | None = None
    """When the group was told to finish its requests before it is deleted."""
    drain_idle_at: Time | None = None
    """Since when the engine that drains has no request left."""
    startup: Startup = Startup()
    ranks: Annotated[list[Rank], Field(max_length=MAX_RANKS), list_map("rank")] = []
    """Where the ranks are; failing ones first, at most 128 over all groups."""
    last_failure: LastFailure | None = None


class TPInferenceStatus(ApiModel):
    """What the operator decided and saw."""

    observed_generation: Annotated[int, Field(ge=-1)] = -1
    """metadata.generation that this status is about; -1 before the operator has seen it, so that
    nothing takes an unseen object for a finished one."""
    conditions: Annotated[list[Condition], Field(max_length=16), list_map("type")] = []
    """See docs/reference.md for types and reasons."""
    replicas: Count = 0
    """Groups that exist."""
    ready_replicas: Count = 0
    """Groups that answer and get traffic."""
    updated_replicas: Count = 0
    """Groups of the update revision."""
    available_replicas: Count = 0
    """Groups of any revision that answer through the Service."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the head pods, for the scale subresource."""
    layout: Layout | None = None
    url: Annotated[str, Field(max_length=512)] = ""
    """Base URL of the OpenAI API inside the cluster."""
    current_revision: Short = ""
    """Revision that all groups last agreed on."""
    update_revision: Short = ""
    """Revision of the spec as it is now."""
    epoch: Count = 0
    """Highest epoch given so far; the next group gets one more."""
    groups: Annotated[list[GroupStatus], Field(max_length=MAX_GROUPS), list_map("name")] = []
    """All groups, by ordinal."""

    def to_raw(self) -> dict[str, Any]:
        """As written: what is empty is absent, zeros stay (they are printed)."""
        raw: dict[str, Any] = _without_empty(super().to_raw())
        return raw


def _without_empty(node: Any) -> Any:
    if isinstance(node, dict):
        kept = {key: _without_empty(value) for key, value in node.items()}
        return {key: value for key, value in kept.items() if value not in ("", {}, [])}
    if isinstance(node, list):
        return [_without_empty(item) for item in node]
    return node
