"""discovery.py and watches.py: what is served, and when the watches must start anew."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest

from tpinference_operator.discovery import (
    OWN_PATH,
    RAY_PATH,
    RAY_SCHEMA_PATH,
    Discovery,
    Served,
    discover,
)
from tpinference_operator.errors import ApiUnavailable
from tpinference_operator.kube import Kube
from tpinference_operator.metrics import Health, Metrics
from tpinference_operator.observed import KubeRay
from tpinference_operator.watches import Watches, WatchesEnded

OWN = {"resources": [{"name": "tpinferences"}, {"name": "tpinferences/status"}]}
RAY = {"resources": [{"name": "rayclusters"}]}


def schema(*fields: str) -> dict[str, Any]:
    cluster = {
        "x-kubernetes-group-version-kind": [{"kind": "RayCluster"}],
        "properties": {"spec": {"properties": {field: {} for field in fields}}},
    }
    return {"components": {"schemas": {"io.ray.v1.RayCluster": cluster, "other": {}}}}


@pytest.mark.parametrize(
    ("fields", "kuberay"),
    [
        (("authOptions", "upgradeStrategy"), KubeRay.SERVED),
        (("authOptions",), KubeRay.TOO_OLD),
        ((), KubeRay.TOO_OLD),
    ],
)
async def test_kuberays_age_is_read_from_its_schema(
    api: Any, kube: Kube, fields: tuple[str, ...], kuberay: KubeRay
) -> None:
    api.objects |= {OWN_PATH: OWN, RAY_PATH: RAY, RAY_SCHEMA_PATH: schema(*fields)}
    assert await discover(kube, None) == Served(own=True, kuberay=kuberay)


async def test_a_schema_that_is_not_published_yet_is_waited_for(api: Any, kube: Kube) -> None:
    api.objects |= {OWN_PATH: OWN, RAY_PATH: RAY}
    assert (await discover(kube, None)).kuberay is KubeRay.MISSING
    api.objects[RAY_SCHEMA_PATH] = {"components": {"schemas": {"other": {}}}}
    assert (await discover(kube, None)).kuberay is KubeRay.MISSING


async def test_nothing_served(kube: Kube) -> None:
    assert await discover(kube, None) == Served(own=False, kuberay=KubeRay.MISSING)


async def test_the_large_schema_is_read_once_while_all_is_well(api: Any, kube: Kube) -> None:
    api.objects |= {OWN_PATH: OWN, RAY_PATH: RAY, RAY_SCHEMA_PATH: schema("authOptions")}
    before = await discover(kube, None)
    api.objects[RAY_SCHEMA_PATH] = schema("authOptions", "upgradeStrategy")
    now = await discover(kube, before)
    assert (before.kuberay, now.kuberay) == (KubeRay.TOO_OLD, KubeRay.SERVED)
    api.sent.clear()
    assert await discover(kube, now) == now
    assert RAY_SCHEMA_PATH not in [request.path for request in api.sent]


async def test_a_failed_look_changes_nothing(api: Any, kube: Kube) -> None:
    api.objects |= {OWN_PATH: OWN}
    changes: list[Served] = []
    discovery = Discovery(kube, interval_s=1, on_change=changes.append)
    await discovery.look()
    api.refuse = lambda _: ApiUnavailable("down")
    await discovery.look()
    assert changes == [Served(own=True, kuberay=KubeRay.MISSING)] == [discovery.served]


class Wiring:
    """What Watches needs of it."""

    class cache:
        detached = 0

        @classmethod
        def detach(cls) -> None:
            cls.detached += 1


class TestWatches:
    """The runner, over a kopf that only notes how it was started."""

    @pytest.fixture
    def health(self) -> Health:
        return Health()

    @pytest.fixture
    def discovery(self, api: Any, kube: Kube) -> Discovery:
        return Discovery(kube, interval_s=1, on_change=lambda _: None)

    @pytest.fixture
    def watches(self, discovery: Discovery, health: Health) -> Watches:
        return Watches(discovery=discovery, namespaces=("ns",), health=health, metrics=Metrics())

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[dict[str, Any]]:
        """Each start of kopf; it ends as its stop flag or `error` says."""
        starts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def operator(**arguments: Any) -> None:
            starts.put_nowait(arguments)
            await arguments["stop_flag"].wait()

        monkeypatch.setattr(kopf, "operator", operator)
        monkeypatch.setattr("tpinference_operator.watches.MIN_LIFE_S", 0.0)
        return starts

    async def test_waits_for_our_crd_and_says_so(
        self, watches: Watches, health: Health, discovery: Discovery, started: Any
    ) -> None:
        discovery.served = Served(own=False, kuberay=KubeRay.MISSING)
        task = asyncio.create_task(watches.run(Wiring))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert health.describe() == ("the CRD tpinferences.serving.tpinference.dev is not served")
        discovery.served = Served(own=True, kuberay=KubeRay.MISSING)
        watches.served_changed(discovery.served)
        arguments = await asyncio.wait_for(started.get(), 5)
        assert (arguments["namespaces"], arguments["clusterwide"]) == (("ns",), False)
        await self.end(task)

    async def test_starts_anew_when_kuberay_appears_and_when_a_watch_had_a_gap(
        self, watches: Watches, discovery: Discovery, started: Any
    ) -> None:
        discovery.served = Served(own=True, kuberay=KubeRay.MISSING)
        task = asyncio.create_task(watches.run(Wiring))  # type: ignore[arg-type]
        first = await asyncio.wait_for(started.get(), 5)
        discovery.served = Served(own=True, kuberay=KubeRay.SERVED)
        watches.served_changed(discovery.served)
        second = await asyncio.wait_for(started.get(), 5)
        assert len(second["registry"]._watching.get_all_handlers()) == (
            len(first["registry"]._watching.get_all_handlers()) + 1
        )
        pods = "/api/v1/namespaces/ns/pods"
        watches.on_response("GET", pods, False)
        watches.on_response("GET", pods, True)
        assert started.empty()
        watches.on_response("GET", pods, False)
        await asyncio.wait_for(started.get(), 5)
        await self.end(task)

    async def test_is_ready_once_everything_was_listed(
        self, watches: Watches, health: Health, discovery: Discovery, started: Any
    ) -> None:
        discovery.served = Served(own=True, kuberay=KubeRay.MISSING)
        task = asyncio.create_task(watches.run(Wiring))  # type: ignore[arg-type]
        await asyncio.wait_for(started.get(), 5)
        core = "/api/v1/namespaces/ns"
        paths = [
            "/apis/serving.tpinference.dev/v1alpha1/namespaces/ns/tpinferences",
            "/apis/apps/v1/namespaces/ns/controllerrevisions",
            f"{core}/pods",
        ]
        for path in paths:
            watches.on_response("GET", path, False)
        assert health.describe() == f"not listed yet: {core}/services"
        watches.on_response("GET", f"{core}/services", False)
        assert health.is_ready
        await self.end(task)

    async def test_a_kopf_that_ends_by_itself_ends_the_operator(
        self, watches: Watches, discovery: Discovery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def operator(**_: Any) -> None:
            return

        monkeypatch.setattr(kopf, "operator", operator)
        monkeypatch.setattr("tpinference_operator.watches.NUM_LOOKS_AFTER_FAILURE", 0)
        discovery.served = Served(own=True, kuberay=KubeRay.SERVED)
        with pytest.raises(WatchesEnded):
            await watches.run(Wiring)  # type: ignore[arg-type]

    @staticmethod
    async def end(task: asyncio.Task[None]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
