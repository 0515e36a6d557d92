"""What the asyncio side and the engine core say to each other, by queue or by ZeroMQ.

Plain data with a tag, encoded with msgspec. Every added request gets outputs until one with a
finish reason, exactly one; every call gets one CallDone, unless the core fails or stops first.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tpinference_engine.config import Transport
from tpinference_engine.engine.status import CacheStatus, Failure, RequestCounts
from tpinference_engine.executor.base import RankPlace, Stage
from tpinference_engine.request import Request, RequestOutput
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.stats import SchedulerStats


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class CallRanks(msgspec.Struct, frozen=True, tag=True):
    """A collective RPC, behind a fence. Arguments and answers are what msgpack can hold."""

    call_id: int
    method: str
    args: tuple[Any, ...]
    timeout_s: float | None


class RunCanary(msgspec.Struct, frozen=True, tag=True):
    """Answered by the next token that comes back from the ranks."""

    call_id: int


class StopCore(msgspec.Struct, frozen=True, tag=True):
    """Ends the loop; requests that are left are aborted."""


ToCore = AddRequest | AbortRequest | CallRanks | RunCanary | StopCore


class StageBegan(msgspec.Struct, frozen=True, tag=True):
    name: Stage
    at: datetime
    elapsed_s: float
    """Since the core began to start, by a clock that does not jump."""


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    elapsed_s: float
    limits: SchedulerLimits
    places: tuple[RankPlace, ...]


class StepReport(msgspec.Struct, frozen=True):
    """One call, as the driver saw it."""

    seconds: float
    """From the answer to the call before, or from its own sending if the device was idle."""
    num_tokens: int
    """Of its step, in all requests."""
    skews_us: tuple[int, ...]
    """How long each rank waited for its device. Of a call that came in time none is 0; among
    themselves they differ by what one rank is slower than another."""
    waited_for_step: bool
    """Whether the device had a step to finish when the call came."""
    queued_s: tuple[float, ...] = ()
    """How long the requests that begin with this step had been waiting."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """After every step, and every second while idle: the loop's sign of life."""

    outputs: tuple[RequestOutput, ...]
    requests: RequestCounts
    cache: CacheStatus
    stats: SchedulerStats = SchedulerStats()
    step_transport: Transport | None = None
    step: StepReport | None = None


class CallDone(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    answers: tuple[Any, ...] = ()
    error: str | None = None


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


class CoreStopped(msgspec.Struct, frozen=True, tag=True):
    """The last message: ranks are gone and nothing of the core is left."""


FromCore = StageBegan | CoreReady | Progress | CallDone | CoreFailed | CoreStopped

encoder = msgspec.msgpack.Encoder()
to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
