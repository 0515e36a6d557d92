"""The pace of calls, against a device that takes the time it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tpinference_engine.config import Device
from tpinference_engine.engine.pace import KEPT_S, KEPT_SHARE, Pace

HOP_S = 0.0001
BUCKET = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a loop on one device, as the driver's clock sees it."""

    held_s: float
    idle_s: float
    """Of the device, for want of this call."""
    looked_late_s: float
    """From the answer's arrival to the end of the driver's nap."""


def drive(device: Device, step_times_s: Iterable[float]) -> list[Call]:
    """The lag's own rhythm: an answer comes when a step ends, which is when the next one begins."""
    pace, calls = Pace(device), []
    for step_s in step_times_s:
        held_s = max(HOP_S / 10, pace.hold_s(BUCKET))
        arrives_s = held_s + HOP_S
        waited_s = max(0.0, step_s - arrives_s)
        answer_s = max(step_s, arrives_s) + HOP_S
        calls.append(
            Call(
                held_s,
                idle_s=max(0.0, arrives_s - step_s),
                looked_late_s=max(0.0, pace.nap_s(BUCKET) - answer_s),
            )
        )
        pace.observe(BUCKET, held_s, waited_s)
    return calls


@pytest.mark.parametrize("step_s", [0.0008, 0.0026, 0.02, 0.5])
def test_a_steady_device_is_never_kept_waiting_and_calls_are_held_for_what_is_spare(
    step_s: float,
) -> None:
    calls = drive("cuda", [step_s] * 50)
    assert not any(call.idle_s for call in calls)
    spare_s = step_s - HOP_S - max(KEPT_S, KEPT_SHARE * step_s)
    assert calls[-1].held_s == pytest.approx(max(HOP_S / 10, spare_s), abs=2 * HOP_S)


def test_uneven_steps_idle_the_device_for_less_than_a_hundredth() -> None:
    times = [0.004 * (1 + 0.15 * ((i * 7919 % 13) / 6 - 1)) for i in range(400)]
    calls = drive("cuda", times)
    assert sum(call.idle_s for call in calls) < 0.01 * sum(times)
    assert sum(call.held_s for call in calls) > 0.4 * sum(times), "it hardly holds anything"


def test_steps_that_become_short_are_met_after_one_late_call_and_do_not_creep() -> None:
    calls = drive("cuda", [0.02] * 30 + [0.004] * 30)
    late = [call for call in calls[30:] if call.idle_s]
    assert len(late) <= 3
    assert calls[-1].held_s < 0.004


def test_a_cpu_gets_its_call_at_once_and_its_driver_sleeps_for_most_of_the_step() -> None:
    calls = drive("cpu", [0.05] * 20)
    assert all(call.held_s < HOP_S for call in calls)
    assert not any(call.looked_late_s for call in calls)
    pace = Pace("cpu")
    pace.observe(BUCKET, 0.0, 0.05)
    assert pace.nap_s(BUCKET) == pytest.approx(0.04)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_known_of_a_bucket_that_has_not_run(device: Device) -> None:
    pace = Pace(device)
    pace.observe(BUCKET, 0.0, 0.05)
    assert pace.hold_s(16) == pace.nap_s(16) == 0.0
