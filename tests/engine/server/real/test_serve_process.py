"""The serve command with a real model: an answer, and an end without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest

StartServe = Callable[..., Awaitable[Any]]
Ask = Callable[[Any], Awaitable[str]]

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

BACKENDS = [
    pytest.param(("--distributed-executor-backend", "uni"), id="uni"),
    pytest.param(("--tensor-parallel-size", "2"), id="ray", marks=pytest.mark.ray),
]


async def open_stream(served: Any, max_tokens: int) -> tuple[Any, AsyncIterator[Any]]:
    stream = await served.client.completions.create(
        model="smollm2",
        prompt="Once upon a time",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = aiter(stream)
    return await anext(chunks), chunks


def ranks_of(processes: dict[int, str]) -> dict[int, str]:
    return {pid: line for pid, line in processes.items() if line.startswith("ray::RankActor")}


@pytest.mark.parametrize("flags", BACKENDS)
async def test_answers_and_sigterm_lets_streams_end_and_leaves_nothing(
    serve_process: StartServe, ask_for_paris: Ask, flags: tuple[str, ...]
) -> None:
    served = await serve_process(*flags)
    await served.wait_ready()
    assert "Paris" in await ask_for_paris(served)
    streams = [await open_stream(served, 24) for _ in range(3)]
    started = served.children()
    assert started
    served.process.send_signal(signal.SIGTERM)
    texts = set()
    for first, rest in streams:
        chunks = [first, *[chunk async for chunk in rest]]
        assert chunks[-1].usage.completion_tokens == 24
        assert chunks[-2].choices[0].finish_reason == "length"
        texts.add("".join(chunk.choices[0].text for chunk in chunks[:-1]))
    assert len(texts) == 1, texts
    assert await served.exit_code(60) == 0, served.log
    await served.check_nothing_left(started)
    assert not served.failure_file.exists()


@pytest.mark.parametrize("flags", BACKENDS)
async def test_killed_core_ends_ranks_streams_and_the_process(
    serve_process: StartServe, flags: tuple[str, ...]
) -> None:
    served = await serve_process(*flags)
    await served.wait_ready()
    _, rest = await open_stream(served, 400)
    started = served.children()
    core = [pid for pid, command in started.items() if "engine.core_process" in command]
    ranks = ranks_of(started)
    assert len(core) == 1 and len(ranks) == (2 if "2" in flags else 0), started
    os.kill(core[0], signal.SIGKILL)
    await served.wait_gone(ranks, 5)
    with pytest.raises(openai.APIError, match="SIGKILL"):
        async for _ in rest:
            pass
    assert await served.exit_code(30) == 1
    failure = json.loads(served.failure_file.read_bytes())
    assert (failure["reason"], failure["exitCode"]) == ("EngineCrashed", -signal.SIGKILL)
    # A local Ray's own agents take a while to see that their raylet has gone.
    await served.check_nothing_left(started, timeout_s=120)


@pytest.mark.ray
@pytest.mark.parametrize("choose", [min, max], ids=["one rank", "the other"])
async def test_killed_rank_is_named_in_the_failure(
    serve_process: StartServe, choose: Callable[[dict[int, str]], int]
) -> None:
    served = await serve_process("--tensor-parallel-size", "2")
    await served.wait_ready()
    _, rest = await open_stream(served, 400)
    started = served.children()
    status = (await served.admin.get("/engine/status")).json()
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert {rank["state"] for rank in status["ranks"]} == {"alive"}
    victim = choose(ranks_of(started))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(openai.APIError) as raised:
        async for _ in rest:
            pass
    assert raised.value.code == "engine_failed"
    assert await served.exit_code(40) == 1
    failure = json.loads(served.failure_file.read_bytes())
    named = re.match(r"rank (\d) \(.*pid (\d+)\) died", failure["message"])
    assert named and int(named[2]) == victim, failure
    assert (failure["reason"], failure["rank"]) == ("GroupFailed", int(named[1]))
    assert failure["pod"] == status["ranks"][failure["rank"]]["pod"]
    await served.check_nothing_left(started)
