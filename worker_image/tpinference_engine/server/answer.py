"""OpenAI's shapes of an answer: what a choice looks like, whole and in a stream.

`Answer` is one answer's envelope; the two routes differ in `ChoiceShape` alone. Values only: it
does not know how they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tpinference_engine.server.generation import Ending

Json = dict[str, Any]


class ChoiceShape(Protocol):
    whole_object: str
    chunk_object: str
    id_prefix: str

    def opening(self, index: int) -> Json | None:
        """What a choice's stream begins with, before any text."""

    def delta(self, index: int, text: str) -> Json: ...

    def closing(self, index: int, ending: Ending) -> Json:
        """The last of a choice's stream. It has no text: clients drop text that ends there."""

    def whole(self, index: int, text: str, ending: Ending) -> Json: ...


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    @property
    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    answer_id: str
    created: int
    model: str
    shape: ChoiceShape

    def _envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices)}

    def whole(self, choices: Sequence[Json], usage: Usage) -> Json:
        return {**self._envelope(self.shape.whole_object, choices), "usage": usage.body}

    def chunk(self, choices: Sequence[Json], extra: Mapping[str, Any]) -> Json:
        return {**self._envelope(self.shape.chunk_object, choices), **extra}


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self, index: int) -> Json:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str) -> Json:
        return self._chunk(index, {"content": text}, None)

    def closing(self, index: int, ending: Ending) -> Json:
        return self._chunk(index, {}, ending)

    def whole(self, index: int, text: str, ending: Ending) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": ending}

    def _chunk(self, index: int, delta: Json, ending: Ending | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": ending}


class CompletionShape:
    """`echoes` is the prompt of each choice, where the client asked to see it again."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, echoes: Sequence[str] | None) -> None:
        self._echoes = echoes

    def opening(self, index: int) -> Json | None:
        return None if self._echoes is None else self._choice(index, self._echoes[index], None)

    def delta(self, index: int, text: str) -> Json:
        return self._choice(index, text, None)

    def closing(self, index: int, ending: Ending) -> Json:
        return self._choice(index, "", ending)

    def whole(self, index: int, text: str, ending: Ending) -> Json:
        echo = "" if self._echoes is None else self._echoes[index]
        return self._choice(index, echo + text, ending)

    def _choice(self, index: int, text: str, ending: Ending | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": ending}
