"""engine_client.py: who is asked when, and that no engine can hold anybody up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tpinference_operator import names
from tpinference_operator.controller import Key
from tpinference_operator.engine_client import EngineClient, EngineWatch, admin_url

KEY = ("ns", "llm")


class Client:
    """Engines by address; None does not answer."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, Any] | None] = {}
        self.asked: list[str] = []

    async def status(self, pod_ip: str) -> dict[str, Any] | None:
        self.asked.append(pod_ip)
        return self.engines.get(pod_ip)


def head(uid: str, ip: str, *, ready: bool = False, role: str = names.ROLE_HEAD) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    labels = {names.ROLE_LABEL: role}
    return {
        "metadata": {"uid": uid, "labels": labels},
        "status": {"podIP": ip, "conditions": conditions},
    }


class Watch:
    """An EngineWatch over given pods, and what it told."""

    def __init__(self, client: Any, interval_s: float) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.told: list[Key] = []
        self.news = asyncio.Event()
        self.is_indexed = True
        self.engines = EngineWatch(
            client,
            find_pod=lambda _, uid: self.pods.get(uid),
            is_indexed=lambda: self.is_indexed,
            on_change=self._tell,
            interval_s=interval_s,
        )

    def _tell(self, key: Key) -> None:
        self.told.append(key)
        self.news.set()

    def see(self, pod: dict[str, Any]) -> None:
        self.pods[pod["metadata"]["uid"]] = pod
        self.engines.pod_seen(KEY, pod)

    def answers(self) -> dict[str, Any]:
        return self.engines.answers(self.pods.values())

    async def hear(self) -> None:
        await asyncio.wait_for(self.news.wait(), 5)
        self.news.clear()


@asynccontextmanager
async def watching(client: Any, interval_s: float = 1000) -> AsyncIterator[Watch]:
    watch = Watch(client, interval_s)
    task = asyncio.create_task(watch.engines.run())
    yield watch
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def client() -> Client:
    return Client()


async def test_a_head_is_asked_when_it_has_an_address_and_when_its_readiness_flips(
    client: Client,
) -> None:
    client.engines["10.0.0.1"] = {"state": "starting"}
    async with watching(client) as watch:
        watch.see(head("u", ""))
        watch.see(head("w", "10.0.0.9", role=names.ROLE_WORKER))
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        watch.see(head("u", "10.0.0.1"))
        client.engines["10.0.0.1"] = {"state": "ready"}
        watch.see(head("u", "10.0.0.1", ready=True))
        await watch.hear()
        assert watch.answers() == {"u": {"state": "ready"}}
    assert (client.asked, watch.told) == (["10.0.0.1"] * 2, [KEY] * 2)


async def test_the_slow_clock_tells_only_what_is_new(client: Client) -> None:
    client.engines["10.0.0.1"] = {"state": "ready", "requests": {"running": 0}}
    async with watching(client, interval_s=0.001) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        async with asyncio.timeout(5):
            while len(client.asked) < 5:
                await asyncio.sleep(0)
        assert watch.told == [KEY]
        client.engines["10.0.0.1"] = {"state": "failed"}
        await watch.hear()


async def test_a_failed_fetch_removes_the_answer(client: Client) -> None:
    client.engines["10.0.0.1"] = {"state": "ready"}
    async with watching(client, interval_s=0.001) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        client.engines["10.0.0.1"] = None
        await watch.hear()
        assert watch.answers() == {}


async def test_a_plan_that_wants_to_know_is_woken_even_without_news(client: Client) -> None:
    client.engines["10.0.0.1"] = {"state": "ready"}
    async with watching(client) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        assert watch.engines.refresh(["u"], 0.0) is True
        await watch.hear()
        assert watch.engines.refresh(["nobody"], 0.0) is False
    assert watch.told == [KEY, KEY]


async def test_a_gone_pod_is_forgotten(client: Client) -> None:
    client.engines["10.0.0.1"] = {"state": "ready"}
    async with watching(client) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        watch.engines.pod_gone("u")
        assert (watch.answers(), watch.engines.refresh(["u"], 0.0)) == ({}, False)


async def test_nothing_is_forgotten_while_the_watches_start_anew(client: Client) -> None:
    client.engines["10.0.0.1"] = {"state": "ready"}
    async with watching(client, interval_s=0.001) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        pods, watch.pods, watch.is_indexed = watch.pods, {}, False
        num_asked = len(client.asked)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(client.asked) <= num_asked + 1
        watch.pods, watch.is_indexed = pods, True
        assert watch.answers() == {"u": {"state": "ready"}}
        client.engines["10.0.0.1"] = {"state": "failed"}
        await watch.hear()


@pytest.mark.parametrize("status", [{"ranks": 5}, {"requests": "x"}])
async def test_a_status_that_makes_no_sense_is_no_answer(
    client: Client, status: dict[str, Any]
) -> None:
    client.engines["10.0.0.1"] = {"state": "ready"}
    async with watching(client, interval_s=0.001) as watch:
        watch.see(head("u", "10.0.0.1"))
        await watch.hear()
        client.engines["10.0.0.1"] = status
        await watch.hear()
        assert watch.answers() == {}


def test_addresses_of_both_families() -> None:
    assert admin_url("10.0.0.1", "/drain") == "http://10.0.0.1:8001/drain"
    assert admin_url("fd00::1", "/drain") == "http://[fd00::1]:8001/drain"


class TestHttp:
    """The real client against a server on loopback."""

    @pytest.fixture
    async def ask(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Any]]:
        released = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/silent":
                await released.wait()
            if request.path == "/text":
                return web.Response(text="not json")
            if request.path == "/list":
                return web.json_response([])
            return web.json_response(
                {"state": "ready"}, status=500 if "bad" in request.path else 200
            )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = EngineClient(timeout_s=0.3)

        def ask(path: str) -> Any:
            monkeypatch.setattr(
                "tpinference_operator.engine_client.admin_url", lambda *_: f"{base}{path}"
            )
            return client.status("x")

        yield ask
        released.set()
        await client.close()
        await runner.cleanup()

    @pytest.mark.parametrize("path", ["/bad", "/text", "/list", "/silent"])
    async def test_anything_but_a_json_object_in_time_is_no_answer(
        self, ask: Callable[[str], Any], path: str
    ) -> None:
        assert await ask(path) is None

    async def test_a_good_answer(self, ask: Callable[[str], Any]) -> None:
        assert await ask("/ok") == {"state": "ready"}
