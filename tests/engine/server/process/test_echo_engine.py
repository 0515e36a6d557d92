"""HTTP to tokens and back through the real engine, with ranks that echo instead of a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.parts import build_echo_parts
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, echo_token

StartProcess = Callable[..., Awaitable[Any]]


def make_engine(config: EngineConfig) -> AsyncEngine:
    return AsyncEngine(config, build=build_echo_parts, in_process=True)


@pytest.fixture
async def process(start: StartProcess) -> AsyncIterator[Any]:
    started = await start(make_engine)
    await started.wait_ready()
    yield started


def expected_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(echo_token(tokens, prompt_length=len(prompt), vocab_size=DEFAULT_VOCAB_SIZE))
    return tokens[len(prompt) :]


async def complete(process: Any, prompt: list[int], **arguments: Any) -> Any:
    extra = {"return_token_ids": True}
    return await process.client.completions.create(
        model="tiny", prompt=prompt, temperature=0, extra_body=extra, **arguments
    )


async def wait_all_free(process: Any) -> None:
    """Every block is back and nothing runs."""

    def all_free(answer: httpx.Response) -> bool:
        status = json.loads(answer.text)
        cache, requests = status["cache"], status["requests"]
        return cache["freeBlocks"] == cache["numBlocks"] == 64 and not any(requests.values())

    await process.wait_for("/engine/status", all_free)


async def test_sixteen_at_once_get_exactly_their_tokens(process: Any) -> None:
    prompts = [list(range(at, at + 1 + 3 * at)) for at in range(16)]
    answers = await asyncio.gather(*(complete(process, p, max_tokens=40) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].token_ids == expected_tokens(prompt, 40)
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 40)
    await wait_all_free(process)


async def test_stream_has_the_tokens_of_the_whole_answer(process: Any) -> None:
    chunks = [c async for c in await complete(process, [5, 6], max_tokens=20, stream=True)]
    whole = await complete(process, [5, 6], max_tokens=20)
    tokens = [
        token for c in chunks for token in (c.choices[0].model_extra or {}).get("token_ids", [])
    ]
    assert tokens == whole.choices[0].token_ids == expected_tokens([5, 6], 20)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


async def test_client_that_leaves_gives_its_blocks_back(process: Any) -> None:
    streams = [
        await complete(process, list(range(30)), max_tokens=200, stream=True) for _ in range(4)
    ]
    for stream in streams:
        await anext(aiter(stream))
        await stream.close()
    await wait_all_free(process)


async def test_stop_string_gives_the_blocks_back(process: Any) -> None:
    whole = await complete(process, [9], max_tokens=100)
    stop = next(character for character in whole.choices[0].text if character.isalnum())
    cut = await complete(process, [9], max_tokens=100, stop=stop)
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 100
    await wait_all_free(process)


async def test_more_than_the_cache_holds_is_refused_with_the_numbers(process: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="256 tokens") as refused:
        await complete(process, [1] * 300, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert (await complete(process, [1] * 255, max_tokens=1)).usage.total_tokens == 256


async def test_canary_goes_through_the_ranks(process: Any) -> None:
    await process.engine.canary(5)
    assert (await process.admin.get("/readyz")).status_code == 200
    await wait_all_free(process)
