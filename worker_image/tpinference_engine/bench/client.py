"""One request of a benchmark over HTTP, and when its tokens came.

Completions with token ids as the prompt, and two of vLLM's extra fields: `ignore_eos`, so that all
outputs have one length, and `return_token_ids`, so that a token whose text is not whole yet is
seen when it comes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from tpinference_engine.bench.prompt import TokenIds
from tpinference_engine.errors import TPInferenceError

_MESSAGE_BYTES = 300
"""Of a body that is not understood, how much is shown."""


class ServerFailed(TPInferenceError):
    """The server that is measured can't be reached, or said no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times of one request's tokens."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    """When tokens came, of the same clock."""
    num_tokens: int
    """More than arrivals if some came together."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.arrivals_s[-1] - self.sent_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return tuple(later - sooner for sooner, later in pairs)

    @property
    def tpot_s(self) -> float | None:
        """None for a single token, which has no time after the first."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The name that requests use, if none was given. Raises ServerFailed."""
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"base_url is {base_url!r}, no server answers there: {error}") from error
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ServerFailed(f"{base_url}/v1/models names no model: {_shown(body)}") from error


async def ask(
    session: aiohttp.ClientSession, base_url: str, model: str, prompt: TokenIds, max_tokens: int
) -> Answer:
    """Raises ServerFailed for whatever is no complete answer."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    sent = time.perf_counter()
    try:
        async with session.post(f"{base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                said = _shown(await response.read())
                raise ServerFailed(f"the server answered {response.status}: {said}")
            return await _read_answer(sent, response, max_tokens)
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFailed(f"the connection broke: {type(error).__name__}: {error}") from error


async def _read_answer(sent: float, response: aiohttp.ClientResponse, max_tokens: int) -> Answer:
    arrivals: list[float] = []
    num_tokens = 0
    async for chunk in _chunks(response):
        if "error" in chunk:
            raise ServerFailed(f"the stream ended by an error: {chunk['error']}")
        new = sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices") or ())
        if new:
            arrivals.append(time.perf_counter())
            num_tokens += new
    if num_tokens != max_tokens:
        raise ServerFailed(f"the stream had {num_tokens} tokens, must have {max_tokens}")
    return Answer(sent_s=sent, arrivals_s=tuple(arrivals), num_tokens=num_tokens)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if data == line.strip() or data == b"[DONE]":
            continue  # Between two events, or after the last.
        try:
            yield msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerFailed(
                f"the stream has an event that is no JSON: {_shown(data)}"
            ) from error


def _shown(body: bytes) -> str:
    return body[:_MESSAGE_BYTES].decode(errors="replace")
