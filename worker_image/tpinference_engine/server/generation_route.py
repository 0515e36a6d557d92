"""A call that generates, from its bytes to its last: both OpenAI routes are this one, twice.

Up to the first piece of the first choice, whatever fails is a status; after it, an event that no
client takes for success.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tpinference_engine.errors import TPInferenceError
from tpinference_engine.server.answer import Json
from tpinference_engine.server.body import read_json_body
from tpinference_engine.server.gate import Admission, Gate
from tpinference_engine.server.generation import Generator, Indexed, Piece, run_choices
from tpinference_engine.server.metrics import Metrics
from tpinference_engine.server.plan import Plan, ServedModel
from tpinference_engine.server.problems import problem_of
from tpinference_engine.server.protocol import SamplingBody
from tpinference_engine.server.request_timeout import deadline_of
from tpinference_engine.server.streaming import DONE, event, send_events, while_connected
from tpinference_engine.server.tally import Tally
from tpinference_engine.server.validation import parse_body

AnyBody = TypeVar("AnyBody", bound=SamplingBody)


@dataclass(frozen=True, slots=True)
class Serving:
    """What routes share while the engine serves."""

    engine: Generator
    model: ServedModel
    gate: Gate
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class _Call:
    body: bytes
    arrived: float
    deadline: float | None


class GenerationRoute(Generic[AnyBody]):
    """An ASGI application of its own, so that nothing stands between it and the connection."""

    def __init__(
        self,
        serving: Serving,
        kind: type[AnyBody],
        plan: Callable[[ServedModel, AnyBody, float | None], Plan],
    ) -> None:
        self._serving = serving
        self._kind = kind
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        try:
            # Before the body is read: what is being read and planned is bounded as well.
            with self._serving.gate.admit() as admission:
                request = Request(scope, receive)
                deadline = deadline_of(request.headers, arrived)
                body = await read_json_body(request)
                answer = partial(self._answer, _Call(body, arrived, deadline), admission, scope)
                await while_connected(receive, send, answer)
        except ClientDisconnect:
            self._count_failure("client_disconnected")
        except TPInferenceError as error:
            self._count_failure(problem_of(error).code)
            raise

    async def _answer(self, call: _Call, admission: Admission, scope: Scope, send: Send) -> None:
        # Templates and encodings of long prompts take a while, and may not hold up other streams.
        plan = await asyncio.to_thread(self._read, call)
        admission.widen_to(len(plan.choices))
        tally = Tally(self._serving.metrics, plan.num_prompt_tokens, call.arrived)
        async with aclosing(run_choices(self._serving.engine, plan.choices)) as pieces:
            if plan.stream:
                first = await anext(pieces)
                await send_events(self._events(plan, first, pieces, tally), send)
            else:
                response = JSONResponse(await _whole(plan, pieces, tally))
                await response(scope, _no_receive, send)
        tally.finish()

    def _read(self, call: _Call) -> Plan:
        body = parse_body(self._kind, call.body)
        return self._plan(self._serving.model, body, call.deadline)

    async def _events(
        self, plan: Plan, first: Indexed, pieces: AsyncGenerator[Indexed, None], tally: Tally
    ) -> AsyncIterator[bytes]:
        try:
            async for data in _success_events(plan, first, pieces, tally):
                yield data
        except TPInferenceError as error:
            problem = problem_of(error)
            self._count_failure(problem.code)
            yield event(problem.body)

    def _count_failure(self, code: str | None) -> None:
        self._serving.metrics.count_failure(code or "invalid_request")


async def _no_receive() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def _success_events(
    plan: Plan, first: Indexed, pieces: AsyncGenerator[Indexed, None], tally: Tally
) -> AsyncIterator[bytes]:
    usage = {"usage": None} if plan.include_usage else {}
    opened: set[int] = set()
    async for index, piece in _with_first(first, pieces):
        tally.count(index, piece)
        for choice in _choice_chunks(plan, index, piece, is_first=index not in opened):
            yield event(plan.answer.chunk([choice], usage))
        opened.add(index)
    if plan.include_usage:
        yield event(plan.answer.chunk([], {"usage": tally.usage.body}))
    yield DONE


async def _with_first(
    first: Indexed, rest: AsyncGenerator[Indexed, None]
) -> AsyncIterator[Indexed]:
    yield first
    async for item in rest:
        yield item


def _choice_chunks(plan: Plan, index: int, piece: Piece, *, is_first: bool) -> list[Json]:
    """Opening, text, closing; each only where there is something to say."""
    shape = plan.answer.shape
    chunks: list[Json] = []
    opening = shape.opening(index) if is_first else None
    if opening is not None:
        chunks.append(opening)
    if piece.text or plan.return_token_ids:
        ids = {"token_ids": list(piece.token_ids)} if plan.return_token_ids else {}
        chunks.append({**shape.delta(index, piece.text), **ids})
    if piece.ending:
        chunks.append(shape.closing(index, piece.ending))
    return chunks


async def _whole(plan: Plan, pieces: AsyncGenerator[Indexed, None], tally: Tally) -> Json:
    of_choice: list[list[Piece]] = [[] for _ in plan.choices]
    async for index, piece in pieces:
        tally.count(index, piece)
        of_choice[index].append(piece)
    choices = [_whole_choice(plan, index, found) for index, found in enumerate(of_choice)]
    return plan.answer.whole(choices, tally.usage)


def _whole_choice(plan: Plan, index: int, pieces: list[Piece]) -> Json:
    """run_choices ends well only after every choice had a piece with an ending, its last."""
    ending = pieces[-1].ending
    assert ending is not None, f"choice {index} has no ending"
    choice = plan.answer.shape.whole(index, "".join(piece.text for piece in pieces), ending)
    if plan.return_token_ids:
        choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
    return choice
