"""The OpenAI port as the `openai` client sees it, over an engine that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest

from tpinference_engine.errors import EngineBusy, EngineStopped
from tpinference_engine.request import FinishReason, Request, RequestOutput

Script = Callable[[Request], AsyncGenerator[RequestOutput, None]]
Serve = Callable[..., AbstractAsyncContextManager[Any]]
Saying = Callable[..., Script]

USER = [{"role": "user", "content": "hi"}]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


async def echo(request: Request) -> AsyncGenerator[RequestOutput, None]:
    """Says the prompt again, a token an output, as far as max_tokens allows."""
    tokens = request.prompt_token_ids[: request.params.max_tokens]
    for at, token in enumerate(tokens):
        await asyncio.sleep(0)
        reason = FinishReason.LENGTH if at == len(tokens) - 1 else None
        yield RequestOutput(request_id=request.request_id, token_ids=(token,), finish_reason=reason)


async def endless(request: Request) -> AsyncGenerator[RequestOutput, None]:
    while True:
        await asyncio.sleep(0)
        yield RequestOutput(request_id=request.request_id, token_ids=(ord("x"),))


async def silent(request: Request) -> AsyncGenerator[RequestOutput, None]:
    """Waits in the queue for ever."""
    await asyncio.Event().wait()
    yield RequestOutput(request_id=request.request_id, token_ids=())


async def test_chat(serve_script: Serve, saying: Saying, end_id: int) -> None:
    async with serve_script(saying(*text_ids("Paris."), end_id)) as served:
        answer = await served.client.chat.completions.create(
            model="tiny-alias",
            messages=[
                {"role": "developer", "content": "short"},
                {"role": "user", "content": [{"type": "text", "text": "capital?"}]},
            ],
            temperature=0,
        )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris.")
    assert (choice.finish_reason, answer.model, answer.object) == (
        "stop",
        "tiny",
        "chat.completion",
    )
    prompt = "<system>short\n<user>capital?\n<assistant>"
    assert served.engine.requests[0].prompt_token_ids == tuple(text_ids(prompt))
    assert answer.usage.prompt_tokens == len(prompt)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (7, len(prompt) + 7)
    assert served.engine.requests[0].params.max_tokens == 64 - len(prompt)


async def test_stream_has_role_text_finish_usage_in_this_order(
    serve_script: Serve, saying: Saying, end_id: int
) -> None:
    async with serve_script(saying(*text_ids("ok"), end_id)) as served:
        stream = await served.client.chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [
        (c.choices[0].delta.role, c.choices[0].delta.content, c.choices[0].finish_reason)
        for c in chunks[:-1]
    ]
    assert deltas == [
        ("assistant", "", None),
        (None, "o", None),
        (None, "k", None),
        (None, None, "stop"),
    ]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_stream_equals_the_whole_answer(
    serve_script: Serve, saying: Saying, word_ids: dict[str, int]
) -> None:
    ids = [*text_ids("caf\u00e9 \U0001f600 "), word_ids["\r\n\r\ndata: x"], *text_ids("!")]
    async with serve_script(saying(*ids, reason=FinishReason.LENGTH)) as served:
        ask = served.client.completions.create
        whole = await ask(model="tiny", prompt="p")
        parts = [chunk async for chunk in await ask(model="tiny", prompt="p", stream=True)]
    assert whole.choices[0].text == "caf\u00e9 \U0001f600 \r\n\r\ndata: x!"
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert (parts[-1].choices[0].text, parts[-1].choices[0].finish_reason) == ("", "length")
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_text_and_usage_and_ends_the_request(
    serve_script: Serve, stream: bool, word_ids: dict[str, int]
) -> None:
    async def script(request: Request) -> AsyncGenerator[RequestOutput, None]:
        ids = (ord("a"), word_ids["beta "], word_ids["gamma delta"])
        yield RequestOutput(request_id=request.request_id, token_ids=ids)
        async for output in endless(request):
            yield output

    async with serve_script(script) as served:
        arguments = {"model": "tiny", "prompt": "p", "stop": ["nothing", "beta gamma"]}
        if stream:
            chunks = [
                chunk
                async for chunk in await served.client.completions.create(
                    **arguments, stream=True, stream_options={"include_usage": True}
                )
            ]
            text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
            reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            answer = await served.client.completions.create(**arguments)
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
            usage = answer.usage
        await served.wait_idle()
        assert (text, reason, usage.completion_tokens) == ("a", "stop", 3)
        assert len(served.engine.aborted) == 1


async def test_held_back_text_is_sent_when_the_request_ends(
    serve_script: Serve, saying: Saying, end_id: int
) -> None:
    async with serve_script(saying(*text_ids("abc"), end_id)) as served:
        answer = await served.client.completions.create(model="tiny", prompt="p", stop="abcdef")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")


async def test_choices_have_their_own_index_text_and_seed(serve_script: Serve) -> None:
    async def script(request: Request) -> AsyncGenerator[RequestOutput, None]:
        assert request.params.seed is not None
        yield RequestOutput(
            request_id=request.request_id,
            token_ids=(ord("a") + request.params.seed, ord("!")),
            finish_reason=FinishReason.LENGTH,
        )

    async with serve_script(script) as served:
        answer = await served.client.chat.completions.create(
            model="tiny", messages=USER, n=4, seed=7
        )
        streamed: dict[int, str] = {}
        stream = await served.client.chat.completions.create(
            model="tiny", messages=USER, n=4, seed=7, stream=True
        )
        async for chunk in stream:
            choice = chunk.choices[0]
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["h!", "i!", "j!", "k!"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert streamed == dict(enumerate(texts))
    assert answer.usage.completion_tokens == 8
    assert len({request.request_id for request in served.engine.requests}) == 8


async def test_lists_of_prompts_and_token_ids_are_echoed(serve_script: Serve) -> None:
    async with serve_script(echo) as served:
        ask = served.client.completions.create
        several = await ask(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=1, echo=True)
        ids = await ask(
            model="tiny",
            prompt=[[104, 105], [111]],
            max_tokens=1,
            echo=True,
            extra_body={"return_token_ids": True},
        )
        one = await ask(model="tiny", prompt=[104, 105])
    assert [choice.text for choice in several.choices] == ["aba", "aba", "cdc", "cdc"]
    assert [choice.text for choice in ids.choices] == ["hih", "oo"]
    assert [choice.token_ids for choice in ids.choices] == [[104], [111]]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (4, 4)
    assert (one.choices[0].text, one.usage.prompt_tokens) == ("hi", 2)


async def test_completion_is_sixteen_tokens_unless_it_is_asked_for_more(
    serve_script: Serve,
) -> None:
    async with serve_script(echo) as served:
        await served.client.completions.create(model="tiny", prompt="x" * 20)
        await served.client.completions.create(model="tiny", prompt="x" * 60)
        await served.client.completions.create(model="tiny", prompt="x", max_tokens=63)
    assert [r.params.max_tokens for r in served.engine.requests] == [16, 4, 63]


async def test_sampling_fields_reach_the_engine(serve_script: Serve) -> None:
    async with serve_script(echo) as served:
        await served.client.completions.create(
            model="tiny",
            prompt="x",
            temperature=0.5,
            top_p=0.25,
            seed=-(2**63),
            extra_body={"top_k": -1, "stop_token_ids": [5], "ignore_eos": True},
        )
        await served.client.chat.completions.create(
            model="tiny", messages=USER, max_completion_tokens=3, temperature=1e-9
        )
    first, second = (request.params for request in served.engine.requests)
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.25, 0)
    assert (first.seed, first.stop_token_ids, first.ignore_eos) == (-(2**63), (5,), True)
    assert (second.temperature, second.max_tokens, second.seed) == (0.0, 3, None)


async def test_sixteen_at_once_have_their_own_text(serve_script: Serve) -> None:
    async with serve_script(echo) as served:
        prompts = [f"prompt number {at}" for at in range(16)]
        answers = await asyncio.gather(
            *(
                served.client.completions.create(model="tiny", prompt=prompt, max_tokens=32)
                for prompt in prompts
            )
        )
        await served.wait_idle()
    assert [answer.choices[0].text for answer in answers] == prompts


async def test_models_and_version(serve_script: Serve) -> None:
    async with serve_script(echo) as served:
        models = await served.client.models.list()
        one = await served.client.models.retrieve("tiny-alias")
        version = await served.client.with_options().get("/../version", cast_to=object)
    assert [(m.id, m.max_model_len) for m in models.data] == [("tiny", 64), ("tiny-alias", 64)]
    assert one.root == "tiny"
    assert version == {"version": "0.1.0"}


@pytest.mark.parametrize("script", [endless, silent], ids=["running", "waiting"])
async def test_client_that_leaves_a_whole_answer_aborts_it(
    serve_script: Serve, script: Script
) -> None:
    async with serve_script(script) as served:
        asking = asyncio.create_task(
            served.client.completions.create(model="tiny", prompt="p", n=3, max_tokens=60)
        )
        await served.engine.wait_running(3)
        asking.cancel()
        await served.wait_idle()
        assert len(served.engine.aborted) == 3


async def test_client_that_leaves_a_stream_aborts_it(serve_script: Serve) -> None:
    async with serve_script(endless) as served:
        stream = await served.client.chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        await anext(aiter(stream))
        assert served.serving.gate.num_inside == 1
        await stream.close()
        await served.wait_idle()
        assert len(served.engine.aborted) == 1


@pytest.mark.parametrize(
    ("reason", "code"),
    [(FinishReason.ERROR, "engine_failed"), (FinishReason.ABORT, "engine_stopped")],
)
async def test_failure_in_a_stream_is_no_success(
    serve_script: Serve, reason: FinishReason, code: str
) -> None:
    async def script(request: Request) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput(request_id=request.request_id, token_ids=(ord("a"),))
        yield RequestOutput(
            request_id=request.request_id, token_ids=(), finish_reason=reason, error="rank 1 died"
        )

    async with serve_script(script) as served:
        stream = await served.client.chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        seen = []
        with pytest.raises(openai.APIError, match="rank 1 died") as raised:
            async for chunk in stream:
                seen.append(chunk.choices[0])
        with pytest.raises(openai.InternalServerError, match="rank 1 died") as whole:
            await served.client.chat.completions.create(model="tiny", messages=USER)
        await served.wait_idle()
    assert [choice.delta.content for choice in seen] == ["", "a"]
    assert all(choice.finish_reason is None for choice in seen)
    assert raised.value.code == code
    assert (whole.value.status_code, whole.value.code) == (503, code)
    assert whole.value.response.headers["retry-after"] == "5"


@pytest.mark.parametrize(
    ("error", "status"), [(EngineBusy("full"), 429), (EngineStopped("draining"), 503)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_refuses_is_a_status_before_a_stream(
    serve_script: Serve, error: Exception, status: int, stream: bool
) -> None:
    async def script(request: Request) -> AsyncGenerator[RequestOutput, None]:
        raise error
        yield RequestOutput(request_id=request.request_id, token_ids=())

    async with serve_script(script) as served:
        with pytest.raises(openai.APIStatusError, match=str(error)) as raised:
            await served.client.completions.create(model="tiny", prompt="p", stream=stream)
    assert raised.value.status_code == status
    assert int(raised.value.response.headers["retry-after"]) > 0


async def test_more_than_the_limit_is_refused_at_once(serve_script: Serve) -> None:
    async with serve_script(silent, max_requests=3) as served:
        ask = served.client.completions.create
        asking = asyncio.create_task(ask(model="tiny", prompt="p", n=2))
        await served.engine.wait_running(2)
        with pytest.raises(openai.RateLimitError, match="limit of 3") as raised:
            await ask(model="tiny", prompt="p", n=2)
        assert raised.value.response.headers["retry-after"] == "1"
        asking.cancel()
        await served.wait_idle()


async def test_closed_gate_refuses_and_closes_the_connection(serve_script: Serve) -> None:
    async with serve_script(echo) as served:
        served.serving.gate.close("draining")
        with pytest.raises(openai.InternalServerError, match="draining") as raised:
            await served.client.completions.create(model="tiny", prompt="p")
    assert raised.value.status_code == 503
    assert raised.value.response.headers["connection"] == "close"
    assert raised.value.response.headers["retry-after"] == "5"


async def broken(request: Request) -> AsyncGenerator[RequestOutput, None]:
    if request.params.max_tokens > 1:
        yield RequestOutput(request_id=request.request_id, token_ids=(ord("a"),))
    raise RuntimeError("a secret of ours")


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_of_ours_is_500_without_its_details(serve_script: Serve, stream: bool) -> None:
    async with serve_script(broken) as served:
        with pytest.raises(openai.InternalServerError, match="see the engine's log") as raised:
            await served.client.completions.create(
                model="tiny", prompt="p", stream=stream, max_tokens=1
            )
        await served.wait_idle()
    assert (raised.value.status_code, raised.value.code) == (500, "internal")


async def test_fault_of_ours_in_a_stream_breaks_it(serve_script: Serve) -> None:
    async with serve_script(broken) as served:
        stream = await served.client.completions.create(model="tiny", prompt="p", stream=True)
        with pytest.raises(openai.APIConnectionError):
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None
        await served.wait_idle()


BAD_REQUESTS: list[tuple[dict[str, object], type[openai.APIStatusError], str | None]] = [
    ({"model": "gpt"}, openai.NotFoundError, "model"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, openai.BadRequestError, "messages"),
    ({"max_tokens": 1000}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"top_p": 2}, openai.BadRequestError, "top_p"),
    ({"n": 0}, openai.BadRequestError, "n"),
    ({"stop": list("abcde")}, openai.BadRequestError, "stop"),
    ({"logit_bias": {"AI": -100}}, openai.BadRequestError, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
    ({"extra_body": {"wish": 1}}, openai.BadRequestError, "wish"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_have_their_status_before_a_stream(
    serve_script: Serve, stream: bool
) -> None:
    async with serve_script(echo) as served:
        for change, error, param in BAD_REQUESTS:
            arguments = {"model": "tiny", "messages": USER, "stream": stream, **change}
            with pytest.raises(error) as raised:
                await served.client.chat.completions.create(**arguments)
            assert raised.value.param == param, change
        assert served.engine.requests == []
        assert (await served.client.completions.create(model="tiny", prompt="p")).choices
