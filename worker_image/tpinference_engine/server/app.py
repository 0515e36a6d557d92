"""The life of a serving process: ports, engine, readiness, the end.

The admin port is open from the first second, the OpenAI port once there is something to serve. It
ends in one of three ways: told to (0, after a drain), the engine failed (1, and the failure is
left for the supervisor), or it could not start (1, likewise).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeVar

import uvloop

from tpinference_engine.config import EngineConfig, ServerConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.failure import failure_of
from tpinference_engine.engine.messages import StepReport
from tpinference_engine.engine.status import Failure
from tpinference_engine.errors import StartupTimedOut, StepTimedOut, TPInferenceError
from tpinference_engine.server.admin_app import admin_app
from tpinference_engine.server.canary import Canary
from tpinference_engine.server.failure_file import write_failure
from tpinference_engine.server.gate import Gate
from tpinference_engine.server.generation import Generator
from tpinference_engine.server.generation_route import Serving
from tpinference_engine.server.health import Health, Living
from tpinference_engine.server.listener import Listener, reserve_port
from tpinference_engine.server.metrics import Metrics
from tpinference_engine.server.openai_app import openai_app
from tpinference_engine.server.plan import ServedModel
from tpinference_engine.server.served_model import load_served_model
from tpinference_engine.server.stop_signals import StopSignals, stop_signals

LAST_WORDS_S = 2.0
"""For answers to be written out after their requests have ended."""
_TICK_SLACK_S = 30.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine(Generator, Living, Protocol):
    """The engine as a serving process sees it."""

    async def start(self) -> None: ...

    def watch_steps(self, on_step: Callable[[StepReport], None]) -> None: ...

    async def canary(self, timeout_s: float) -> None: ...

    async def wait_failed(self) -> Failure: ...

    async def drain(self, timeout_s: float) -> int: ...

    async def shutdown(self) -> None: ...


def run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """`serve` on an event loop of its own; the process's exit code."""
    # uvicorn tells of its own start and end, of each of two servers.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(engine_config, server_config))


async def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    engine = AsyncEngine(engine_config, max_requests=server_config.max_queued_requests)
    return await serve_engine(engine, engine_config, server_config)


async def serve_engine(
    engine: Engine, engine_config: EngineConfig, server_config: ServerConfig
) -> int:
    with stop_signals() as stop:
        try:
            async with AsyncExitStack() as stack:
                process = _Process(engine, engine_config, server_config, stop, stack)
                await process.run()
            return 0
        # The outermost frame: whatever ends the engine has to be told to who waits for it.
        except Exception as error:
            failure = engine.status().last_failure or failure_of(error)
            expected = isinstance(error, TPInferenceError)
            logger.error("%s: %s", failure.reason, failure.message, exc_info=not expected)
            write_failure(server_config, failure)
            return 1


class EngineFailed(TPInferenceError):
    """The engine failed while it served; its status has the failure."""


class _Process:
    """What one serving process has; `stack` holds what has to be closed, in reverse."""

    def __init__(
        self,
        engine: Engine,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        stop: StopSignals,
        stack: AsyncExitStack,
    ) -> None:
        self._engine = engine
        self._engine_config = engine_config
        self._config = server_config
        self._stop = stop
        self._stack = stack
        self._gate = Gate(server_config.max_queued_requests)
        self._canary = Canary(
            engine.canary,
            interval_s=server_config.canary_interval_s,
            timeout_s=server_config.canary_timeout_s,
            failure_threshold=server_config.canary_failure_threshold,
        )
        self._health = Health(
            engine,
            self._gate,
            self._canary,
            max_tick_age_s=engine_config.step_timeout_s + _TICK_SLACK_S,
        )
        self._metrics = Metrics(self._health.readings, engine_config.served_model_name[0])
        engine.watch_steps(self._metrics.observe_step)

    async def run(self) -> None:
        # 1. Both ports, or an error at once; the admin port answers from here on.
        config = self._config
        admin_port = self._reserve("admin_port", config.admin_port)
        port = self._reserve("port", config.port)
        admin = admin_app(self._health, self._metrics, self._close_gate)
        await self._listen(admin, admin_port, access_log=False)
        # 2. The model's text side, the engine, its first token, unless told to end before that.
        self._stack.push_async_callback(self._engine.shutdown)
        model = await self._until_stop(self._start())
        if model is None:
            return
        # 3. Serve.
        serving = Serving(self._engine, model, self._gate, self._metrics)
        listener = await self._listen(openai_app(serving), port, access_log=True)
        await self._stack.enter_async_context(_background(self._canary.run()))
        self._health.set_serving()
        logger.info("serving %s on port %d", ", ".join(model.names), listener.port)
        # 4. Until the end, in one way or the other.
        failure = await self._until_stop(self._engine.wait_failed())
        if failure is None:
            failure = await self._drain()
        if failure is not None:
            await self._end_failed(failure)

    def _reserve(self, name: str, port: int) -> socket.socket:
        reserved = reserve_port(name, self._config.host, port)
        self._stack.callback(reserved.close)
        return reserved

    async def _listen(self, app: Any, port: socket.socket, *, access_log: bool) -> Listener:
        listener = Listener(app, port, access_log=access_log)
        self._stack.push_async_callback(listener.close)
        return listener

    async def _start(self) -> ServedModel:
        began = time.monotonic()
        model = await asyncio.to_thread(load_served_model, self._engine_config)
        await self._engine.start()
        await self._pass_first_token(began)
        return model

    async def _pass_first_token(self, began: float) -> None:
        """Warm ranks are no proof: the first step takes the graph's path, in the start's time."""
        limit_s = self._engine_config.startup_timeout_s
        try:
            await self._canary.pass_first(max(began + limit_s - time.monotonic(), 0.0))
        except StepTimedOut as error:
            raise StartupTimedOut(
                f"start-up took longer than startup_timeout_s {limit_s:g}: the engine was "
                f"ready, and of its first step {error}"
            ) from error

    async def _until_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """None if the process is told to end before `work` is done."""
        working = asyncio.create_task(work)
        asked = asyncio.create_task(self._stop.asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            await _cancel(working, asked)

    def _close_gate(self) -> None:
        self._gate.close("the engine is draining, it takes no new requests")

    async def _drain(self) -> Failure | None:
        """Requests have until the deadline to end by themselves; a second signal ends them now.

        The engine may fail meanwhile, which is then how the process ends.
        """
        self._close_gate()
        logger.info("draining: %d requests are open", self._gate.num_inside)
        draining = asyncio.create_task(self._engine.drain(self._config.shutdown_timeout_s))
        urged = asyncio.create_task(self._stop.urged.wait())
        failing = asyncio.create_task(self._engine.wait_failed())
        try:
            await asyncio.wait({draining, urged, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                return failing.result()
            num_aborted = draining.result() if draining.done() else await self._engine.drain(0)
        finally:
            await _cancel(draining, urged, failing)
        if num_aborted:
            logger.warning("aborted %d requests that had not ended", num_aborted)
        await self._wait_written()
        return self._engine.status().last_failure

    async def _end_failed(self, failure: Failure) -> None:
        """Open streams get their error from the engine; here they only have to be written."""
        self._gate.close(f"the engine has failed: {failure.message}")
        await self._wait_written()
        raise EngineFailed(failure.message)

    async def _wait_written(self) -> None:
        with contextlib.suppress(TimeoutError):  # A client that does not read is not waited for.
            async with asyncio.timeout(LAST_WORDS_S):
                await self._gate.wait_empty()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await _cancel(task)
