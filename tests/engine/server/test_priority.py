"""vLLM's extra field `priority` on both routes, as the scheduler gets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

PROMPTS: dict[str, dict[str, object]] = {
    "completions": {"prompt": "p"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
ScriptApp = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 0),
        ({"priority": None}, 0),
        ({"priority": -3}, -3),
        ({"priority": 2**31 - 1}, 2**31 - 1),
    ],
    ids=["absent", "null", "early", "latest"],
)
async def test_priority_reaches_the_engine(
    script_app: ScriptApp,
    saying: Callable[..., Any],
    route: str,
    asked: dict[str, int],
    expected: int,
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "n": 2, **PROMPTS[route], **asked}
        assert (await client.post(f"/v1/{route}", json=body)).status_code == 200
    assert [request.priority for request in served.engine.requests] == [expected] * 2


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, "high", 1.5, True])
async def test_a_priority_that_is_none_is_refused(
    script_app: ScriptApp, saying: Callable[..., Any], wrong: object
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "prompt": "p", "priority": wrong}
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert served.engine.requests == []
