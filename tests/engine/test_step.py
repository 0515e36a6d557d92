"""The step message: what is packed comes back, nothing else is read, and no batch outgrows it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpinference_engine.errors import MessageCorrupt
from tpinference_engine.step import (
    MAX_STEP_ID,
    NO_STEP,
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampledToken,
    SampleRow,
    StepInput,
    StepLimits,
    StepOutput,
    decode_input,
    decode_output,
    encode_input,
    encode_output,
    next_step_id,
    previous_step_id,
    token_crc,
)

words = st.integers(0, 2**31 - 1)
floats = st.floats(0, 100, width=32)
tokens = st.lists(words, max_size=5).map(tuple)
samples = st.builds(SampleRow, words, words, words)
new_slots = st.builds(
    NewSlot, words, words, words, floats, floats, words, st.integers(-(2**63), 2**63 - 1)
)
appends = st.builds(BlockAppend, words, tokens)
forwards = st.builds(ForwardRow, words, words, words, words, tokens, st.booleans())


def rows(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


inputs = st.builds(
    StepInput, words, words, words, rows(samples), tokens, rows(new_slots), rows(appends),
    rows(forwards),
)  # fmt: skip
outputs = st.builds(
    StepOutput, words, words, words, st.one_of(words, st.just(NO_STEP)),
    st.integers(0, 2**32 - 1), words,
    rows(st.builds(SampledToken, words, words, words, words)),
)  # fmt: skip


@given(inputs)
def test_an_input_comes_back_as_it_was(step: StepInput) -> None:
    assert decode_input(encode_input(step)) == step


@given(outputs)
def test_an_output_comes_back_as_it_was(output: StepOutput) -> None:
    assert decode_output(encode_output(output)) == output


@given(inputs, st.data())
def test_a_message_that_was_cut_is_refused(step: StepInput, data: st.DataObject) -> None:
    payload = encode_input(step)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(MessageCorrupt):
        decode_input(payload[:cut])


@given(inputs, st.binary(min_size=1, max_size=12))
def test_a_message_with_more_behind_it_is_refused(step: StepInput, more: bytes) -> None:
    with pytest.raises(MessageCorrupt):
        decode_input(encode_input(step) + more)


def test_an_output_is_not_taken_for_an_input() -> None:
    output = StepOutput(1, 0, 0, NO_STEP, 0, 0)
    with pytest.raises(MessageCorrupt, match="magic"):
        decode_input(encode_output(output))


def test_a_message_of_another_layout_is_refused() -> None:
    found = np.frombuffer(encode_input(StepInput(1, 0, 0)), dtype=np.int32).copy()
    found[1] += 1
    with pytest.raises(MessageCorrupt, match="layout 2"):
        decode_input(found.tobytes())


def test_a_negative_count_is_refused() -> None:
    found = np.frombuffer(encode_input(StepInput(1, 0, 0)), dtype=np.int32).copy()
    found[5] = -1
    with pytest.raises(MessageCorrupt):
        decode_input(found.tobytes())


def largest_step(limits: StepLimits) -> StepInput:
    """All slots change hands, each takes a whole prefix of blocks, and the budget is used up."""
    slots = range(limits.max_num_seqs)
    blocks = tuple(range(limits.max_blocks_per_slot))
    share, rest = divmod(limits.max_num_batched_tokens, limits.max_num_seqs)
    return StepInput(
        step_id=1,
        epoch=1,
        bucket=limits.max_num_batched_tokens,
        sample=tuple(SampleRow(slot, 1, 7) for slot in slots),
        free=tuple(slots),
        new=tuple(NewSlot(slot, 2, 5, 1.0, 0.9, 40, -1) for slot in slots),
        appends=tuple(BlockAppend(slot, blocks) for slot in slots),
        forward=tuple(
            ForwardRow(slot, 2, 0, n, (1,) * n, True)
            for slot, n in ((slot, share + (slot < rest)) for slot in slots)
        ),
    )


@pytest.mark.parametrize(
    "limits", [StepLimits(1, 1, 1), StepLimits(3, 16, 4), StepLimits(256, 2048, 512)]
)
def test_the_largest_step_fits_exactly(limits: StepLimits) -> None:
    payload = encode_input(largest_step(limits))
    assert len(payload) == limits.max_input_bytes
    limits.check_input(payload)


def test_one_token_more_than_the_largest_step_is_refused() -> None:
    limits = StepLimits(3, 16, 4)
    step = largest_step(StepLimits(3, 17, 4))
    with pytest.raises(MessageCorrupt, match=r"has 4\d\d bytes, its channel holds 4\d\d"):
        limits.check_input(encode_input(step))


def test_the_largest_output_fits_exactly() -> None:
    limits = StepLimits(3, 16, 4)
    tokens = tuple(SampledToken(slot, 1, 7, 9) for slot in range(3))
    output = StepOutput(1, 1, 0, 0, 5, 0, tokens)
    assert len(encode_output(output)) == limits.max_output_bytes


def test_step_ids_begin_again_before_they_outgrow_their_word() -> None:
    assert next_step_id(NO_STEP) == 0
    assert next_step_id(7) == 8
    assert next_step_id(MAX_STEP_ID) == 0
    assert (previous_step_id(0), previous_step_id(8)) == (MAX_STEP_ID, 7)
    assert decode_input(encode_input(StepInput(MAX_STEP_ID, 0, 0))).step_id == MAX_STEP_ID


def test_the_crc_depends_on_value_and_order() -> None:
    assert token_crc([]) == 0
    assert len({token_crc(t) for t in ([1, 2], [2, 1], [1, 3], [1], [1, 2, 0])}) == 5
