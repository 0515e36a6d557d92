"""What is known of an engine core from what it said: state, stages, ranks, failure, counts.

Kept beside the streams and not in them, so that status can be asked for at any time, also after
the core has gone.
"""

from __future__ import annotations

import time

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.messages import CoreReady, Progress, StageBegan
from tpinference_engine.engine.status import (
    CacheStatus,
    EngineState,
    EngineStatus,
    Failure,
    ModelStatus,
    RequestCounts,
    StageStatus,
    rank_statuses,
)
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.stats import SchedulerStats


class StatusBoard:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stages: list[StageBegan] = []
        self._ready: CoreReady | None = None
        self._progress = Progress((), RequestCounts(), CacheStatus())
        self._heard_at = time.monotonic()
        self.state: EngineState = "starting"
        self.failure: Failure | None = None

    @property
    def limits(self) -> SchedulerLimits | None:
        """None before the start has ended."""
        return self._ready.limits if self._ready else None

    @property
    def stage(self) -> str:
        return self._stages[-1].name if self._stages else "the first stage"

    @property
    def stats(self) -> SchedulerStats:
        return self._progress.stats

    @property
    def tick_age_s(self) -> float:
        """Since the core's loop last said anything; idle it does so every second."""
        return time.monotonic() - self._heard_at

    @property
    def _has_ranks(self) -> bool:
        """A failure kills them all, and so does the core's end."""
        return self.state not in ("failed", "stopped")

    def hear(self, message: StageBegan | CoreReady | Progress) -> None:
        self._heard_at = time.monotonic()
        match message:
            case StageBegan():
                self._stages.append(message)
            case CoreReady():
                self._ready = message
                if self.state == "starting":
                    self.state = "ready"
            case Progress():
                self._progress = message

    def fail(self, failure: Failure) -> None:
        """The first failure is the cause; later ones follow from it."""
        if self.failure is None and self.state != "stopped":
            self.failure, self.state = failure, "failed"
            self._progress = Progress((), RequestCounts(), self._progress.cache, self.stats)

    def status(self) -> EngineStatus:
        ready, failure, limits = self._ready, self.failure, self.limits
        return EngineStatus(
            engine_id=self._config.engine_id,
            epoch=self._config.epoch,
            state=self.state,
            reason=failure.reason if failure else None,
            message=failure.message if failure else None,
            stages=self._stage_statuses(),
            ranks=rank_statuses(ready.places, alive=self._has_ranks) if ready else (),
            last_failure=failure,
            requests=self._progress.requests,
            model=ModelStatus(
                served_names=self._config.served_model_name,
                max_model_len=limits.max_model_len if limits else None,
            ),
            cache=self._progress.cache,
            step_transport=self._progress.step_transport,
        )

    def _stage_statuses(self) -> tuple[StageStatus, ...]:
        """A stage ends where the next one begins; the last where the start ended."""
        ends: list[float | None] = [stage.elapsed_s for stage in self._stages[1:]]
        ends.append(self._ready.elapsed_s if self._ready else None)
        return tuple(
            StageStatus(
                name=stage.name,
                started_at=stage.at,
                seconds=None if end is None else round(end - stage.elapsed_s, 3),
            )
            for stage, end in zip(self._stages, ends, strict=False)
        )
