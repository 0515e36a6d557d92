"""__main__.py and metrics.py: how the process ends, and what it answers over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tpinference_operator import __main__ as program
from tpinference_operator.api.status import GroupStatus, TPInferenceStatus
from tpinference_operator.lease import LeaseLost
from tpinference_operator.metrics import Health, Metrics, Server


async def test_a_core_task_that_ends_is_an_error() -> None:
    async def ends() -> None:
        return

    with pytest.raises(program.CoreTaskEnded, match="'x'"):
        await program.core("x", ends())


async def test_a_core_task_that_something_else_cancelled_is_an_error() -> None:
    async def waits_for_a_task_that_is_cancelled() -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    with pytest.raises(program.CoreTaskEnded, match="'x'"):
        await program.core("x", waits_for_a_task_that_is_cancelled())


async def test_a_core_task_that_is_stopped_is_no_error() -> None:
    task = asyncio.create_task(program.core("x", asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("is_grouped", [False, True])
async def test_a_lost_lease_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, is_grouped: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    lost = LeaseLost("gone")

    async def loses() -> None:
        raise BaseExceptionGroup("workers", [lost]) if is_grouped else lost

    try:
        await program.exit_when_lost(loses())
    except BaseExceptionGroup:
        # Only because the process did not really end.
        assert is_grouped
    assert ended == [program.EXIT_LEASE_LOST]


class TestServer:
    @pytest.fixture
    def health(self) -> Health:
        return Health()

    @pytest.fixture
    def metrics(self) -> Metrics:
        return Metrics()

    @pytest.fixture
    async def url(self, metrics: Metrics, health: Health) -> Any:
        runner = await Server(metrics, health, address="127.0.0.1", port=0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    @staticmethod
    async def get(url: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.headers["Connection"] == "close"
            return response.status, await response.text()

    async def test_ready_says_what_it_waits_for(self, url: str, health: Health) -> None:
        assert (await self.get(f"{url}/livez"))[0] == 200
        health.wait("watches", "the CRD is missing")
        assert await self.get(f"{url}/readyz") == (503, "the CRD is missing\n")
        health.clear("watches")
        assert await self.get(f"{url}/readyz") == (200, "ok\n")

    async def test_metrics_of_a_tpinference_come_and_go(self, url: str, metrics: Metrics) -> None:
        groups = [
            GroupStatus(name="a", ordinal=0, revision="r", epoch=1, ready=True, restarts=2),
            GroupStatus(name="b", ordinal=1, revision="r", epoch=2),
        ]
        metrics.on_status(("ns", "llm"), TPInferenceStatus(groups=groups))
        text = (await self.get(f"{url}/metrics"))[1]
        assert 'tpinference_groups{name="llm",namespace="ns",state="ready"} 1.0' in text
        assert 'tpinference_groups{name="llm",namespace="ns",state="unready"} 1.0' in text
        assert 'tpinference_group_restarts{name="llm",namespace="ns"} 2.0' in text
        metrics.forget(("ns", "llm"))
        metrics.forget(("ns", "never-seen"))
        assert "llm" not in (await self.get(f"{url}/metrics"))[1]
