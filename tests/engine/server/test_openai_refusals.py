"""What the OpenAI application refuses: status, OpenAI's body, the field's name.

Nothing of it reaches the engine. In memory, since there are many; the client's tests have a port.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractAsyncContextManager[Any]]

USER = [{"role": "user", "content": "hi"}]

CHAT_REFUSALS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "messages missing": ({"messages": ...}, "messages", "missing_required_parameter"),
    "content null": (
        {"messages": [{"role": "user", "content": None}]},
        "messages.0.content",
        "invalid_value",
    ),
    "role unknown": (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages.0.role",
        "invalid_value",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    "template says no": (
        {"messages": [{"role": "user", "content": "robot"}]},
        "messages",
        "chat_template_refused",
    ),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    "logprobs": ({"logprobs": True}, "logprobs", "unsupported_parameter"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
    "json": (
        {"response_format": {"type": "json_object"}},
        "response_format",
        "unsupported_parameter",
    ),
    "bias": ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    "penalty": ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
    "unknown field": ({"tempereature": 1}, "tempereature", "unknown_parameter"),
    "temperature too high": ({"temperature": 2.5}, "temperature", "invalid_value"),
    "temperature text": ({"temperature": "1"}, "temperature", "invalid_value"),
    "top_p zero": ({"top_p": 0}, "top_p", "invalid_value"),
    "n zero": ({"n": 0}, "n", "invalid_value"),
    "n too many": ({"n": 129}, "n", "invalid_value"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    "max_tokens text": ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens", "invalid_value"),
    "max_tokens huge": ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    "seed huge": ({"seed": 2**63}, "seed", "invalid_value"),
    "five stops": ({"stop": list("abcde")}, "stop", "invalid_value"),
    "empty stop": ({"stop": [""]}, "stop", "invalid_value"),
    "stop of numbers": ({"stop": [1]}, "stop.0", "invalid_value"),
    "stop id outside": ({"stop_token_ids": [10_000]}, "stop_token_ids", "invalid_value"),
    "stream options alone": (
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
        "invalid_value",
    ),
    "template takes over": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "invalid_value",
    ),
    "too long": (
        {"messages": [{"role": "user", "content": "x" * 100}]},
        "messages",
        "context_length_exceeded",
    ),
    "too many wanted": ({"max_tokens": 60}, "max_tokens", "context_length_exceeded"),
}


async def post(served: Any, path: str, body: object, stream: bool = False) -> httpx.Response:
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if value is not ...}
        body = {"stream": True, **body} if stream else body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with served.in_memory() as client:
        headers = {"content-type": "application/json"}
        response: httpx.Response = await client.post(path, content=content, headers=headers)
        return response


def check_problem(response: httpx.Response, status: int, param: str | None, code: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"] and set(error) == {"message", "type", "param", "code"}


@pytest.fixture
def serve(script_app: Serve, saying: Callable[..., Any]) -> AbstractAsyncContextManager[Any]:
    return script_app(saying(1))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CHAT_REFUSALS)
async def test_bad_chat_is_400(
    serve: AbstractAsyncContextManager[Any], name: str, stream: bool
) -> None:
    change, param, code = CHAT_REFUSALS[name]
    async with serve as served:
        body = {"model": "tiny", "messages": USER, **change}
        response = await post(served, "/v1/chat/completions", body, stream)
        check_problem(response, 400, param, code)
        assert served.engine.requests == []


COMPLETION_REFUSALS: dict[str, tuple[dict[str, Any], str | None]] = {
    "empty text": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "list with an empty list": ({"prompt": [[]]}, "prompt"),
    "one of two is empty": ({"prompt": ["a", ""]}, "prompt"),
    "null": ({"prompt": None}, "prompt"),
    "id outside": ({"prompt": [5000]}, "prompt"),
    "id negative": ({"prompt": [-1]}, "prompt"),
    "mixed": ({"prompt": ["a", 1]}, "prompt"),
    "logprobs": ({"logprobs": 0}, "logprobs"),
    "best_of": ({"best_of": 2}, "best_of"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "messages": ({"messages": USER}, "messages"),
    "too many requests": ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
}


@pytest.mark.parametrize("name", COMPLETION_REFUSALS)
async def test_bad_completion_is_400(serve: AbstractAsyncContextManager[Any], name: str) -> None:
    change, param = COMPLETION_REFUSALS[name]
    async with serve as served:
        body = {"model": "tiny", "prompt": "p", **change}
        response = await post(served, "/v1/completions", body)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert str(error["param"]).split(".")[0] == param, error
        assert served.engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "p", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "p", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": ' + b"[" * 5000,
    ],
    ids=["empty", "cut", "list", "null", "utf-8", "surrogate", "nan", "inf", "deep"],
)
async def test_body_that_is_no_request_is_400(
    serve: AbstractAsyncContextManager[Any], body: bytes
) -> None:
    async with serve as served:
        response = await post(served, "/v1/completions", body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert served.engine.requests == []


async def test_too_long_prompt_says_the_numbers(serve: AbstractAsyncContextManager[Any]) -> None:
    async with serve as served:
        response = await post(served, "/v1/completions", {"model": "tiny", "prompt": "x" * 64})
        check_problem(response, 400, "prompt", "context_length_exceeded")
        assert "64" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "status"),
    [
        (62, None, 200),
        (63, None, 200),
        (64, None, 400),
        (65, None, 400),
        (62, 2, 200),
        (62, 3, 400),
        (63, 1, 200),
        (63, 2, 400),
        (64, 1, 400),
        (1, 63, 200),
        (1, 64, 400),
    ],
)
async def test_border_of_the_context(
    serve: AbstractAsyncContextManager[Any], length: int, max_tokens: int | None, status: int
) -> None:
    body = {"model": "tiny", "prompt": "x" * length, "max_tokens": max_tokens}
    async with serve as served:
        response = await post(served, "/v1/completions", body)
    assert response.status_code == status, response.text


async def test_unknown_model_is_404(serve: AbstractAsyncContextManager[Any]) -> None:
    async with serve as served:
        body = {"model": "gpt", "messages": USER}
        response = await post(served, "/v1/chat/completions", body)
        check_problem(response, 404, "model", "model_not_found")
        async with served.in_memory() as client:
            check_problem(await client.get("/v1/models/gpt"), 404, "model", "model_not_found")


async def test_wrong_path_method_and_media_type(serve: AbstractAsyncContextManager[Any]) -> None:
    async with serve as served, served.in_memory() as client:
        check_problem(await client.get("/v1/nothing"), 404, None, "not_found")
        wrong_method = await client.get("/v1/completions")
        check_problem(wrong_method, 405, None, "method_not_allowed")
        assert "POST" in wrong_method.headers["allow"]
        form = await client.post("/v1/completions", data={"model": "tiny"})
        check_problem(form, 415, None, "unsupported_media_type")


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_that_is_too_large_is_413(
    serve: AbstractAsyncContextManager[Any], chunked: bool
) -> None:
    async def parts() -> Any:
        for _ in range(17):
            yield b"x" * 2**20

    async with serve as served, served.in_memory() as client:
        content = parts() if chunked else b"x" * (16 * 2**20 + 1)
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
        check_problem(response, 413, None, "request_too_large")


async def test_model_without_a_template_can_not_chat(script_app: Serve, saying: Any) -> None:
    async with script_app(saying(65), chat_template=None) as served:
        response = await post(served, "/v1/chat/completions", {"model": "tiny", "messages": USER})
        check_problem(response, 400, None, "chat_template_missing")
        completion = await post(served, "/v1/completions", {"model": "tiny", "prompt": "p"})
        assert completion.status_code == 200


async def test_fields_that_ask_for_nothing_are_accepted(script_app: Serve, saying: Any) -> None:
    body = {
        "model": "tiny",
        "messages": [
            *USER,
            {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None},
            *USER,
        ],
        "n": 1,
        "stop": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
    }
    async with script_app(saying(65)) as served:
        response = await post(served, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text


async def test_request_that_was_refused_harms_no_other(
    serve: AbstractAsyncContextManager[Any],
) -> None:
    async with serve as served:
        bad = {"model": "tiny", "prompt": "p", "logit_bias": {"AI": -100}}
        assert (await post(served, "/v1/completions", bad)).status_code == 400
        good = await post(served, "/v1/completions", {"model": "tiny", "prompt": "p"})
        assert good.status_code == 200
        failures = served.serving.metrics.render().decode()
    labels = 'code="unsupported_parameter",engine="0",model_name="tiny"'
    assert f"request_failure_total{{{labels}}} 1.0" in failures
    labels = 'engine="0",finished_reason="stop",model_name="tiny"'
    assert f"request_success_total{{{labels}}} 1.0" in failures


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", -5, "max_tokens is -5, must be greater than or equal to 1"),
        ("temperature", "hot", 'temperature is "hot", must be a valid number'),
    ],
)
async def test_a_refusal_names_the_field_the_value_and_what_is_allowed(
    serve: AbstractAsyncContextManager[Any], field: str, value: object, said: str
) -> None:
    async with serve as served:
        body = {"model": "tiny", "prompt": "p", field: value}
        error = (await post(served, "/v1/completions", body)).json()["error"]
    assert said in error["message"]
