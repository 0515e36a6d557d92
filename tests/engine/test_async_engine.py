"""The asyncio face, with the core in a process of its own and in a thread."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.parts import build_echo_parts
from tpinference_engine.engine.process import ProcessLink
from tpinference_engine.engine.request_stream import RequestStream
from tpinference_engine.errors import (
    EngineBusy,
    EngineStopped,
    InvalidModel,
    PromptTooLong,
    RequestRefused,
    StartupTimedOut,
    TPInferenceError,
)
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, echo_token

MakeEngine = Callable[..., Awaitable[AsyncEngine]]
DEADLINE_S = 20.0
LONG = 10_000
"""Tokens that no test waits for."""


@pytest.fixture(params=[True, False], ids=["thread", "process"])
def in_process(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def start_engine(
    make_config: Callable[..., EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeEngine]:
    """Engines that are shut down after the test and must have left nothing then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with AsyncExitStack() as stack:

        async def start(
            in_process: bool, *, max_requests: int = 100, **changes: Any
        ) -> AsyncEngine:
            config = make_config(
                distributed_executor_backend="uni",
                **{"max_model_len": 2 * LONG, "num_gpu_blocks_override": 10_000, **changes},
            )
            engine = AsyncEngine(
                config, build=build_echo_parts, in_process=in_process, max_requests=max_requests
            )
            stack.push_async_callback(engine.shutdown)
            await engine.start(DEADLINE_S)
            return engine

        yield start
    assert {pid: command_line(pid) for pid in children()} == {}
    assert list(tmp_path.iterdir()) == []


def children() -> list[int]:
    """Processes that this one has started and that have not ended.

    Not multiprocessing's resource tracker, which serves its process until the end.
    """
    me = os.getpid()
    tasks = Path(f"/proc/{me}/task").glob("*/children")
    pids = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in pids if b"resource_tracker" not in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def request(name: str, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id=name, prompt_token_ids=prompt, params=params)


def expected(request: Request) -> list[int]:
    prompt = request.prompt_token_ids
    tokens = list(prompt)
    for _ in range(request.params.max_tokens):
        tokens.append(echo_token(tokens, prompt_length=len(prompt), vocab_size=DEFAULT_VOCAB_SIZE))
    return tokens[len(prompt) :]


async def collect(stream: AsyncIterator[RequestOutput]) -> tuple[list[int], RequestOutput]:
    tokens: list[int] = []
    async for output in stream:
        tokens += output.token_ids
    return tokens, output


async def until(engine: AsyncEngine, holds: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.001)
    except TimeoutError:
        pytest.fail(f"did not come: {engine.status()}")


def core_pid() -> int:
    (pid,) = children()
    return pid


async def test_sixteen_requests_at_once_get_their_own_tokens(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process, max_num_seqs=6)
    requests = [request(str(i), 10 + i, (i, 2, 3)) for i in range(16)]
    found = await asyncio.gather(*(collect(engine.generate(r)) for r in requests))
    assert [tokens for tokens, _ in found] == [expected(r) for r in requests]
    assert {last.finish_reason for _, last in found} == {FinishReason.LENGTH}


async def test_closing_a_stream_in_its_middle_gives_its_blocks_back(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    free = engine.status().cache.free_blocks
    stream = engine.generate(request("a", LONG))
    async for output in stream:
        assert output.token_ids
        break
    assert engine.status().requests.running == 1
    await stream.aclose()
    await until(engine, lambda: engine.status().cache.free_blocks == free)
    assert engine.status().requests.running == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_abort_ends_the_stream(start_engine: MakeEngine, in_process: bool) -> None:
    engine = await start_engine(in_process)
    stream = engine.generate(request("a", LONG))
    await anext(stream)
    await engine.abort("a")
    _, last = await collect(stream)
    assert last.finish_reason is FinishReason.ABORT
    await engine.abort("a")
    await engine.abort("never seen")


async def test_a_drain_finishes_what_is_open_and_admits_nothing(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    wanted = request("a", 200)
    stream = engine.generate(wanted)
    drain = asyncio.create_task(engine.drain(DEADLINE_S))
    await until(engine, lambda: engine.status().state == "draining")
    with pytest.raises(EngineStopped, match="the engine is draining"):
        engine.generate(request("b"))
    tokens, last = await collect(stream)
    assert tokens == expected(wanted)
    assert last.finish_reason is FinishReason.LENGTH
    assert await drain == 0
    await engine.canary(DEADLINE_S)


async def test_a_drain_aborts_what_is_left_at_its_deadline(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    streams = [engine.generate(request(name, LONG)) for name in "ab"]
    assert await engine.drain(0.05) == 2
    for stream in streams:
        _, last = await collect(stream)
        assert last.finish_reason is FinishReason.ABORT
    assert engine.status().requests.running == 0


async def test_a_shutdown_ends_open_streams_and_is_idempotent(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    stream = engine.generate(request("a", LONG))
    await anext(stream)
    await engine.shutdown()
    _, last = await collect(stream)
    assert last.finish_reason is FinishReason.ABORT
    assert (engine.status().state, engine.status().last_failure) == ("stopped", None)
    assert [rank.state for rank in engine.status().ranks] == ["dead"]
    assert {pid: command_line(pid) for pid in children()} == {}
    with pytest.raises(EngineStopped, match="the engine is stopped"):
        engine.generate(request("b"))
    await engine.shutdown()


async def test_requests_are_refused_before_anything_is_sent(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process, max_requests=2, max_model_len=64)
    with pytest.raises(PromptTooLong, match="the model allows 64"):
        engine.generate(request("a", 62))
    with pytest.raises(RequestRefused, match="token id 512, must be 0 to 511"):
        engine.check(request("a", prompt=(512,)))
    first = engine.generate(request("a"))
    with pytest.raises(RequestRefused, match="'a' is in use"):
        engine.generate(request("a"))
    second = engine.generate(request("b"))
    with pytest.raises(EngineBusy, match="2 requests are running or waiting, the limit is 2"):
        engine.generate(request("c"))
    await asyncio.gather(collect(first), collect(second))
    engine.check(request("c"))


async def test_a_slow_reader_gets_everything_in_one_piece(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    wanted = request("a", 300)
    stream = engine.generate(wanted)
    await collect(engine.generate(request("b", 400)))
    output = await anext(stream)
    assert list(output.token_ids) == expected(wanted)
    assert output.finish_reason is FinishReason.LENGTH


async def test_calls_reach_the_ranks_between_steps(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process)
    wanted = request("a", 300)
    stream = engine.generate(wanted)
    assert await engine.collective_rpc("cache_capacity") == [10_000]
    (place,) = await engine.collective_rpc("place", (), 5.0)
    assert place["device"] == "cpu"
    with pytest.raises(TPInferenceError, match="method is 'oh'"):
        await engine.collective_rpc("oh")
    assert (await collect(stream))[0] == expected(wanted)


async def test_status_says_what_the_operator_reads(
    start_engine: MakeEngine, in_process: bool
) -> None:
    engine = await start_engine(in_process, max_model_len=64, epoch=4, engine_id="tpi-0-abc")
    said = msgspec.json.decode(msgspec.json.encode(engine.status()))
    assert {stage["name"] for stage in said["stages"]} == {"weightsLoaded", "warmedUp"}
    assert all(stage["startedAt"].endswith("Z") for stage in said.pop("stages"))
    (rank,) = said.pop("ranks")
    assert set(rank) == {"rank", "pod", "node", "device", "state"}
    assert (rank["rank"], rank["state"]) == (0, "alive")
    assert said == {
        "engineId": "tpi-0-abc",
        "epoch": 4,
        "state": "ready",
        "reason": None,
        "message": None,
        "lastFailure": None,
        "requests": {"running": 0, "waiting": 0},
        "model": {"servedNames": ["test"], "maxModelLen": 64},
        "cache": {"numBlocks": 10_000, "freeBlocks": 10_000},
        "stepTransport": None,
    }
    assert engine.tick_age_s < DEADLINE_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_a_core_that_is_killed_ends_open_requests_with_an_error(
    start_engine: MakeEngine, number: signal.Signals
) -> None:
    engine = await start_engine(False)
    streams = [engine.generate(request(name, LONG)) for name in "ab"]
    await anext(streams[0])
    os.kill(core_pid(), number)
    async with asyncio.timeout(5):
        failure = await engine.wait_failed()
        endings = [(await collect(stream))[1] for stream in streams]
    assert (failure.reason, failure.exit_code) == ("EngineCrashed", -number)
    assert failure.message == f"the engine core process was killed by {number.name}"
    assert {(e.finish_reason, e.error) for e in endings} == {(FinishReason.ERROR, failure.message)}
    status = engine.status()
    assert (status.state, status.reason) == ("failed", "EngineCrashed")
    assert [rank.state for rank in status.ranks] == ["dead"]
    with pytest.raises(EngineStopped, match="has failed: the engine core process was killed"):
        engine.generate(request("c"))
    with pytest.raises(EngineStopped, match="has failed"):
        await engine.canary(1)


async def test_a_request_to_a_core_that_has_just_died_ends_with_its_exit(
    start_engine: MakeEngine,
) -> None:
    engine = await start_engine(False)
    os.kill(core_pid(), signal.SIGKILL)
    socket = cast(ProcessLink, engine._link)._to_core
    # The event loop does not run meanwhile, so the engine has heard of nothing.
    deadline = time.monotonic() + DEADLINE_S
    while int(socket.get(zmq.EVENTS)) & zmq.POLLOUT:
        assert time.monotonic() < deadline, "the socket still has a peer"
    _, last = await collect(engine.generate(request("a")))
    assert last.finish_reason is FinishReason.ERROR
    assert "killed by SIGKILL" in str(last.error)


async def test_a_terminals_interrupt_is_not_for_the_core(start_engine: MakeEngine) -> None:
    engine = await start_engine(False)
    pid = core_pid()
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    await engine.canary(DEADLINE_S)


async def test_a_core_that_is_told_to_stop_by_somebody_else_is_a_failure(
    start_engine: MakeEngine,
) -> None:
    engine = await start_engine(False)
    os.kill(core_pid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        failure = await engine.wait_failed()
    assert failure.message == "the engine core process exited 0"


async def test_a_model_that_is_not_there_fails_the_start_with_its_reason(
    make_config: Callable[..., EngineConfig], tmp_path: Path, in_process: bool
) -> None:
    config = make_config(distributed_executor_backend="uni", model=tmp_path / "none")
    engine = AsyncEngine(config, in_process=in_process)
    with pytest.raises(InvalidModel, match="does not exist"):
        await engine.start(DEADLINE_S)
    failure = await engine.wait_failed()
    assert (failure.reason, failure.exit_code) == ("InvalidModel", None)
    assert engine.status().state == "failed"
    await engine.shutdown()
    assert {pid: command_line(pid) for pid in children()} == {}


async def test_a_start_past_its_deadline_is_ended_by_force(
    make_config: Callable[..., EngineConfig],
) -> None:
    config = make_config(distributed_executor_backend="uni")
    engine = AsyncEngine(config, build=build_echo_parts)
    with pytest.raises(StartupTimedOut, match=r"the first stage has not ended 0\.001 s"):
        await engine.start(0.001)
    await engine.shutdown()
    assert engine.status().reason == "StartupTimedOut"
    assert {pid: command_line(pid) for pid in children()} == {}


async def test_an_engine_that_was_never_started_can_be_shut_down(
    make_config: Callable[..., EngineConfig], in_process: bool
) -> None:
    config = make_config(distributed_executor_backend="uni")
    engine = AsyncEngine(config, build=build_echo_parts, in_process=in_process)
    with pytest.raises(EngineStopped, match="the engine is starting"):
        engine.generate(request("a"))
    await engine.shutdown()


async def test_a_stream_merges_what_was_not_read() -> None:
    aborted: list[str] = []
    stream = RequestStream("a", aborted.append)
    for token_id in (1, 2):
        stream.push(RequestOutput(request_id="a", token_ids=(token_id,)))
    assert (await anext(stream)).token_ids == (1, 2)
    ending = RequestOutput(request_id="a", token_ids=(), finish_reason=FinishReason.ABORT)
    stream.push(ending)
    assert await anext(stream) == ending
    await stream.aclose()
    assert aborted == [], "it had ended"
