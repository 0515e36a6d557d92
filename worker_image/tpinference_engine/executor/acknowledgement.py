"""All ranks' acknowledgements of one call, compared: the check that finds a diverged group.

Pure, and the same under every backend: an executor collects the answers, this decides. It does not
know how they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tpinference_engine.errors import GroupDiverged
from tpinference_engine.step import NO_STEP, StepInput, StepOutput, token_crc


def reconcile_outputs(step: StepInput, outputs: Sequence[StepOutput]) -> StepOutput:
    """Rank 0's output, with all ranks' skews, after every one acknowledged `step` alike.

    Raises GroupDiverged with both values at the first difference.
    """
    for rank, output in enumerate(outputs):
        _require_equal(step, output, "rank", output.rank, rank)
        _require_equal(step, output, "step id", output.step_id, step.step_id)
        _require_equal(step, output, "epoch", output.epoch, step.epoch)
    leader = outputs[0]
    for output in outputs[1:]:
        for name, value_of in _COMPARED:
            if value_of(output) != value_of(leader):
                raise GroupDiverged(
                    f"step {step.step_id}: rank {output.rank} acknowledged {name} "
                    f"{value_of(output)}, rank 0 {value_of(leader)}",
                    rank=output.rank,
                )
    _check_tokens(step, leader)
    return replace(leader, skews_us=tuple(output.skew_us for output in outputs))


_COMPARED: tuple[tuple[str, Callable[[StepOutput], int]], ...] = (
    ("sampled step", lambda output: output.sampled_step_id),
    ("token CRC", lambda output: output.crc),
)


def _require_equal(
    step: StepInput, output: StepOutput, name: str, given: object, wanted: object
) -> None:
    if given != wanted:
        raise GroupDiverged(
            f"step {step.step_id}: rank {output.rank} acknowledged {name} {given}, "
            f"expected {wanted}",
            rank=output.rank,
        )


def _check_tokens(step: StepInput, leader: StepOutput) -> None:
    """Rank 0's tokens are those that were asked for, and the ones that its CRC is of."""
    asked = tuple((row.slot, row.generation, row.position) for row in step.sample)
    given = tuple((token.slot, token.generation, token.position) for token in leader.tokens)
    _require_equal(step, leader, "(slot, generation, position) of tokens", given, asked)
    pending = leader.sampled_step_id != NO_STEP
    _require_equal(step, leader, "pending logits", pending, bool(step.sample))
    crc = token_crc([token.token for token in leader.tokens])
    _require_equal(step, leader, "token CRC", leader.crc, crc)
