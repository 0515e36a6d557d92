"""From engine outputs to text: one choice, and several of them run side by side.

A piece is what one engine output adds to a choice. Text is cut and tokens are counted here, so that
a stream and a whole answer can't differ. It knows no HTTP and no shape of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol

from tpinference_engine.errors import DeadlineExceeded, EngineStopped, GroupFailed
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.server.detokenizer import Detokenizer
from tpinference_engine.server.stop import StopFinder

Ending = Literal["stop", "length"]


class Generator(Protocol):
    """The part of the engine that a choice needs."""

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Refuses now what it refuses. Closed before its end, the request is aborted."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    token_ids: tuple[int, ...]
    """All that count, the one that ended the choice included."""
    ending: Ending | None


class ChoiceText:
    """The text of one choice so far. `push` is not called again after a piece with an ending."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = StopFinder(stops)

    def push(self, output: RequestOutput) -> Piece:
        hidden = len(output.token_ids) - 1 if output.finish_reason is FinishReason.STOP else None
        text = ""
        for at, token_id in enumerate(output.token_ids):
            if at == hidden:
                break
            shown, stopped = self._stop.push(self._detokenizer.push(token_id))
            text += shown
            if stopped:
                return Piece(text, output.token_ids[: at + 1], "stop")
        ending = _ending(output)
        return Piece(text + (self._stop.flush() if ending else ""), output.token_ids, ending)


def _ending(output: RequestOutput) -> Ending | None:
    match output.finish_reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.ABORT:
            raise EngineStopped(output.error or "the engine stopped before the request ended")
        case FinishReason.DEADLINE:
            raise DeadlineExceeded(output.error or "the request's deadline passed")
        case FinishReason.ERROR:
            raise GroupFailed(output.error or "the engine failed before the request ended")
        case None:
            return None


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    request: Request
    text: ChoiceText


async def run_choice(engine: Generator, choice: Choice) -> AsyncGenerator[Piece, None]:
    """Pieces up to the one with an ending. Left early for any reason, the request is aborted."""
    async with aclosing(engine.generate(choice.request)) as outputs:
        async for output in outputs:
            piece = choice.text.push(output)
            yield piece
            if piece.ending:
                return
    raise GroupFailed(f"request {choice.request.request_id!r} ended without a reason")


Indexed = tuple[int, Piece]


async def run_choices(
    engine: Generator, choices: Sequence[Choice]
) -> AsyncGenerator[Indexed, None]:
    """The pieces of all choices as they come, with the choice's index.

    The first choice that fails fails all; closing the generator aborts all.
    """
    # One choice is the common case, and needs no task and no queue between its tokens.
    interleaved = _interleave(engine, choices) if len(choices) > 1 else _single(engine, *choices)
    async with aclosing(interleaved) as items:
        async for item in items:
            yield item


async def _single(engine: Generator, choice: Choice) -> AsyncGenerator[Indexed, None]:
    async with aclosing(run_choice(engine, choice)) as pieces:
        async for piece in pieces:
            yield choice.index, piece


async def _interleave(
    engine: Generator, choices: Sequence[Choice]
) -> AsyncGenerator[Indexed, None]:
    arrived: asyncio.Queue[Indexed | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        async with aclosing(run_choice(engine, choice)) as pieces:
            async for piece in pieces:
                arrived.put_nowait((choice.index, piece))

    running = {asyncio.create_task(pump(choice)) for choice in choices}
    for task in running:
        task.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while running or not arrived.empty():
            item = await arrived.get()
            if item is not None:
                yield item
                continue
            for task in {task for task in running if task.done()}:
                running.discard(task)
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
