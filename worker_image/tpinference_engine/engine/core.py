"""The engine's loop, on one thread: take in, schedule, run, update, give out.

That thread owns the executor; nothing else calls it. It does not know who reads its messages: the
same loop runs in a process of its own and in a test's thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.failure import failure_of
from tpinference_engine.engine.messages import (
    AbortRequest,
    AddRequest,
    CallDone,
    CallRanks,
    CoreFailed,
    CoreReady,
    CoreStopped,
    FromCore,
    Progress,
    RunCanary,
    StageBegan,
    StepReport,
    StopCore,
    ToCore,
)
from tpinference_engine.engine.parts import BuildParts, ModelFacts
from tpinference_engine.engine.status import CacheStatus, RequestCounts
from tpinference_engine.engine.stepper import Stepper
from tpinference_engine.errors import EngineBusy, InvalidConfig, RequestRefused, TPInferenceError
from tpinference_engine.executor.base import Executor, Stage
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.scheduler import Scheduler
from tpinference_engine.step import StepInput

IDLE_TICK_S = 1.0
"""An idle core wakes this often to see that its ranks live, and says that it lives itself."""

REST_AFTER_S = 3.0
"""Without a step: then the executor may give up what makes the next step fast."""

CANARY_ID = "canary"
"""Of the reserved request; those of users come with ids of the API server's own making."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    """What a start makes."""

    executor: Executor
    scheduler: Scheduler
    stepper: Stepper


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        build: BuildParts,
        *,
        max_requests: int,
        inbox: queue.SimpleQueue[ToCore],
        emit: Callable[[FromCore], None],
    ) -> None:
        self._config = config
        self._build = build
        self._max_requests = max_requests
        self._inbox = inbox
        self._emit = emit
        self._executor: Executor | None = None
        self._scheduler: Scheduler | None = None
        self._canaries: list[int] = []
        self._arrived_at: dict[str, float] = {}
        """Of requests that no step has begun yet."""
        self._is_stopping = False

    def run(self, on_started: Callable[[], None] = lambda: None) -> bool:
        """Returns when it was told to stop, or False when it failed. Ranks are gone then."""
        try:
            running = self._start()
            on_started()
            self._loop(running)
            self._end_requests(FinishReason.ABORT)
            return True
        except Exception as error:
            self._fail(error)
            return False
        finally:
            self._shut_down()

    def _start(self) -> _Running:
        began = time.monotonic()

        def begin_stage(stage: Stage) -> None:
            self._emit(StageBegan(stage, datetime.now(UTC), time.monotonic() - began))

        parts = self._build(self._config)
        self._executor = executor = parts.executor
        executor.start(begin_stage)
        limits = scheduler_limits(
            self._config, parts.model, executor.num_blocks, self._max_requests
        )
        self._scheduler = scheduler = Scheduler(
            limits,
            epoch=self._config.epoch,
            seed=self._config.seed,
            enable_prefix_caching=self._config.enable_prefix_caching,
        )
        # Counts first: who hears that the core is ready finds all of its status there.
        self._emit_progress(scheduler, [])
        self._emit(CoreReady(time.monotonic() - began, limits, executor.places))
        return _Running(executor, scheduler, Stepper(executor, self._config.device))

    def _loop(self, running: _Running) -> None:
        while True:
            # 1. Requests, aborts and calls. Waits for one if there is nothing to run.
            self._take_in(running)
            if self._is_stopping:
                return
            self._end_late(running.scheduler)
            # 2. What the next step computes.
            step = running.scheduler.schedule()
            if step is not None:
                self._run_step(step, running, self._take_queued_s(running.scheduler))

    def _run_step(
        self, step: StepInput, running: _Running, queued_s: tuple[float, ...] = ()
    ) -> None:
        # 3. One call: it carries this step and returns what the one before it produced.
        output, report = running.stepper.run(step, queued_s)
        # 4. Tokens to their requests.
        outputs = running.scheduler.update(output)
        # 5. And to whoever waits for them.
        if output.tokens:
            self._answer_canaries()
        self._emit_progress(running.scheduler, outputs, report)

    def _take_queued_s(self, scheduler: Scheduler) -> tuple[float, ...]:
        now = time.monotonic()
        arrived = [self._arrived_at.pop(name, None) for name in scheduler.begun]
        return tuple(now - at for at in arrived if at is not None)

    def _take_in(self, running: _Running) -> None:
        if not running.scheduler.has_work and self._canaries:
            running.scheduler.add(_canary_request())
        if not running.scheduler.has_work:
            self._wait(running)
        while not self._is_stopping:
            early_s = running.stepper.early_s
            try:
                message = self._inbox.get(block=early_s > 0, timeout=early_s)
            except queue.Empty:
                return
            self._handle(message, running)

    def _end_late(self, scheduler: Scheduler) -> None:
        late = scheduler.expire(time.monotonic())
        if late:
            self._emit_progress(scheduler, late)

    def _wait(self, running: _Running) -> None:
        try:
            message = self._inbox.get(timeout=IDLE_TICK_S)
        except queue.Empty:
            running.executor.check_alive()
            if running.stepper.idle_s >= REST_AFTER_S:
                running.executor.rest()
            self._emit_progress(running.scheduler, [])
            return
        self._handle(message, running)

    def _handle(self, message: ToCore, running: _Running) -> None:
        match message:
            case AddRequest(request):
                self._add(request, running.scheduler)
            case AbortRequest(request_id):
                aborted = running.scheduler.abort(request_id)
                if aborted is not None:
                    self._emit_progress(running.scheduler, [aborted])
            case CallRanks():
                self._call_ranks(message, running)
            case RunCanary(call_id):
                self._canaries.append(call_id)
            case StopCore():
                self._is_stopping = True

    def _add(self, request: Request, scheduler: Scheduler) -> None:
        """The API server checked it, so a refusal is rare here; it is an answer all the same."""
        try:
            scheduler.add(request)
        except (RequestRefused, EngineBusy) as error:
            refused = RequestOutput(
                request_id=request.request_id,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
            self._emit_progress(scheduler, [refused])
        else:
            self._arrived_at[request.request_id] = time.monotonic()

    def _call_ranks(self, call: CallRanks, running: _Running) -> None:
        """The fence is a flush: after it no logits are pending and no rank works.

        A call that a rank failed in has lost the group, so what it raises ends the loop.
        """
        flush = running.scheduler.flush()
        if flush is not None:
            self._run_step(flush, running)
        try:
            answers = running.executor.collective_rpc(call.method, call.args, call.timeout_s)
        except InvalidConfig as error:  # There is no such method, and no rank was asked.
            self._emit(CallDone(call.call_id, error=str(error)))
        else:
            self._emit(CallDone(call.call_id, tuple(answers)))

    def _answer_canaries(self) -> None:
        """Any token has been through all ranks; only an idle engine needs a request for one."""
        for call_id in self._canaries:
            self._emit(CallDone(call_id))
        self._canaries.clear()

    def _emit_progress(
        self,
        scheduler: Scheduler,
        outputs: list[RequestOutput],
        step: StepReport | None = None,
    ) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._arrived_at.pop(output.request_id, None)
        self._emit(
            Progress(
                outputs=tuple(o for o in outputs if o.request_id != CANARY_ID),
                requests=RequestCounts(
                    running=scheduler.num_running, waiting=scheduler.num_waiting
                ),
                cache=CacheStatus(
                    num_blocks=scheduler.limits.num_blocks, free_blocks=scheduler.num_free_blocks
                ),
                stats=scheduler.stats,
                step_transport=self._executor.step_transport if self._executor else None,
                step=step,
            )
        )

    def _end_requests(self, reason: FinishReason, error: str | None = None) -> None:
        if self._scheduler is not None:
            outputs = self._scheduler.drop_all(reason, error)
            self._emit_progress(self._scheduler, outputs)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TPInferenceError):
            logger.exception("the engine's loop ended by an error of its own")
        failure = failure_of(error, self._executor.places if self._executor else ())
        self._end_requests(FinishReason.ERROR, failure.message)
        self._emit(CoreFailed(failure))

    def _shut_down(self) -> None:
        try:
            if self._executor is not None:
                self._executor.shutdown()
        except Exception:
            logger.exception("the ranks could not be shut down")
        self._emit(CoreStopped())


def scheduler_limits(
    config: EngineConfig, model: ModelFacts, num_blocks: int, max_requests: int
) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_requests=max_requests + 1,  # The canary takes nobody's place.
        max_model_len=config.max_model_len or model.max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        scheduling_policy=config.scheduling_policy,
    )


def _canary_request() -> Request:
    return Request(
        request_id=CANARY_ID,
        prompt_token_ids=(0,),
        params=SamplingParams(max_tokens=1, temperature=0.0),
    )
