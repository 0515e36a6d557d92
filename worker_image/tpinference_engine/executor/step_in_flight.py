"""What every backend does to a step: one at a time, packed within its bounds, acknowledged alike.

It does not know how the messages travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpinference_engine.executor.acknowledgement import reconcile_outputs
from tpinference_engine.step import (
    StepInput,
    StepLimits,
    StepOutput,
    decode_output,
    encode_input,
)


class StepInFlight:
    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._step: StepInput | None = None

    def __bool__(self) -> bool:
        return self._step is not None

    def pack(self, step: StepInput) -> bytes:
        """The message to send. Raises MessageCorrupt if its channel can't hold it."""
        assert self._step is None, f"step {step.step_id} while another is in flight"
        payload = encode_input(step)
        self._limits.check_input(payload)
        self._step = step
        return payload

    def unpack(self, answers: Sequence[bytes]) -> StepOutput:
        """What all ranks' answers say, in rank order. Raises GroupFailed."""
        assert self._step is not None, "no step is in flight"
        step, self._step = self._step, None
        return reconcile_outputs(step, [decode_output(answer) for answer in answers])
