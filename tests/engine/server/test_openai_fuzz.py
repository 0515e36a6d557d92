"""Any body at all gets an answer that is not our fault, and harms no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpinference_engine.server.protocol import ChatBody, CompletionBody

Serve = Callable[..., AbstractAsyncContextManager[Any]]

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63])
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.text("aA0{}<|\u00e9\ud800\U0001f600\n", max_size=8)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "text", "role"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def bodies(good: dict[str, Any], fields: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A good body with some fields replaced by anything."""
    changes = st.dictionaries(st.sampled_from(fields), VALUES, max_size=3)
    return changes.map(lambda change: {**good, **change})


CHAT = bodies(
    {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, list(ChatBody.model_fields)
)
COMPLETION = bodies({"model": "tiny", "prompt": "hi"}, list(CompletionBody.model_fields))


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    call=st.one_of(
        st.tuples(st.just("/v1/chat/completions"), CHAT),
        st.tuples(st.just("/v1/completions"), COMPLETION),
    )
)
def test_no_body_is_our_fault(
    script_app: Serve, saying: Callable[..., Any], call: tuple[str, dict[str, Any]]
) -> None:
    path, body = call

    async def post() -> None:
        async with script_app(saying(65), max_requests=10_000) as app, app.in_memory() as client:
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=json.dumps(body), headers=headers)
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]["type"] == "invalid_request_error"
            assert not app.engine.running and app.serving.gate.num_inside == 0

    asyncio.run(post())


@pytest.mark.parametrize("body", [b"\x00", b"{}" * 1000, b"1" * 10_000, b'"' + b"a" * 100 + b'"'])
async def test_no_bytes_are_our_fault(
    script_app: Serve, saying: Callable[..., Any], body: bytes
) -> None:
    async with script_app(saying(65)) as app, app.in_memory() as client:
        headers = {"content-type": "application/json; charset=utf-8"}
        answer = await client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
