"""What ranks acknowledge is compared, and the first difference ends the group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tpinference_engine.errors import GroupDiverged
from tpinference_engine.executor.acknowledgement import reconcile_outputs
from tpinference_engine.step import (
    NO_STEP,
    SampledToken,
    SampleRow,
    StepInput,
    StepOutput,
    token_crc,
)

STEP = StepInput(7, 2, 0, sample=(SampleRow(0, 1, 5), SampleRow(3, 4, 9)))
TOKENS = (SampledToken(0, 1, 5, 100), SampledToken(3, 4, 9, 200))
CRC = token_crc([100, 200])


def answers(num_ranks: int = 3) -> list[StepOutput]:
    return [
        StepOutput(7, 2, rank, 6, CRC, 10 * rank, TOKENS if rank == 0 else ())
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_answers_give_rank_0s(num_ranks: int) -> None:
    skews_us = tuple(10 * rank for rank in range(num_ranks))
    expected = replace(answers()[0], skews_us=skews_us)
    assert reconcile_outputs(STEP, answers(num_ranks)) == expected


def test_a_flush_of_nothing_has_no_sampled_step() -> None:
    step = StepInput(7, 2, 4)
    output = StepOutput(7, 2, 0, NO_STEP, 0, 1)
    assert reconcile_outputs(step, [output]) == replace(output, skews_us=(1,))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 6}, "step id 6, expected 7"),
        ({"epoch": 1}, "epoch 1, expected 2"),
        ({"rank": 5}, "rank 5, expected "),
    ],
)
def test_an_answer_to_something_else_names_both_values(
    rank: int, change: dict[str, Any], message: str
) -> None:
    outputs = answers()
    outputs[rank] = replace(outputs[rank], **change)
    with pytest.raises(GroupDiverged, match=message):
        reconcile_outputs(STEP, outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crc": CRC ^ 1}, f"rank 2 acknowledged token CRC {CRC ^ 1}, rank 0 {CRC}"),
        ({"sampled_step_id": 5}, "rank 2 acknowledged sampled step 5, rank 0 6"),
        ({"sampled_step_id": NO_STEP}, "rank 2 acknowledged sampled step -1, rank 0 6"),
    ],
)
def test_ranks_that_differ_are_named_with_both_values(change: dict[str, Any], message: str) -> None:
    outputs = answers()
    outputs[2] = replace(outputs[2], **change)
    with pytest.raises(GroupDiverged, match=message) as caught:
        reconcile_outputs(STEP, outputs)
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    "tokens",
    [
        (),
        TOKENS[:1],
        TOKENS[::-1],
        (*TOKENS, SampledToken(5, 1, 1, 1)),
        (replace(TOKENS[0], generation=2), TOKENS[1]),
        (replace(TOKENS[0], position=6), TOKENS[1]),
    ],
    ids=["none", "missing", "swapped", "one too many", "other generation", "other position"],
)
def test_tokens_that_were_not_asked_for_are_refused(tokens: tuple[SampledToken, ...]) -> None:
    with pytest.raises(GroupDiverged, match="tokens"):
        reconcile_outputs(STEP, [replace(answers()[0], tokens=tokens)])


def test_tokens_that_are_not_those_of_the_crc_are_refused() -> None:
    wrong = (replace(TOKENS[0], token=101), TOKENS[1])
    with pytest.raises(GroupDiverged, match="token CRC"):
        reconcile_outputs(STEP, [replace(answers()[0], tokens=wrong)])


def test_logits_that_were_pending_on_no_rank_are_refused() -> None:
    output = replace(answers()[0], sampled_step_id=NO_STEP)
    with pytest.raises(GroupDiverged, match="pending logits False, expected True"):
        reconcile_outputs(STEP, [output])
