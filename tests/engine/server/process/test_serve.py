"""How a serving process starts and ends: signals, failures, ports."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from tpinference_engine.engine.failure import error_of
from tpinference_engine.engine.status import Failure

StartProcess = Callable[..., Awaitable[Any]]
Send = Callable[[signal.Signals], None]

FAILURE = Failure(reason="GroupFailed", message="rank 1 died", time=datetime.now(UTC), rank=1)


async def test_sigterm_lets_streams_end_and_refuses_new_requests(
    start: StartProcess, send: Send
) -> None:
    process = await start()
    await process.wait_ready()
    stream = await process.stream()
    send(signal.SIGTERM)
    answer = await process.wait_for("/readyz", lambda answer: answer.status_code == 503)
    assert answer.text == "the engine is draining"
    assert (await process.admin.get("/health")).status_code == 200
    with pytest.raises(openai.InternalServerError, match="draining") as refused:
        await process.client.completions.create(model="tiny", prompt="p")
    assert refused.value.response.headers["connection"] == "close"
    process.engine.may_answer.set()
    rest = [chunk.choices[0] async for chunk in stream]
    assert [(c.text, c.finish_reason) for c in rest] == [("b", None), ("", "length")]
    assert await process.exit_code() == 0
    assert process.engine.was_shut_down and process.failure is None


async def test_what_has_not_ended_by_the_deadline_gets_an_error(
    start: StartProcess, send: Send
) -> None:
    process = await start(shutdown_timeout_s=0.05)
    await process.wait_ready()
    stream = await process.stream()
    send(signal.SIGINT)
    with pytest.raises(openai.APIError, match="before the request ended"):
        await anext(stream)
    assert await process.exit_code() == 0


async def test_second_signal_ends_at_once(start: StartProcess, send: Send) -> None:
    process = await start(shutdown_timeout_s=1000)
    await process.wait_ready()
    stream = await process.stream()
    send(signal.SIGTERM)
    await process.wait_for("/readyz", lambda answer: answer.status_code == 503)
    send(signal.SIGTERM)
    with pytest.raises(openai.APIError):
        await anext(stream)
    assert await process.exit_code() == 0


async def test_signal_while_it_starts_ends_it(start: StartProcess, send: Send) -> None:
    process = await start()
    await process.wait_for("/livez", lambda answer: answer.status_code == 200)
    send(signal.SIGTERM)
    assert await process.exit_code() == 0
    assert process.engine.was_shut_down and process.failure is None


async def test_engine_that_can_not_start_leaves_its_failure(start: StartProcess) -> None:
    process = await start()
    process.engine.start_failure = Failure(
        reason="InsufficientResources", message="too small", time=datetime.now(UTC)
    )
    process.engine.may_start.set()
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None
    assert (failure["reason"], failure["message"]) == ("InsufficientResources", "too small")
    assert (failure["rank"], failure["pod"], failure["node"]) == (None, "pod-0", "n")
    assert set(failure) == {"rank", "pod", "node", "reason", "exitCode", "message", "time"}


async def test_engine_that_fails_later_ends_streams_and_the_process(start: StartProcess) -> None:
    process = await start()
    await process.wait_ready()
    stream = await process.stream()
    process.engine.fail()
    with pytest.raises(openai.APIError, match="engine failed") as raised:
        await anext(stream)
    assert raised.value.code == "engine_failed"
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None and (failure["reason"], failure["rank"]) == ("GroupFailed", 1)
    assert failure["time"] == "2026-01-02T00:00:00Z"


@pytest.mark.parametrize("may_drain_on", [True, False], ids=["in-its-middle", "as-it-ends"])
async def test_engine_that_fails_in_a_drain_is_a_failure(
    start: StartProcess, send: Send, may_drain_on: bool
) -> None:
    process = await start(shutdown_timeout_s=1000)
    await process.wait_ready()
    stream = await process.stream()
    send(signal.SIGTERM)
    await process.wait_for("/readyz", lambda answer: answer.status_code == 503)
    if not may_drain_on:
        process.engine.may_answer.set()
    process.engine.fail()
    if may_drain_on:
        with pytest.raises(openai.APIError, match="engine failed"):
            await anext(stream)
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None and (failure["reason"], failure["rank"]) == ("GroupFailed", 1)


async def test_start_whose_first_token_does_not_come_has_timed_out(start: StartProcess) -> None:
    process = await start(startup_timeout_s=0.5)
    process.engine.canary_may_pass.clear()
    process.engine.may_start.set()
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None and failure["reason"] == "StartupTimedOut"
    assert "no token came back" in failure["message"]


async def test_start_whose_first_token_loses_a_rank_has_its_failure(start: StartProcess) -> None:
    process = await start()
    process.engine.canary_error = error_of(FAILURE)
    process.engine.may_start.set()
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None and (failure["reason"], failure["rank"]) == ("GroupFailed", 1)


async def test_model_that_can_not_be_served_is_named(
    start: StartProcess, served_directory: Path
) -> None:
    (served_directory / "tokenizer.json").unlink()
    process = await start()
    assert await process.exit_code() == 1
    failure = process.failure
    assert failure is not None and failure["reason"] == "InvalidModel"
    assert "no tokenizer.json" in failure["message"]


@pytest.mark.parametrize("field", ["port", "admin_port"])
async def test_port_in_use_is_named(start: StartProcess, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        process = await start(**{field: number})
        async with asyncio.timeout(5):
            assert await process.task == 1
    failure = process.failure
    assert failure is not None and failure["reason"] == "InvalidConfig"
    assert failure["message"].startswith(f"{field} is {number}, which can't be bound")
    assert "in use" in failure["message"]


async def test_host_that_is_no_address_is_named(start: StartProcess) -> None:
    process = await start(host="256.0.0.1")
    async with asyncio.timeout(5):
        assert await process.task == 1
    failure = process.failure
    assert failure is not None and failure["message"].startswith("host is '256.0.0.1'")
