"""When to send the next call and when to look for its answer: both without missing the device.

A rank says of every call how long it waited for the device after it had queued it: the time by
which the call came too early. On an accelerator the next call is held back by most of that, so that
it still takes in who arrives meanwhile. On a CPU, where a rank that waits for a call takes a core
from the computation, it is sent at once, and the driver sleeps instead of spinning for the answer.

Pure: no clock. What it learns belongs to a step's bucket: steps of one bucket take about as long.
"""

from __future__ import annotations

from tpinference_engine.config import Device

KEPT_SHARE = 0.2
"""Of the time that a call was early, how much stays: steps differ."""
KEPT_S = 0.0005
"""And never less than this: hops, launch and the clock's grain."""
LEARNING_RATE = 0.2
"""For a step that left more time than the ones before; one that left less counts at once."""


class Pace:
    def __init__(self, device: Device) -> None:
        self._holds = device == "cuda"
        self._early_s: dict[int, float] = {}
        """By bucket of the step that a call has to wait for: how early it is when sent at once."""

    def hold_s(self, bucket: int) -> float:
        """From the answer to the call with a step of `bucket` until the next call is sent."""
        return self._usable(bucket) if self._holds else 0.0

    def nap_s(self, bucket: int) -> float:
        """From that answer until the next one, asked for at once, is looked for."""
        return 0.0 if self._holds else self._usable(bucket)

    def observe(self, bucket: int, held_s: float, waited_s: float) -> None:
        """After a step of `bucket` the next call was sent `held_s` after the answer, and its ranks
        waited `waited_s` for the device."""
        early_s = held_s + waited_s
        known = self._early_s.get(bucket, early_s)
        if self._holds and waited_s < KEPT_S / 2:
            # Too late, or nearly: how late is not known, so it starts again from sooner.
            early_s = held_s / 2
        rise = LEARNING_RATE if early_s > known else 1.0
        self._early_s[bucket] = known + rise * (early_s - known)

    def _usable(self, bucket: int) -> float:
        early_s = self._early_s.get(bucket, 0.0)
        return max(0.0, early_s - max(KEPT_S, KEPT_SHARE * early_s))
