"""What a client can ask of the scheduler, through HTTP and the real engine, with echoing ranks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.parts import build_echo_parts
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, echo_token

StartProcess = Callable[..., Awaitable[Any]]
PROMPT = list(range(48))
"""Three blocks; the last token is computed in any case, so two are found."""


@pytest.fixture
async def process(start: StartProcess, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """With engine settings as the test's parameter, if it has one."""
    changes: dict[str, Any] = getattr(request, "param", {})

    def make_engine(config: EngineConfig) -> AsyncEngine:
        return AsyncEngine(replace(config, **changes), build=build_echo_parts, in_process=True)

    started = await start(make_engine)
    await started.wait_ready()
    yield started


async def complete(process: Any, extra: dict[str, Any] | None = None, **arguments: Any) -> Any:
    body = {"return_token_ids": True, **(extra or {})}
    return await process.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=body, **arguments
    )


def expected_tokens() -> list[int]:
    tokens = list(PROMPT)
    for _ in range(8):
        tokens.append(echo_token(tokens, prompt_length=48, vocab_size=DEFAULT_VOCAB_SIZE))
    return tokens[48:]


async def wait_metric(process: Any, name: str, value: float) -> None:
    def shows(answer: httpx.Response) -> bool:
        lines = [
            line for line in answer.text.splitlines() if line.startswith(f"tpinference_{name}")
        ]
        return [float(line.rpartition(" ")[2]) for line in lines] == [value]

    await process.wait_for("/metrics", shows)


async def wait_all_free(process: Any) -> None:
    def all_free(answer: httpx.Response) -> bool:
        status = json.loads(answer.text)
        cache = status["cache"]
        return cache["freeBlocks"] == cache["numBlocks"] and not any(status["requests"].values())

    await process.wait_for("/engine/status", all_free)


async def test_a_prompt_asked_again_is_found_answered_the_same_and_counted(process: Any) -> None:
    for _ in range(3):
        answer = await complete(process)
        assert answer.choices[0].token_ids == expected_tokens()
    await wait_metric(process, "prefix_cache_hits_total", 64)
    salted = await complete(process, {"cache_salt": "another tenant"})
    assert salted.choices[0].token_ids == expected_tokens()
    await wait_metric(process, "prefix_cache_hits_total", 64)
    await wait_all_free(process)


@pytest.mark.parametrize("process", [{"enable_prefix_caching": False}], indirect=True)
async def test_without_a_prefix_cache_nothing_is_found(process: Any) -> None:
    for _ in range(2):
        assert (await complete(process)).choices[0].token_ids == expected_tokens()
    await wait_metric(process, "prefix_cache_hits_total", 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_time_is_answered_by_504_and_holds_nothing(
    process: Any, stream: bool
) -> None:
    with pytest.raises(openai.InternalServerError, match="deadline passed") as raised:
        await complete(process, extra_headers={"Request-Timeout-Ms": "0"}, stream=stream)
    assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
    await wait_all_free(process)
    in_time = await complete(process, extra_headers={"Request-Timeout-Ms": "600000"})
    assert in_time.choices[0].token_ids == expected_tokens()


async def test_a_priority_is_refused_where_it_would_change_nothing(process: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="scheduling_policy 'priority'") as refused:
        await complete(process, {"priority": -1})
    assert refused.value.param == "priority"
    assert (await complete(process, {"priority": 0})).choices[0].token_ids == expected_tokens()


@pytest.mark.parametrize("process", [{"scheduling_policy": "priority"}], indirect=True)
async def test_a_priority_is_taken_by_the_policy_of_its_name(process: Any) -> None:
    assert (await complete(process, {"priority": -1})).choices[0].token_ids == expected_tokens()
