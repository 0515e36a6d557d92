"""vLLM's extra fields on both routes, as the scheduler gets them, and the time that a call has."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest

from tpinference_engine.errors import RequestRefused
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.server.request_timeout import deadline_of

PROMPTS: dict[str, dict[str, object]] = {
    "completions": {"prompt": "p"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
ScriptApp = Callable[..., AbstractAsyncContextManager[Any]]
TIMEOUT = {"Request-Timeout-Ms": "1500"}


@pytest.mark.parametrize("route", PROMPTS)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, None), ({"cache_salt": None}, None), ({"cache_salt": "tenant"}, "tenant")],
    ids=["absent", "null", "given"],
)
async def test_a_salt_reaches_the_engine_with_every_choice(
    script_app: ScriptApp,
    saying: Callable[..., Any],
    route: str,
    asked: dict[str, str | None],
    expected: str | None,
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "n": 2, **PROMPTS[route], **asked}
        assert (await client.post(f"/v1/{route}", json=body)).status_code == 200
    assert [request.cache_salt for request in served.engine.requests] == [expected] * 2


@pytest.mark.parametrize("wrong", ["", "x" * 1025, 7, ["a"]])
async def test_a_salt_that_is_none_is_refused(
    script_app: ScriptApp, saying: Callable[..., Any], wrong: object
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "prompt": "p", "cache_salt": wrong}
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    assert served.engine.requests == []


@pytest.mark.parametrize(("text", "seconds"), [("1500", 1.5), ("0", 0.0), ("10000000000", 1e7)])
def test_a_deadline_counts_from_the_arrival(text: str, seconds: float) -> None:
    assert deadline_of({"Request-Timeout-Ms": text}, 100.0) == 100.0 + seconds


def test_without_the_header_there_is_none() -> None:
    assert deadline_of({}, 100.0) is None


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "10s", "1e3", " 5", "٣", "10000000001", "9" * 5000]
)
def test_a_time_that_is_none_is_refused_and_named(text: str) -> None:
    with pytest.raises(RequestRefused, match="Request-Timeout-Ms is .* milliseconds") as refused:
        deadline_of({"Request-Timeout-Ms": text}, 100.0)
    assert (refused.value.param, refused.value.code) == ("Request-Timeout-Ms", "invalid_value")


@pytest.mark.parametrize("route", PROMPTS)
async def test_the_deadline_reaches_the_engine_with_every_choice(
    script_app: ScriptApp, saying: Callable[..., Any], route: str
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "n": 2, **PROMPTS[route]}
        before = time.monotonic()
        answer = await client.post(f"/v1/{route}", json=body, headers=TIMEOUT)
        after = time.monotonic()
    assert answer.status_code == 200
    assert len(served.engine.requests) == 2
    for request in served.engine.requests:
        assert before + 1.5 <= request.deadline <= after + 1.5


async def test_a_wrong_time_is_refused_before_the_engine(
    script_app: ScriptApp, saying: Callable[..., Any]
) -> None:
    async with script_app(saying(ord("a"))) as served, served.in_memory() as client:
        body = {"model": "tiny", "prompt": "p"}
        headers = {"Request-Timeout-Ms": "soon"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Request-Timeout-Ms")
        assert served.engine.requests == []
        await served.wait_idle()


async def too_late(request: Request) -> AsyncGenerator[RequestOutput, None]:
    if request.params.max_tokens > 1:
        yield RequestOutput(request_id=request.request_id, token_ids=(ord("a"),))
    yield RequestOutput(
        request_id=request.request_id,
        token_ids=(),
        finish_reason=FinishReason.DEADLINE,
        error="the request's deadline passed",
    )


@pytest.mark.parametrize("max_tokens", [1, 8], ids=["before a token", "after one"])
async def test_a_call_that_took_too_long_is_an_error_that_is_not_tried_again(
    serve_script: Callable[..., Any], max_tokens: int
) -> None:
    async with serve_script(too_late) as served:
        ask = served.client.with_options(max_retries=3).completions.create
        with pytest.raises(openai.InternalServerError, match="deadline passed") as raised:
            await ask(model="tiny", prompt="p", max_tokens=max_tokens, extra_headers=TIMEOUT)
        await served.wait_idle()
        assert len(served.engine.requests) == 1
    assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
    assert raised.value.type == "timeout_error"


async def test_a_stream_that_took_too_long_ends_with_an_error_and_no_finish_reason(
    serve_script: Callable[..., Any],
) -> None:
    async with serve_script(too_late) as served:
        stream = await served.client.completions.create(
            model="tiny", prompt="p", max_tokens=8, stream=True, extra_headers=TIMEOUT
        )
        seen = []
        with pytest.raises(openai.APIError, match="deadline passed") as raised:
            async for chunk in stream:
                seen.append(chunk.choices[0])
        await served.wait_idle()
    assert [(choice.text, choice.finish_reason) for choice in seen] == [("a", None)]
    assert raised.value.code == "deadline_exceeded"
