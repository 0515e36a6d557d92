"""A checked body to what the engine is asked for: one request a choice, and the answer's envelope.

Everything that can be refused is refused here, before anything runs. Pure but for the answer's id
and time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tpinference_engine.errors import PromptTooLong, RequestRefused
from tpinference_engine.model.config import GenerationDefaults
from tpinference_engine.request import Request, SamplingParams
from tpinference_engine.server.answer import Answer, ChatShape, ChoiceShape, CompletionShape
from tpinference_engine.server.chat_template import ChatTemplate, Message
from tpinference_engine.server.generation import Choice, ChoiceText
from tpinference_engine.server.protocol import ChatBody, ChatMessage, CompletionBody, SamplingBody
from tpinference_engine.server.tokenizer import Tokenizer

MAX_REQUESTS_PER_CALL = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's; a chat goes on to the model's length."""
_GREEDY_BELOW = 1e-5
"""A temperature that divides logits out of float32's range means greedy."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    defaults: GenerationDefaults
    created: int
    """Unix time of the start."""


@dataclass(frozen=True, slots=True)
class Plan:
    answer: Answer
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    stream: bool
    include_usage: bool
    return_token_ids: bool


def plan_chat(model: ServedModel, body: ChatBody, deadline: float | None = None) -> Plan:
    _check_common(model, body)
    if model.chat_template is None:
        raise RequestRefused(
            "the model has no chat template, use /v1/completions", code="chat_template_missing"
        )
    messages = [_message(message) for message in body.messages]
    text = model.chat_template.render(messages, body.chat_template_kwargs or {})
    prompt = model.tokenizer.encode(text, add_special_tokens=False)
    _check_prompts(model, [prompt], "messages")
    limit = body.output_limit
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = _max_tokens(model, prompt, limit, model.max_model_len, ("messages", name))
    return _plan(model, body, ChatShape(), [prompt], [max_tokens], deadline)


def plan_completion(
    model: ServedModel, body: CompletionBody, deadline: float | None = None
) -> Plan:
    _check_common(model, body)
    prompts = [
        model.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, str)
        else tuple(prompt)
        for prompt in _prompts(body)
    ]
    _check_prompts(model, prompts, "prompt")
    max_tokens = [
        _max_tokens(
            model, prompt, body.max_tokens, DEFAULT_COMPLETION_TOKENS, ("prompt", "max_tokens")
        )
        for prompt in prompts
    ]
    echoes = _echoes(model, body) if body.echo else None
    return _plan(model, body, CompletionShape(echoes), prompts, max_tokens, deadline)


def _message(message: ChatMessage) -> Message:
    """Templates know the developer by the older name."""
    role = "system" if message.role == "developer" else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.text, **name}


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _echoes(model: ServedModel, body: CompletionBody) -> list[str]:
    """A prompt's text for each choice."""
    texts = [p if isinstance(p, str) else model.tokenizer.decode(p) for p in _prompts(body)]
    return [text for text in texts for _ in range(body.num_choices)]


def _check_common(model: ServedModel, body: SamplingBody) -> None:
    if body.model not in model.names:
        raise RequestRefused(
            f"the model {body.model!r} does not exist, served is {', '.join(model.names)}",
            param="model",
            code="model_not_found",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestRefused(
            "stream_options: only allowed when stream is true",
            param="stream_options",
            code="invalid_value",
        )
    _check_ids(model, body.stop_token_ids or (), "stop_token_ids")


def _check_ids(model: ServedModel, token_ids: Sequence[int], param: str) -> None:
    worst = max(token_ids, default=0)
    if worst >= model.vocab_size:
        raise RequestRefused(
            f"{param}: token id {worst} is not in the vocabulary of {model.vocab_size}",
            param=param,
            code="invalid_value",
        )


def _check_prompts(model: ServedModel, prompts: Sequence[TokenIds], param: str) -> None:
    for prompt in prompts:
        if not prompt:
            raise RequestRefused(
                f"{param}: has no tokens, must have at least one", param=param, code="invalid_value"
            )
        _check_ids(model, prompt, param)


def _max_tokens(
    model: ServedModel,
    prompt: TokenIds,
    wanted: int | None,
    default: int,
    fields: tuple[str, str],
) -> int:
    """The room that is left bounds what a client asks for, and what he gets if he does not.

    `fields` are the names of the prompt and of `wanted` in the body.
    """
    limit, room = model.max_model_len, model.max_model_len - len(prompt)
    if room >= (wanted or 1):
        return wanted or min(default, room)
    of_prompt, of_wanted = fields
    asked = f" and {of_wanted} asks for {wanted}" if wanted else ", which leaves none for an answer"
    raise PromptTooLong(
        f"this model's maximum context length is {limit} tokens; the prompt has {len(prompt)}"
        + asked,
        param=of_wanted if wanted and room > 0 else of_prompt,
    )


def _plan(
    model: ServedModel,
    body: SamplingBody,
    shape: ChoiceShape,
    prompts: Sequence[TokenIds],
    max_tokens: Sequence[int],
    deadline: float | None,
) -> Plan:
    num_requests = len(prompts) * body.num_choices
    if num_requests > MAX_REQUESTS_PER_CALL:
        raise RequestRefused(
            f"{len(prompts)} prompts with {body.num_choices} choices each are {num_requests} "
            f"requests, at most {MAX_REQUESTS_PER_CALL} are allowed in one call",
            param="prompt",
            code="invalid_value",
        )
    # The id is ours, so that two clients can't clash in one.
    answer_id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
    choices = tuple(
        Choice(
            index=at * body.num_choices + nth,
            request=Request(
                request_id=f"{answer_id}-{at * body.num_choices + nth}",
                prompt_token_ids=prompt,
                params=_params(model.defaults, body, max_tokens[at], nth),
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                deadline=deadline,
            ),
            text=ChoiceText(model.tokenizer.detokenizer(), body.stops),
        )
        for at, prompt in enumerate(prompts)
        for nth in range(body.num_choices)
    )
    return Plan(
        answer=Answer(answer_id, int(time.time()), model.names[0], shape),
        choices=choices,
        num_prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        return_token_ids=body.return_token_ids,
    )


def _params(
    defaults: GenerationDefaults, body: SamplingBody, max_tokens: int, nth: int
) -> SamplingParams:
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=int(max(_first(body.top_k, defaults.top_k, 0), 0)),
        seed=None if body.seed is None else _wrap_int64(body.seed + nth),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def _first(asked: float | None, advised: float | None, neutral: float) -> float:
    """A client's value, else what the model's makers advise, else what changes nothing."""
    if asked is not None:
        return asked
    return neutral if advised is None else advised


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
