"""What an engine says about itself: the body of /engine/status, which the operator reads.

Plain data. The names on the wire are camelCase, as in Kubernetes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from tpinference_engine.config import Transport
from tpinference_engine.executor.base import RankPlace, Stage

EngineState = Literal["starting", "ready", "draining", "failed", "stopped"]
FailureReason = Literal[
    "InvalidConfig",
    "InvalidModel",
    "InsufficientResources",
    "RanksNotPlaced",
    "GroupFailed",
    "EngineCrashed",
    "StartupTimedOut",
]
"""The closed list. All but EngineCrashed are named after an error class."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: Stage
    started_at: datetime
    seconds: float | None
    """None while it runs."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    rank: int
    pod: str
    node: str
    device: str
    state: Literal["alive", "dead"]


class Failure(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    reason: FailureReason
    message: str
    time: datetime
    rank: int | None = None
    """The first that failed, where one did and it is known."""
    pod: str | None = None
    node: str | None = None
    exit_code: int | None = None
    """Of the engine core's process, where that is what ended; negative = the signal."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    running: int = 0
    waiting: int = 0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    served_names: tuple[str, ...]
    max_model_len: int | None
    """Tokens of prompt and output together; None before the start has ended."""


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    num_blocks: int = 0
    free_blocks: int = 0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    engine_id: str
    epoch: int
    state: EngineState
    reason: FailureReason | None
    message: str | None
    stages: tuple[StageStatus, ...]
    ranks: tuple[RankStatus, ...]
    last_failure: Failure | None
    requests: RequestCounts
    model: ModelStatus
    cache: CacheStatus
    step_transport: Transport | None = None
    """How the next step reaches the ranks: an idle engine leaves its compiled graph."""


def rank_statuses(places: tuple[RankPlace, ...], *, alive: bool) -> tuple[RankStatus, ...]:
    """A group ends as a whole, whichever rank was the first: `lastFailure` names that one."""
    return tuple(
        RankStatus(
            rank=place.rank,
            pod=place.pod,
            node=place.node,
            device=place.device,
            state="alive" if alive else "dead",
        )
        for place in places
    )
