"""The engine's asyncio face: requests in, streams of tokens out.

The core runs in a process of its own and is only reached by messages. This side keeps the open
requests, refuses what can't be served before it is sent, and ends every stream when the core ends.
It holds no text and does no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.failure import error_of, failure_of, failure_of_exit
from tpinference_engine.engine.link import CoreLink, ThreadLink
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
)
from tpinference_engine.engine.parts import BuildParts, build_parts
from tpinference_engine.engine.process import ProcessLink
from tpinference_engine.engine.request_stream import RequestStream
from tpinference_engine.engine.status import EngineStatus, Failure
from tpinference_engine.engine.status_board import StatusBoard
from tpinference_engine.errors import (
    EngineBusy,
    EngineStopped,
    RequestRefused,
    StartupTimedOut,
    StepTimedOut,
    TPInferenceError,
)
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.scheduler.admission import check_request
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.stats import SchedulerStats

SHUTDOWN_TIMEOUT_S = 10.0
"""A core that has not ended by then is killed; its ranks then end by themselves."""
STARTING_SHUTDOWN_TIMEOUT_S = 2.0
"""A start can't be interrupted from inside, and nothing is lost with it."""
ABORT_TIMEOUT_S = 2.0
"""After a drain's deadline, for the core to confirm what was aborted."""


class AsyncEngine:
    def __init__(
        self,
        config: EngineConfig,
        *,
        build: BuildParts = build_parts,
        in_process: bool = False,
        max_requests: int = 1024,
    ) -> None:
        """`max_requests` bounds the requests that are running or waiting."""
        self._config = config
        self._max_requests = max_requests
        make_link = ThreadLink if in_process else ProcessLink
        self._link: CoreLink = make_link(
            config, build, max_requests, self._on_message, self._on_exit
        )
        self._board = StatusBoard(config)
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self._call_ids = itertools.count()
        self._changed = asyncio.Event()
        self._on_step: Callable[[StepReport], None] = lambda report: None

    # Life.

    async def start(self, timeout_s: float | None = None) -> None:
        """Returns when requests can be served. Raises what the start failed for."""
        timeout_s = self._config.startup_timeout_s if timeout_s is None else timeout_s
        await self._link.open()
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self._board.state != "starting")
        except TimeoutError:
            waited = f"{self._board.stage} has not ended {timeout_s:g} s after the start"
            self._fail(failure_of(StartupTimedOut(waited)))
        if self._board.failure is not None:
            raise error_of(self._board.failure)

    async def drain(self, timeout_s: float) -> int:
        """Admits nothing more and waits for open requests; how many it had to abort at the end."""
        if self._board.state == "ready":
            self._board.state = "draining"
        if await self._wait_for_streams(timeout_s):
            return 0
        left = list(self._streams)
        for request_id in left:
            self._send_abort(request_id)
        await self._wait_for_streams(ABORT_TIMEOUT_S)
        return len(left)

    async def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Ends the core and its ranks; open requests are aborted. Idempotent."""
        if self._board.state != "failed":
            self._board.state = "stopped"
        has_started = self._board.limits is not None
        await self._link.close(
            timeout_s if has_started else min(timeout_s, STARTING_SHUTDOWN_TIMEOUT_S)
        )
        self._end_everything(FinishReason.ABORT, "the engine was shut down")

    async def wait_failed(self) -> Failure:
        """Returns when the engine has failed, for whoever has to end the process then."""
        await self._until(lambda: self._board.failure is not None)
        assert self._board.failure is not None, "just waited for"
        return self._board.failure

    # What it says.

    def status(self) -> EngineStatus:
        return self._board.status()

    @property
    def stats(self) -> SchedulerStats:
        return self._board.stats

    def watch_steps(self, on_step: Callable[[StepReport], None]) -> None:
        """`on_step` hears of every step from now on."""
        self._on_step = on_step

    @property
    def limits(self) -> SchedulerLimits:
        """Known after start."""
        limits = self._board.limits
        if limits is None:
            raise EngineStopped("the engine has not started")
        return limits

    @property
    def tick_age_s(self) -> float:
        """Age of the core's last sign of life: about a second when idle, a step when busy."""
        return self._board.tick_age_s

    # Requests.

    def check(self, request: Request) -> None:
        """Raises what `generate` would raise now, and sends nothing."""
        self._check_admitting()
        check_request(request, self.limits)
        if request.request_id in self._streams:
            raise RequestRefused(f"request id {request.request_id!r} is in use already")
        if len(self._streams) >= self._max_requests:
            raise EngineBusy(
                f"{len(self._streams)} requests are running or waiting, "
                f"the limit is {self._max_requests}"
            )

    def generate(self, request: Request) -> RequestStream:
        """The request is checked and sent now; closing the stream before its end aborts it."""
        self.check(request)
        stream = RequestStream(request.request_id, self._send_abort)
        self._streams[request.request_id] = stream
        self._link.send(AddRequest(request))
        return stream

    async def abort(self, request_id: str) -> None:
        """The request's stream ends with ABORT, unless it ends by itself before that."""
        self._send_abort(request_id)

    # Calls.

    async def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """`method` of every rank's worker, in rank order, between two steps."""
        call_id = next(self._call_ids)
        return list(await self._call(call_id, CallRanks(call_id, method, tuple(args), timeout_s)))

    async def canary(self, timeout_s: float) -> None:
        """One token through all ranks. Raises StepTimedOut or what the engine failed for."""
        call_id = next(self._call_ids)
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(call_id, RunCanary(call_id))
        except TimeoutError:
            raise StepTimedOut(f"no token came back in {timeout_s:g} s") from None

    async def _call(self, call_id: int, message: CallRanks | RunCanary) -> tuple[Any, ...]:
        self._check_running()
        answer: asyncio.Future[tuple[Any, ...]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._link.send(message)
            return await answer
        finally:
            self._calls.pop(call_id, None)

    # What the core says, on the event loop.

    def _on_message(self, message: FromCore) -> None:
        match message:
            case Progress(outputs):
                self._board.hear(message)
                for output in outputs:
                    self._deliver(output)
                if message.step is not None:
                    self._on_step(message.step)
            case StageBegan() | CoreReady():
                self._board.hear(message)
            case CallDone():
                self._finish_call(message)
            case CoreFailed(failure):
                self._fail(failure)
            case CoreStopped():
                pass  # The link tells of the exit itself.
        self._changed.set()

    def _on_exit(self, exit_code: int) -> None:
        if self._board.state != "stopped":
            self._fail(failure_of_exit(exit_code))
        self._end_everything(FinishReason.ABORT, "the engine was shut down")

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.push(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]

    def _finish_call(self, done: CallDone) -> None:
        answer = self._calls.get(done.call_id)
        if answer is None or answer.done():
            return
        if done.error is None:
            answer.set_result(done.answers)
        else:
            answer.set_exception(TPInferenceError(done.error))

    def _fail(self, failure: Failure) -> None:
        self._board.fail(failure)
        self._end_everything(FinishReason.ERROR, failure.message)

    def _end_everything(self, reason: FinishReason, message: str) -> None:
        """Nobody waits for a core that is gone."""
        for request_id in list(self._streams):
            self._deliver(
                RequestOutput(
                    request_id=request_id, token_ids=(), finish_reason=reason, error=message
                )
            )
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineStopped(message))
        self._changed.set()

    # Small things.

    def _send_abort(self, request_id: str) -> None:
        """Open until the core says that it has ended, so that open requests are bounded."""
        if request_id in self._streams:
            self._link.send(AbortRequest(request_id))

    def _check_admitting(self) -> None:
        self._check_running()
        if self._board.state != "ready":
            raise EngineStopped(f"the engine is {self._board.state}, it takes no new requests")

    def _check_running(self) -> None:
        if self._board.failure is not None:
            raise EngineStopped(f"the engine has failed: {self._board.failure.message}")
        if self._board.state in ("starting", "stopped"):
            raise EngineStopped(f"the engine is {self._board.state}")

    async def _wait_for_streams(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._streams)
        except TimeoutError:
            return False
        return True

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
