"""One call after the other, each when the device is about to need it, and what each one took.

It has the clock that `pace.py` does without. It does not know what is in a step.
"""

from __future__ import annotations

import time
from typing import Protocol

from tpinference_engine.config import Device
from tpinference_engine.engine.messages import StepReport
from tpinference_engine.engine.pace import Pace
from tpinference_engine.step import StepInput, StepOutput


class TakesSteps(Protocol):
    """The part of an Executor that is needed here."""

    def submit(self, step: StepInput) -> None: ...

    def collect(self) -> StepOutput: ...


class Stepper:
    def __init__(self, executor: TakesSteps, device: Device) -> None:
        self._executor = executor
        self._pace = Pace(device)
        # Of the last call: the bucket of its step, which the device may be busy with, and when its
        # answer came.
        self._bucket = 0
        self._answered_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Since the last answer."""
        return time.monotonic() - self._answered_at

    @property
    def early_s(self) -> float:
        """How long the next call may wait for requests that come meanwhile; 0 = it is time."""
        return max(0.0, self._pace.hold_s(self._bucket) - self.idle_s)

    def run(
        self, step: StepInput, queued_s: tuple[float, ...] = ()
    ) -> tuple[StepOutput, StepReport]:
        began, bucket = self._answered_at, self._bucket
        self._executor.submit(step)
        sent_at = time.monotonic()
        nap_s = self._pace.nap_s(bucket) - (sent_at - began)
        if nap_s > 0:
            time.sleep(nap_s)
        output = self._executor.collect()
        self._answered_at, self._bucket = time.monotonic(), step.bucket
        if bucket:
            self._pace.observe(bucket, sent_at - began, min(output.skews_us) / 1e6)
        report = StepReport(
            seconds=self._answered_at - (began if bucket else sent_at),
            num_tokens=sum(row.num_tokens for row in step.forward),
            skews_us=output.skews_us,
            waited_for_step=bucket > 0,
            queued_s=queued_s,
        )
        return output, report
