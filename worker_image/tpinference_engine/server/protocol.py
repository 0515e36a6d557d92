"""The bodies that clients send, as OpenAI's API has them, plus a few of vLLM's extra fields.

Models are frozen, strict, and refuse unknown fields. A field of OpenAI's that is not done yet is
declared as `Unsupported`, with the values that ask for nothing; so it is never ignored. A field
that can't change the answer is declared as `Ignored`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_SALT_LENGTH = 1024

_INT64 = 2**63


class _Unsupported:
    """Accepts the values that ask for nothing; any other is refused, and the field named."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = (None, *neutral)

    def __call__(self, value: object) -> object:
        # True == 1 in Python, and false is not a penalty of 0.
        if not any(type(value) is type(n) and value == n for n in self._neutral):
            raise PydanticCustomError("unsupported", "is not supported")
        return value


def _whole(value: object) -> object:
    """0 and 0.0 are the same number in JSON."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number else value  # type: ignore[arg-type]


Ignored = Annotated[object, Field(repr=False)]
UnsupportedObject = Annotated[object, AfterValidator(_Unsupported({}))]
UnsupportedList = Annotated[object, AfterValidator(_Unsupported([]))]
UnsupportedFlag = Annotated[object, AfterValidator(_Unsupported(False))]
UnsupportedZero = Annotated[object, AfterValidator(_whole), AfterValidator(_Unsupported(0.0))]
Unsupported = Annotated[object, AfterValidator(_Unsupported())]
TextFormat = Annotated[object, AfterValidator(_Unsupported({"type": "text"}))]
NoTools = Annotated[object, AfterValidator(_Unsupported("none", "auto"))]
TextModality = Annotated[object, AfterValidator(_Unsupported(["text"]))]


def _check_stop(stop: object) -> object:
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and not all(stops):
        raise PydanticCustomError("empty_stop", "must not hold an empty string")
    return stop


class Body(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


class StreamOptions(Body):
    include_usage: bool = False


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS)]


class SamplingBody(Body):
    """What both routes that generate have in common."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str | Stops | None, AfterValidator(_check_stop)] = None
    max_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 = all of the vocabulary."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    ignore_eos: bool = False
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Lower goes first, both in the queue and when the cache runs out; 0 if absent, and the only
    one that scheduling_policy fcfs allows."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_LENGTH)
    """Only calls with the same one find, and by their speed notice, each other's prefixes."""
    return_token_ids: bool = False

    logit_bias: UnsupportedObject = None
    presence_penalty: UnsupportedZero = None
    frequency_penalty: UnsupportedZero = None
    user: Ignored = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SamplingBody):
    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    echo: bool | None = None

    best_of: Annotated[object, AfterValidator(_Unsupported(1))] = None
    logprobs: Unsupported = None
    suffix: Annotated[object, AfterValidator(_Unsupported(""))] = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    # Clients send back the assistant's message as they got it, with these at null.
    refusal: Unsupported = None
    annotations: UnsupportedList = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: UnsupportedList = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Strict(False)] | None = None

    logprobs: UnsupportedFlag = None
    top_logprobs: Annotated[object, AfterValidator(_Unsupported(0))] = None
    tools: UnsupportedList = None
    tool_choice: NoTools = None
    parallel_tool_calls: Ignored = None
    functions: UnsupportedList = None
    function_call: NoTools = None
    response_format: TextFormat = None
    modalities: TextModality = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    store: UnsupportedFlag = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @property
    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens
