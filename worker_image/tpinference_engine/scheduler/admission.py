"""Which requests can be served at all: everything is checked at the door, nothing deep in a step.

Pure, so that the API server asks before it begins a stream and the scheduler asks again. It does
not know what else is running.
"""

from __future__ import annotations

import math

from tpinference_engine.errors import PromptTooLong, RequestRefused
from tpinference_engine.request import Request, SamplingParams
from tpinference_engine.scheduler.limits import SchedulerLimits

MAX_TEMPERATURE = 100.0
"""Above it all distributions are flat; it keeps the value inside a 32-bit float."""
_INT64 = 2**63


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """Raises RequestRefused, naming the parameter, its value and what is allowed."""
    _check_prompt(request.prompt_token_ids, limits)
    _check_sampling(request.params, limits)
    _check_length(request, limits)
    if request.priority and limits.scheduling_policy != "priority":
        raise RequestRefused(
            f"priority is {request.priority!r}, must be 0: requests are served in the order of "
            "their arrival, scheduling_policy 'priority' allows others",
            param="priority",
        )


def _check_prompt(prompt: tuple[int, ...], limits: SchedulerLimits) -> None:
    if not prompt:
        raise RequestRefused("prompt is empty, must have at least one token", param="prompt")
    _check_token_ids("prompt", prompt, limits)


def _check_token_ids(param: str, token_ids: tuple[int, ...], limits: SchedulerLimits) -> None:
    wrong = next((t for t in token_ids if not 0 <= t < limits.vocab_size), None)
    if wrong is not None:
        raise RequestRefused(
            f"{param} has token id {wrong!r}, must be 0 to {limits.vocab_size - 1}", param=param
        )


def _check_sampling(params: SamplingParams, limits: SchedulerLimits) -> None:
    checks = (
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            math.isfinite(params.temperature) and 0.0 <= params.temperature <= MAX_TEMPERATURE,
            f"0 to {MAX_TEMPERATURE:g}",
        ),
        ("top_p", math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0, "above 0, at most 1"),
        ("top_k", 0 <= params.top_k < 2**31, "0 (no limit) to 2147483647"),
        (
            "seed",
            params.seed is None or -_INT64 <= params.seed < _INT64,
            "a signed 64-bit integer",
        ),
    )
    for param, is_fine, allowed in checks:
        if not is_fine:
            raise RequestRefused(
                f"{param} is {getattr(params, param)!r}, must be {allowed}", param=param
            )
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)


def _check_length(request: Request, limits: SchedulerLimits) -> None:
    prompt, output = len(request.prompt_token_ids), request.params.max_tokens
    most = limits.max_model_len
    if prompt + output <= most:
        return
    raise PromptTooLong(
        f"the prompt has {prompt} tokens and max_tokens is {output}, together {prompt + output}; "
        f"the model allows {most}",
        param="prompt" if prompt >= most else "max_tokens",
        code="context_length_exceeded",
    )
