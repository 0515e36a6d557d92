"""watches.py: kopf ends when it is to, also where it would wait for a task of its own for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tpinference_operator import watches as watches_module
from tpinference_operator.discovery import Served
from tpinference_operator.metrics import Health, Metrics
from tpinference_operator.observed import KubeRay
from tpinference_operator.watches import Watches

BEFORE = Served(own=True, kuberay=KubeRay.MISSING)
AFTER = Served(own=True, kuberay=KubeRay.SERVED)


async def swallow_one_cancellation() -> None:
    """As a watch of kopf's that is cancelled while it waits for the answer to its request."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


async def test_a_watch_that_swallowed_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[asyncio.Event] = []
    stubborn: list[asyncio.Task[None]] = []
    started = asyncio.Event()

    async def run_kopf(*, stop_flag: asyncio.Event, **_: Any) -> None:
        runs.append(stop_flag)
        started.set()
        watch = asyncio.create_task(swallow_one_cancellation())
        stubborn.append(watch)
        await stop_flag.wait()
        watch.cancel()
        await asyncio.wait({watch})

    monkeypatch.setattr("kopf.operator", run_kopf)
    for name in ("STOP_S", "CANCEL_INTERVAL_S", "MIN_LIFE_S"):
        monkeypatch.setattr(watches_module, name, 0.01)
    discovery: Any = SimpleNamespace(served=BEFORE)
    wiring: Any = SimpleNamespace(cache=SimpleNamespace(detach=lambda: None))
    watches = Watches(discovery=discovery, namespaces=(), health=Health(), metrics=Metrics())
    running = asyncio.create_task(watches.run(wiring))
    for served in (AFTER, BEFORE):
        async with asyncio.timeout(5):
            await started.wait()
        started.clear()
        discovery.served = served
        watches.served_changed(served)
    async with asyncio.timeout(5):
        await started.wait()
    assert len(runs) == 3 and not runs[-1].is_set()
    running.cancel()
    await asyncio.wait({running})
    for _ in range(2):
        stubborn[-1].cancel()
        await asyncio.sleep(0)
