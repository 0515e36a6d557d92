"""What can't be served is refused at the door, by name, value and what is allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tpinference_engine.errors import InvalidConfig, PromptTooLong, RequestRefused
from tpinference_engine.request import Request, SamplingParams
from tpinference_engine.scheduler.admission import check_request
from tpinference_engine.scheduler.limits import SchedulerLimits


def limits(**changes: Any) -> SchedulerLimits:
    base: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_num_requests": 8,
        "max_model_len": 32,
        "block_size": 4,
        "num_blocks": 16,
        "vocab_size": 100,
        "eos_token_ids": (),
    }
    return SchedulerLimits(**{**base, **changes})


def request(prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Request:
    sampling: dict[str, Any] = {"max_tokens": 4, **params}
    return Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(**sampling))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1e-6},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop_token_ids": (0, 99)},
    ],
)
def test_what_is_allowed_passes(params: dict[str, Any]) -> None:
    check_request(request(**params), limits())


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "is 0, must be at least 1"),
        ({"max_tokens": -1}, "max_tokens", "is -1, must be at least 1"),
        ({"temperature": -0.1}, "temperature", "is -0.1, must be 0 to 100"),
        ({"temperature": 101.0}, "temperature", "is 101.0, must be 0 to 100"),
        ({"temperature": float("nan")}, "temperature", "is nan, must be 0 to 100"),
        ({"top_p": 0.0}, "top_p", "is 0.0, must be above 0, at most 1"),
        ({"top_p": 1.1}, "top_p", "is 1.1, must be above 0, at most 1"),
        ({"top_p": float("nan")}, "top_p", "is nan"),
        ({"top_k": -1}, "top_k", r"is -1, must be 0 \(no limit\) to 2147483647"),
        ({"top_k": 2**31}, "top_k", "is 2147483648, must be"),
        ({"seed": 2**63}, "seed", "must be a signed 64-bit integer"),
        ({"stop_token_ids": (5, 100)}, "stop_token_ids", "token id 100, must be 0 to 99"),
        ({"prompt": (1, -1)}, "prompt", "token id -1, must be 0 to 99"),
        ({"prompt": (1, 100)}, "prompt", "token id 100, must be 0 to 99"),
        ({"prompt": ()}, "prompt", "is empty, must have at least one token"),
    ],
)
def test_what_is_wrong_is_named(params: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as caught:
        check_request(request(**params), limits())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "refused"),
    [
        (31, 1, None),
        (1, 31, None),
        (31, 2, "max_tokens"),
        (1, 32, "max_tokens"),
        (32, 1, "prompt"),
        (33, 1, "prompt"),
        (16, 10**9, "max_tokens"),
    ],
)
def test_prompt_and_output_fit_the_model(
    num_prompt: int, max_tokens: int, refused: str | None
) -> None:
    wanted = request((1,) * num_prompt, max_tokens=max_tokens)
    if refused is None:
        check_request(wanted, limits())
        return
    with pytest.raises(PromptTooLong, match="the model allows 32") as caught:
        check_request(wanted, limits())
    assert (caught.value.param, caught.value.code) == (refused, "context_length_exceeded")


@pytest.mark.parametrize("priority", [-(2**31), -1, 1, 2**31 - 1])
def test_a_priority_is_refused_where_requests_are_served_as_they_come(priority: int) -> None:
    wanted = msgspec.structs.replace(request(), priority=priority)
    with pytest.raises(RequestRefused, match=f"priority is {priority}, must be 0.*'priority'") as e:
        check_request(wanted, limits())
    assert e.value.param == "priority"
    check_request(wanted, limits(scheduling_policy="priority"))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_neutral_priority_is_always_allowed(policy: str) -> None:
    check_request(request(), limits(scheduling_policy=policy))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(8, 4), (2, 16), (1, 32), (5, 7)])
def test_a_cache_may_hold_a_single_request_of_full_length(num_blocks: int, block_size: int) -> None:
    limits(num_blocks=num_blocks, block_size=block_size)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "allowed", "needed"),
    [(7, 4, 28, 8), (1, 16, 16, 2), (1, 31, 31, 2), (4, 7, 28, 5)],
)
def test_a_cache_that_holds_no_request_of_full_length_is_refused(
    num_blocks: int, block_size: int, allowed: int, needed: int
) -> None:
    message = (
        f"num_blocks is {num_blocks} of block_size {block_size}, which hold {allowed} tokens, "
        f"must be at least {needed} for one request of max_model_len 32: "
        f"allow more blocks, or set max_model_len to {allowed} or less"
    )
    with pytest.raises(InvalidConfig, match=f"^{message}$"):
        limits(num_blocks=num_blocks, block_size=block_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"max_model_len": 1}, "max_model_len is 1, must be at least 2"),
    ],
)
def test_limits_that_admit_nothing_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        limits(**change)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (8, 8), (9, 12), (12, 12)]
)
def test_buckets_are_powers_of_two_up_to_the_budget(num_tokens: int, bucket: int) -> None:
    assert limits().bucket_for(num_tokens) == bucket
