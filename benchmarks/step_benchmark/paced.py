"""Steps at the pace of the engine's own loop: the product's stepper around a benchmark's driver.

On an accelerator the loop holds a call back while the device is busy anyway; on a CPU it sleeps
instead of spinning for the answer. Either could cost time, so what is measured has it too.
"""

from __future__ import annotations

import time

from step_benchmark.pipeline import StepDriver
from tpinference_engine.config import Device
from tpinference_engine.engine.stepper import Stepper
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.step import StepInput, StepOutput


class PacedDriver:
    """One call in flight: it is sent when it is asked for, which is at once after it was given."""

    def __init__(self, driver: StepDriver, device: Device) -> None:
        self._driver = driver
        self._stepper = Stepper(driver, device)
        self._step: StepInput | None = None

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._driver.places

    def submit(self, step: StepInput) -> None:
        assert self._step is None, "one call in flight"
        time.sleep(self._stepper.early_s)
        self._step = step

    def collect(self) -> StepOutput:
        assert self._step is not None, "submit came before"
        step, self._step = self._step, None
        output, _ = self._stepper.run(step)
        return output

    def shutdown(self) -> None:
        self._driver.shutdown()
