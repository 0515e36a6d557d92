"""The steps that warm a rank up: a made-up request from prompt to end, as messages. Pure."""

from __future__ import annotations

from tpinference_engine.runner.slots import SlotLimits
from tpinference_engine.step import (
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampleRow,
    StepInput,
)

_SLOT = 0
_GENERATION = 0
_STEP_ID = _EPOCH = 0
"""The worker's business, and these never pass it."""


def warm_up_steps(limits: SlotLimits, num_tokens: int, limited: bool) -> list[StepInput]:
    """A prompt of up to `num_tokens`, a sampled token (out of a few if `limited`), one decode;
    nothing if there is no room.

    It writes to the first blocks, which nobody owns yet.
    """
    room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    length = min(num_tokens, limits.max_num_batched_tokens, room - 1)
    if length < 1:
        return []
    blocks = tuple(range(-(-(length + 1) // limits.block_size)))
    top_p, top_k = (0.9, 8) if limited else (1.0, 0)
    new = NewSlot(_SLOT, _GENERATION, length, temperature=1.0, top_p=top_p, top_k=top_k, seed=0)
    prompt = ForwardRow(_SLOT, _GENERATION, 0, length, (0,) * length, True)
    decode = ForwardRow(_SLOT, _GENERATION, length, 1, (), False)
    return [
        StepInput(
            _STEP_ID,
            _EPOCH,
            bucket=length,
            new=(new,),
            appends=(BlockAppend(_SLOT, blocks),),
            forward=(prompt,),
        ),
        StepInput(
            _STEP_ID,
            _EPOCH,
            bucket=1,
            sample=(SampleRow(_SLOT, _GENERATION, length),),
            forward=(decode,),
        ),
        StepInput(_STEP_ID, _EPOCH, bucket=0, free=(_SLOT,)),
    ]
