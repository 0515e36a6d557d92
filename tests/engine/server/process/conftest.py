"""A serving process inside this one, over an engine whose every turn a test decides."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tpinference_engine.config import EngineConfig, ServerConfig
from tpinference_engine.engine.failure import error_of
from tpinference_engine.engine.messages import StepReport
from tpinference_engine.engine.status import (
    CacheStatus,
    EngineStatus,
    Failure,
    ModelStatus,
    RequestCounts,
)
from tpinference_engine.errors import StepTimedOut
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.scheduler.stats import SchedulerStats
from tpinference_engine.server.app import serve_engine

READY = EngineStatus(
    engine_id="e",
    epoch=0,
    state="ready",
    reason=None,
    message=None,
    stages=(),
    ranks=(),
    last_failure=None,
    requests=RequestCounts(),
    model=ModelStatus(served_names=("tiny",), max_model_len=100),
    cache=CacheStatus(num_blocks=8, free_blocks=6),
)
FAILURE = Failure(
    reason="GroupFailed", message="rank 1 died", time=datetime(2026, 1, 2, tzinfo=UTC), rank=1
)


class StagedEngine:
    """An engine whose every turn a test decides."""

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.failed = asyncio.Event()
        self.aborting = asyncio.Event()
        self.start_failure: Failure | None = None
        self.canary_error: Exception | None = None
        self.canary_may_pass = asyncio.Event()
        self.canary_may_pass.set()
        self.num_canaries = 0
        self.canary_sent = asyncio.Condition()
        self.running = 0
        self.tick_age_s = 0.0
        self.stats = SchedulerStats(prefix_cache_queries=12, prefix_cache_hits=8, num_preemptions=3)
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self.was_shut_down = False
        self._status = msgspec.structs.replace(READY, state="starting")

    async def start(self) -> None:
        await self.may_start.wait()
        if self.start_failure is not None:
            self._fail(self.start_failure)
            raise error_of(self.start_failure)
        self._status = READY

    def status(self) -> EngineStatus:
        return self._status

    def watch_steps(self, on_step: Callable[[StepReport], None]) -> None:
        self.on_step = on_step

    def fail(self) -> None:
        self._fail(FAILURE)
        self.failed.set()

    def _fail(self, failure: Failure) -> None:
        self._status = msgspec.structs.replace(
            READY, state="failed", message=failure.message, last_failure=failure
        )

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """One token, and the second when it may, or when the engine fails or aborts."""

        def output(token_ids: tuple[int, ...], reason: FinishReason | None) -> RequestOutput:
            return RequestOutput(
                request_id=request.request_id, token_ids=token_ids, finish_reason=reason
            )

        self.running += 1
        try:
            yield output((ord("a"),), None)
            ends = {
                asyncio.create_task(event.wait()): (tokens, reason)
                for event, tokens, reason in (
                    (self.may_answer, (ord("b"),), FinishReason.LENGTH),
                    (self.failed, (), FinishReason.ERROR),
                    (self.aborting, (), FinishReason.ABORT),
                )
            }
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in ends:
                    task.cancel()
            yield output(*ends[done.pop()])
        finally:
            self.running -= 1

    async def canary(self, timeout_s: float) -> None:
        self.num_canaries += 1
        async with self.canary_sent:
            self.canary_sent.notify_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self.canary_may_pass.wait()
        except TimeoutError:
            raise StepTimedOut(f"no token came back in {timeout_s:g} s") from None
        if self.canary_error is not None:
            raise self.canary_error

    async def wait_failed(self) -> Failure:
        await self.failed.wait()
        return FAILURE

    async def drain(self, timeout_s: float) -> int:
        """A failure ends all streams, so the drain has nothing to wait for, as in the real one."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running and not self.failed.is_set():
                    await asyncio.sleep(0)
            return 0
        except TimeoutError:
            self.aborting.set()
            return self.running

    async def shutdown(self) -> None:
        self.was_shut_down = True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


MakeEngine = Callable[[EngineConfig], Any]


class Process:
    """`serve_engine` at work, and what can be asked of it from outside."""

    def __init__(
        self, make_engine: MakeEngine, model: Path, startup_timeout_s: float, **changes: Any
    ) -> None:
        self.failure_file = model.parent / "failure.json"
        settings = {"port": free_port(), "admin_port": free_port(), "host": "127.0.0.1"}
        settings |= {"failure_file": self.failure_file, "pod_name": "pod-0", "node_name": "n"}
        self.config = ServerConfig(**{**settings, **changes})
        engine_config = EngineConfig(
            model=model,
            served_model_name=("tiny",),
            device="cpu",
            num_gpu_blocks_override=64,
            distributed_executor_backend="uni",
            startup_timeout_s=startup_timeout_s,
        )
        self.engine = make_engine(engine_config)
        self.task = asyncio.create_task(serve_engine(self.engine, engine_config, self.config))
        self.admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.config.admin_port}")
        base_url = f"http://127.0.0.1:{self.config.port}/v1"
        self.client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    async def wait_ready(self) -> None:
        if isinstance(self.engine, StagedEngine):
            self.engine.may_start.set()
        await self.wait_for("/readyz", lambda answer: answer.status_code == 200)

    async def wait_for(self, path: str, holds: Callable[[httpx.Response], bool]) -> httpx.Response:
        answer = None
        try:
            async with asyncio.timeout(5):
                while True:
                    answer = await self.ask(path)
                    if answer is not None and holds(answer):
                        return answer
                    await asyncio.sleep(0)
        except TimeoutError:
            seen = (answer.status_code, answer.text) if answer is not None else "no answer"
            raise AssertionError(f"{path} never came to hold, last seen {seen}") from None

    async def ask(self, path: str) -> httpx.Response | None:
        try:
            return await self.admin.get(path)
        except httpx.ConnectError:
            assert not self.task.done(), self.task
            return None

    async def stream(self) -> AsyncIterator[Any]:
        """Open, with its first token seen."""
        stream = aiter(await self.client.completions.create(model="tiny", prompt="p", stream=True))
        assert (await anext(stream)).choices[0].text == "a"
        return stream

    async def exit_code(self) -> int:
        async with asyncio.timeout(10):
            code = await self.task
        for port in (self.config.port, self.config.admin_port):
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port)):
                pass
        return code

    @property
    def failure(self) -> dict[str, Any] | None:
        return json.loads(self.failure_file.read_bytes()) if self.failure_file.exists() else None

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.admin.aclose()
        await self.client.close()


StartProcess = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(served_directory: Path) -> AsyncIterator[StartProcess]:
    processes: list[Process] = []

    async def make(
        make_engine: MakeEngine = lambda _: StagedEngine(),
        *,
        startup_timeout_s: float = 60.0,
        **changes: Any,
    ) -> Process:
        """`changes` are the server's settings."""
        process = Process(make_engine, served_directory, startup_timeout_s, **changes)
        processes.append(process)
        return processes[-1]

    yield make
    for process in processes:
        await process.close()


@pytest.fixture
def send() -> Callable[[signal.Signals], None]:
    """A signal to this process, whose handlers are the serving process's own."""

    def to_self(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)

    return to_self
