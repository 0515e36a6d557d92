"""The steps of one batch, as the product's scheduler would send them: prefill, then decode. Pure.

No message depends on a token that was sampled (a rank gathers it on its device), so all of them are
made in advance, and every executor gets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from step_benchmark.cell import Return
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, SampleRow, StepInput

_TOKEN = 1
"""Of every prompt: what it says makes no difference to the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    batch_size: int
    input_len: int
    output_len: int
    max_num_batched_tokens: int
    block_size: int

    @property
    def max_model_len(self) -> int:
        return self.input_len + self.output_len

    @property
    def blocks_per_slot(self) -> int:
        return -(-self.max_model_len // self.block_size)


def count_forwards(steps: Sequence[StepInput]) -> int:
    """Steps that run on the device: a flush does not."""
    return sum(bool(step.forward) for step in steps)


def plan_batch(shape: Shape, returns: Return, iteration: int) -> tuple[StepInput, ...]:
    """Without step ids and epoch. A lagged batch ends with a flush, for its last tokens."""
    forwards = list(_forwards(shape, generation=iteration + 1))
    samples = [_samples(rows) for rows in forwards]
    if returns == "lagged":
        samples, forwards = [(), *samples], [*forwards, ()]
    steps = [
        StepInput(0, 0, sum(row.num_tokens for row in rows), sample=sample, forward=rows)
        for sample, rows in zip(samples, forwards, strict=True)
    ]
    return (_with_new_slots(steps[0], shape, iteration), *steps[1:])


def number_steps(steps: Sequence[StepInput], first_id: int, epoch: int) -> tuple[StepInput, ...]:
    return tuple(replace(step, step_id=first_id + at, epoch=epoch) for at, step in enumerate(steps))


def _with_new_slots(step: StepInput, shape: Shape, iteration: int) -> StepInput:
    slots, per_slot = range(shape.batch_size), shape.blocks_per_slot
    return replace(
        step,
        free=tuple(slots) if iteration else (),
        new=tuple(NewSlot(slot, iteration + 1, shape.input_len, 0.0, 1.0, 0, 0) for slot in slots),
        appends=tuple(
            BlockAppend(slot, tuple(range(slot * per_slot, (slot + 1) * per_slot)))
            for slot in slots
        ),
    )


def _forwards(shape: Shape, generation: int) -> Iterator[tuple[ForwardRow, ...]]:
    done = [0] * shape.batch_size
    # The last token is sampled and never run.
    end = shape.max_model_len - 1
    while min(done) < end:
        budget = shape.max_num_batched_tokens
        rows: list[ForwardRow] = []
        for slot, start in enumerate(done):
            count = min(max(shape.input_len - start, 1), budget)
            if start == end or not count:
                continue
            tokens = (_TOKEN,) * count if start < shape.input_len else ()
            wants = start + count >= shape.input_len
            rows.append(ForwardRow(slot, generation, start, count, tokens, wants))
            done[slot] += count
            budget -= count
        yield tuple(rows)


def _samples(rows: Sequence[ForwardRow]) -> tuple[SampleRow, ...]:
    return tuple(
        SampleRow(row.slot, row.generation, row.start + row.num_tokens)
        for row in rows
        if row.wants_logits
    )
