"""The echo runner finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import MessageCorrupt
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, EchoRunner, echo_token
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow, StepInput

PROMPT = (5, 6, 7, 8, 9)
NEW = NewSlot(0, 1, len(PROMPT), 0.0, 1.0, 0, 0)


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(echo_token(tokens, prompt_length=len(prompt), vocab_size=DEFAULT_VOCAB_SIZE))
    return tokens[len(prompt) :]


def step(**parts: Any) -> StepInput:
    return StepInput(step_id=0, epoch=0, bucket=16, **parts)


@pytest.fixture
def runner(make_config: Callable[..., EngineConfig]) -> EchoRunner:
    runner = EchoRunner(make_config(max_model_len=32))
    runner.allocate_cache(8)
    return runner


def test_batched_chunked_requests_get_the_predicted_tokens(
    make_config: Callable[..., EngineConfig], make_driver: Any, echo_runner: RunnerFactory
) -> None:
    prompts = [(1, 2, 3, 4, 5, 6, 7), (8,), (9, 10, 11, 12)]
    driver = make_driver(make_config(max_num_batched_tokens=6, max_num_seqs=6), echo_runner)
    assert driver.generate(prompts, 9, chunk=3) == [expected(p, 9) for p in prompts]
    assert driver.generate(prompts, 9) == [expected(p, 9) for p in prompts]


def test_replayed_output_continues_the_same_request(runner: EchoRunner) -> None:
    """prompt_length travels apart from the tokens, so a replay predicts what the first run did."""
    first = expected(PROMPT, 4)
    replay = (*PROMPT, *first[:3])
    runner.enqueue(
        step(
            new=(NEW,),
            appends=(BlockAppend(0, (4, 2)),),
            forward=(ForwardRow(0, 1, 0, len(replay), replay, True),),
        )
    )
    assert runner.enqueue(step(sample=(SampleRow(0, 1, len(replay)),))).wait() == first[3:]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"forward": (ForwardRow(0, 1, 0, 5, PROMPT, True),)}, "slot 0 of generation 1"),
        (
            {
                "new": (NEW,),
                "appends": (BlockAppend(0, (1,)),),
                "forward": (ForwardRow(0, 1, 0, 5, PROMPT, True),),
            },
            "1 blocks of 4",
        ),
        (
            {
                "new": (NEW,),
                "appends": (BlockAppend(0, (1, 2)),),
                "forward": (ForwardRow(0, 2, 0, 5, PROMPT, True),),
            },
            "generation 2",
        ),
        (
            {
                "new": (NEW,),
                "appends": (BlockAppend(0, (1, 2)),),
                "forward": (ForwardRow(0, 1, 4, 1, (9,), True),),
            },
            "never written",
        ),
        ({"new": (NEW,), "appends": (BlockAppend(0, (1, 1)),)}, "has a block twice"),
        ({"new": (NEW,), "appends": (BlockAppend(0, (8,)),)}, "outside of 8 blocks"),
        ({"new": (NEW, NEW)}, "unused slot"),
        ({"free": (0,)}, "not in use"),
        ({"sample": (SampleRow(0, 1, 5),)}, "no pending logits"),
        (
            {
                "new": (NEW,),
                "appends": (BlockAppend(0, (1, 2)),),
                "forward": (ForwardRow(0, 1, 0, 1, (), True),),
            },
            "wants the token sampled",
        ),
    ],
    ids=[
        "a row of an unknown slot",
        "too few blocks",
        "another generation",
        "a hole in the cache",
        "a block given twice",
        "a block that is not there",
        "a slot taken twice",
        "a free slot freed",
        "nothing to sample",
        "no token to gather",
    ],
)
def test_message_that_breaks_the_rules_is_refused(
    runner: EchoRunner, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(MessageCorrupt, match=message):
        runner.enqueue(step(**parts))


FIRST = step(
    new=(NEW,),
    appends=(BlockAppend(0, (1, 2)),),
    forward=(ForwardRow(0, 1, 0, 5, PROMPT, True),),
)
OTHER = NewSlot(1, 2, len(PROMPT), 0.0, 1.0, 0, 0)


def test_a_prefix_that_was_computed_is_continued(runner: EchoRunner) -> None:
    """By another slot beside its owner, and by one after it."""
    runner.enqueue(FIRST)
    rest = (PROMPT[-1],)
    beside = step(
        new=(OTHER,),
        appends=(BlockAppend(1, (1, 3)),),
        forward=(ForwardRow(1, 2, 4, 1, rest, True),),
    )
    runner.enqueue(beside)
    after = step(
        sample=(SampleRow(1, 2, 5),),
        free=(0, 1),
        new=(NewSlot(0, 3, len(PROMPT), 0.0, 1.0, 0, 0),),
        appends=(BlockAppend(0, (1, 4)),),
        forward=(ForwardRow(0, 3, 4, 1, rest, True),),
    )
    assert runner.enqueue(after).wait() == expected(PROMPT, 1)
    assert runner.enqueue(step(sample=(SampleRow(0, 3, 5),))).wait() == expected(PROMPT, 1)


def test_the_same_tokens_behind_others_are_another_prefix(runner: EchoRunner) -> None:
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    runner.enqueue(
        step(
            new=(NewSlot(0, 1, 9, 0.0, 1.0, 0, 0),),
            appends=(BlockAppend(0, (1, 2, 3)),),
            forward=(ForwardRow(0, 1, 0, 9, tokens, True),),
        )
    )
    # Block 2 holds what it asks for, but not behind nothing.
    wrong = step(
        new=(NewSlot(1, 2, 5, 0.0, 1.0, 0, 0),),
        appends=(BlockAppend(1, (2, 4)),),
        forward=(ForwardRow(1, 2, 4, 1, (9,), True),),
    )
    with pytest.raises(MessageCorrupt, match="position 0, .* belongs to another prefix"):
        runner.enqueue(wrong)


def test_a_block_that_two_slots_have_is_not_written_to(runner: EchoRunner) -> None:
    runner.enqueue(FIRST)
    wrong = step(
        new=(OTHER,),
        appends=(BlockAppend(1, (1, 2)),),
        forward=(ForwardRow(1, 2, 4, 1, (9,), True),),
    )
    with pytest.raises(MessageCorrupt, match="writes to block 2, which others read"):
        runner.enqueue(wrong)


def test_a_prefix_is_not_shared_in_the_step_that_writes_it(runner: EchoRunner) -> None:
    early = step(
        new=(NEW, OTHER),
        appends=(BlockAppend(0, (1, 2)), BlockAppend(1, (1, 3))),
        forward=(ForwardRow(0, 1, 0, 5, PROMPT, True), ForwardRow(1, 2, 4, 1, PROMPT[-1:], True)),
    )
    with pytest.raises(MessageCorrupt, match="writes to block 1, which others read"):
        runner.enqueue(early)


def test_seed_counts_only_when_sampling() -> None:
    tokens, kind = [1, 2, 3], {"prompt_length": 3, "vocab_size": 1 << 20}
    assert echo_token(tokens, seed=1, **kind) != echo_token(tokens, seed=2, **kind)


if TYPE_CHECKING:
    from tpinference_engine.runner.base import Runner

    _: type[Runner] = EchoRunner
