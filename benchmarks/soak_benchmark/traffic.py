"""Steps without end and the tokens that an echo makes of them, known in advance. Pure.

Each batch has prompts of its own, so an answer to another batch, slot or position is a wrong one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from step_benchmark.messages import Shape, number_steps, plan_batch

from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, echo_token
from tpinference_engine.step import ForwardRow, SampledToken, SampleRow, StepInput

SHAPE = Shape(batch_size=4, input_len=8, output_len=32, max_num_batched_tokens=64, block_size=16)
Sequence = tuple[int, ...]
"""A prompt and the tokens after it."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    step: StepInput
    tokens: tuple[SampledToken, ...]
    """What the call returns."""


def known_steps(epoch: int, seed: int, shape: Shape = SHAPE) -> Iterator[KnownStep]:
    step_id = 0
    for iteration in itertools.count():
        sequences = [
            _predict(shape, f"{seed} {iteration} {slot}") for slot in range(shape.batch_size)
        ]
        planned = number_steps(plan_batch(shape, "lagged", iteration), step_id, epoch)
        for step in planned:
            rows = tuple(_with_prompt(row, sequences[row.slot]) for row in step.forward)
            tokens = tuple(_known_token(row, sequences[row.slot]) for row in step.sample)
            yield KnownStep(replace(step, forward=rows), tokens)
        step_id += len(planned)


def _predict(shape: Shape, seed: str) -> Sequence:
    random = Random(seed)
    tokens = [random.randrange(DEFAULT_VOCAB_SIZE) for _ in range(shape.input_len)]
    for _ in range(shape.output_len):
        tokens.append(
            echo_token(tokens, prompt_length=shape.input_len, vocab_size=DEFAULT_VOCAB_SIZE)
        )
    return tuple(tokens)


def _with_prompt(row: ForwardRow, sequence: Sequence) -> ForwardRow:
    if not row.tokens:
        return row
    return replace(row, tokens=sequence[row.start : row.start + row.num_tokens])


def _known_token(row: SampleRow, sequence: Sequence) -> SampledToken:
    return SampledToken(row.slot, row.generation, row.position, sequence[row.position])
