"""`bench serve` against a small server of our own, which answers as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tpinference_engine.bench.client import ServerFailed
from tpinference_engine.bench.serve import measure_serving
from tpinference_engine.bench.settings import ServeBench

Reply = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def all_tokens(body: dict[str, Any], stream: web.StreamResponse) -> None:
    for _ in range(body["max_tokens"]):
        await stream.write(event(choices=[{"index": 0, "text": "", "token_ids": [5]}]))
    await stream.write(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}]))
    await stream.write(b"data: [DONE]\n\n")


async def one_token(body: dict[str, Any], stream: web.StreamResponse) -> None:
    await stream.write(event(choices=[{"index": 0, "text": "a", "token_ids": [5]}]))


async def error_event(body: dict[str, Any], stream: web.StreamResponse) -> None:
    await stream.write(event(error={"message": "the ranks are gone"}))


async def no_json(body: dict[str, Any], stream: web.StreamResponse) -> None:
    await stream.write(b"data: <html>\n\n")


async def break_off(body: dict[str, Any], stream: web.StreamResponse) -> None:
    await stream.write(event(choices=[{"index": 0, "text": "a", "token_ids": [5]}]))
    raise ConnectionResetError


@dataclass
class Server:
    reply: Reply = all_tokens
    refuse_from: int = 10**9
    """Requests from this one on are refused."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if len(self.bodies) > self.refuse_from:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(0)
            await self.reply(self.bodies[-1], stream)
            return stream
        finally:
            self.num_open -= 1


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    async with TestServer(app) as listener:
        yield f"http://127.0.0.1:{listener.port}/"


def bench_of(base_url: str, **changes: Any) -> ServeBench:
    settings: dict[str, Any] = {
        "num_prompts": 6,
        "random_input_len": 4,
        "random_output_len": 3,
        **changes,
    }
    return ServeBench(base_url=base_url, **settings)


async def test_every_prompt_is_asked_once_and_timed() -> None:
    server = Server()
    async with running(server) as url:
        result = await measure_serving(bench_of(url))
    assert len(result.answers) == 6
    assert result.num_output_tokens == 18
    assert all(0 < answer.ttft_s <= answer.e2el_s for answer in result.answers)
    assert len(server.bodies) == 7  # One in advance.
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 7
    body = server.bodies[0]
    assert body["model"] == "tiny"
    assert body["max_tokens"] == 3
    assert body["stream"] is body["ignore_eos"] is body["return_token_ids"] is True


async def test_concurrency_is_bounded() -> None:
    server = Server()
    async with running(server) as url:
        await measure_serving(bench_of(url, num_prompts=20, max_concurrency=3))
    assert server.most_open <= 3


async def test_arrivals_take_the_time_that_the_rate_says() -> None:
    async with running(Server()) as url:
        result = await measure_serving(bench_of(url, num_prompts=10, request_rate=50.0))
    assert 0.2 <= result.duration_s < 2.0


async def test_failed_requests_are_counted_and_told() -> None:
    server = Server(refuse_from=3)
    async with running(server) as url:
        result = await measure_serving(bench_of(url))
    assert (len(result.answers), len(result.errors)) == (2, 4)
    assert 'the server answered 429: {"error": {"message": "too many"}}' in result.text


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        pytest.param(one_token, "the stream had 1 tokens, must have 3", id="short"),
        pytest.param(error_event, "the ranks are gone", id="error"),
        pytest.param(no_json, "the stream has an event that is no JSON: <html>", id="no JSON"),
        pytest.param(break_off, "the connection broke", id="broken off"),
    ],
)
async def test_a_stream_that_is_no_answer_is_told(reply: Reply, words: str) -> None:
    async with running(Server(reply=reply)) as url:
        with pytest.raises(ServerFailed) as failed:
            await measure_serving(bench_of(url))
    assert words in str(failed.value)


async def test_a_server_without_models_is_told() -> None:
    app = web.Application()
    async with TestServer(app) as listener:
        with pytest.raises(ServerFailed, match="/v1/models names no model: 404"):
            await measure_serving(bench_of(f"http://127.0.0.1:{listener.port}"))
