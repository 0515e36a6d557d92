"""Admission is bounded from a call's first byte: bodies and plans in the making count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from tpinference_engine.errors import EngineBusy, EngineStopped, RequestRefused
from tpinference_engine.server.gate import Gate

BODY = json.dumps({"model": "tiny", "prompt": "p", "max_tokens": 1}).encode()


@pytest.fixture
def gate() -> Gate:
    return Gate(3)


def test_a_call_takes_room_for_one_then_for_all_its_choices(gate: Gate) -> None:
    with gate.admit() as first:
        assert gate.num_inside == 1
        first.widen_to(2)
        assert gate.num_inside == 2
        with gate.admit() as second:
            with pytest.raises(EngineBusy, match="3 requests .* 1 more would exceed .* of 3"):
                second.widen_to(2)
            assert gate.num_inside == 3
            with pytest.raises(EngineBusy), gate.admit():
                pass
        assert gate.num_inside == 2
    assert gate.num_inside == 0


def test_a_call_that_would_never_fit_is_wrong_and_not_early(gate: Gate) -> None:
    """A client that is told "too many requests, try again" would try for good."""
    with gate.admit() as call:
        call.widen_to(3)
    with gate.admit() as call:
        with pytest.raises(RequestRefused, match="4 choices .* at most 3") as refused:
            call.widen_to(4)
        assert refused.value.param == "n"
        assert gate.num_inside == 1
    assert gate.num_inside == 0


async def test_who_is_inside_a_closed_gate_stays_and_may_widen(gate: Gate) -> None:
    with gate.admit() as inside:
        gate.close("draining")
        inside.widen_to(3)
        with pytest.raises(EngineStopped, match="draining"), gate.admit():
            pass
    async with asyncio.timeout(1):
        await gate.wait_empty()


async def test_bodies_that_are_being_read_are_bounded(
    script_app: Callable[..., AbstractAsyncContextManager[Any]], saying: Callable[..., Any]
) -> None:
    may_end = asyncio.Event()
    num_reading = 0

    async def slow_body() -> AsyncIterator[bytes]:
        nonlocal num_reading
        num_reading += 1
        yield BODY[:5]
        await may_end.wait()
        yield BODY[5:]

    async def ask(client: httpx.AsyncClient, content: Any) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await client.post("/v1/completions", content=content, headers=headers)

    async with script_app(saying(ord("a")), max_requests=2) as served, served.in_memory() as client:
        slow = [asyncio.create_task(ask(client, slow_body())) for _ in range(2)]
        async with asyncio.timeout(5):
            while num_reading < 2:
                await asyncio.sleep(0)
        refused = await ask(client, BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "engine_busy")
        may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*slow)] == [200, 200]
        assert (await ask(client, BODY)).status_code == 200
        await served.wait_idle()
