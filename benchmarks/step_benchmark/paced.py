"""Steps sent and looked for when the engine's own loop would: the product's pace around a driver.

On an accelerator the loop holds a call back while the device is busy anyway; on a CPU it sleeps
instead of spinning for the answer. Either could cost time, so what is measured has it too.
"""

from __future__ import annotations

import time

from step_benchmark.pipeline import StepDriver
from tpinference_engine.engine.pace import Pace
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.step import StepInput, StepOutput


class PacedDriver:
    """One call in flight."""

    def __init__(self, driver: StepDriver, pace: Pace) -> None:
        self._driver = driver
        self._pace = pace
        self._bucket = 0
        """Of the step before the one in flight."""
        self._next_bucket = 0
        self._answered_at = 0.0
        self._held_s = 0.0

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._driver.places

    def submit(self, step: StepInput) -> None:
        send_at = self._answered_at + self._pace.hold_s(self._bucket)
        time.sleep(max(0.0, send_at - time.monotonic()))
        self._driver.submit(step)
        self._held_s = time.monotonic() - self._answered_at
        self._next_bucket = step.bucket

    def collect(self) -> StepOutput:
        time.sleep(max(0.0, self._pace.nap_s(self._bucket) - self._held_s))
        output = self._driver.collect()
        if self._bucket:
            self._pace.observe(self._bucket, self._held_s, output.skew_us / 1e6)
        self._bucket = self._next_bucket
        self._answered_at = time.monotonic()
        return output

    def shutdown(self) -> None:
        self._driver.shutdown()
