"""apply.py: each action becomes its request, and a surprise stops the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tpinference_operator import cache as views
from tpinference_operator.actions import (
    AdoptChild,
    ApplyService,
    ChildKind,
    CreateChild,
    DeleteChild,
    DrainEngine,
    PatchPodLabel,
    RecordStatus,
)
from tpinference_operator.apply import Applier, PlanAgain
from tpinference_operator.cache import Cache
from tpinference_operator.errors import ApiConflict, ApiUnavailable
from tpinference_operator.kube import APPLY_PATCH, Answer, Kube, Request

KEY = ("ns", "llm")
CLUSTERS = "/apis/ray.io/v1/namespaces/ns/rayclusters"
SERVICES = "/api/v1/namespaces/ns/services"
PODS = "/api/v1/namespaces/ns/pods"


class Engines:
    def __init__(self) -> None:
        self.drained: list[str] = []

    async def drain(self, pod_ip: str) -> bool:
        self.drained.append(pod_ip)
        return False


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def applier(kube: Kube, cache: Cache, engines: Engines) -> Applier:
    return Applier(kube, cache, engines)


async def never() -> None:
    raise AssertionError("nothing to record")


def cluster(name: str) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}}


async def test_created_children_are_seen_before_the_index_has_them(
    api: Any, applier: Applier, cache: Cache
) -> None:
    create = CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-0"))
    await applier.carry_out(KEY, (create,), never)
    assert list(api.objects) == [f"{CLUSTERS}/llm-0"]
    assert [c["metadata"]["name"] for c in cache.children(views.RAYCLUSTERS, KEY)] == ["llm-0"]


async def test_a_taken_name_stops_the_plan_and_shows_the_namesake_once(
    api: Any, applier: Applier, cache: Cache
) -> None:
    api.put(f"{CLUSTERS}/llm-0", cluster("llm-0"))
    actions = (
        CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-0")),
        CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-1")),
    )
    with pytest.raises(PlanAgain):
        await applier.carry_out(KEY, actions, never)
    assert f"{CLUSTERS}/llm-1" not in api.objects
    for seen in (["llm-0"], []):
        cache.begin_look(KEY)
        assert [b["metadata"]["name"] for b in cache.children(views.RAYCLUSTERS, KEY)] == seen


async def test_what_stands_on_a_recorded_decision_waits_for_it(api: Any, applier: Applier) -> None:
    order: list[str] = []

    async def record() -> None:
        order.append(f"recorded with {len(api.objects)} objects")

    create = CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-0"))
    await applier.carry_out(KEY, (RecordStatus(), create), record)
    assert order == ["recorded with 0 objects"]

    async def refused() -> None:
        raise ApiConflict("changed")

    other = CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-1"))
    with pytest.raises(ApiConflict):
        await applier.carry_out(KEY, (RecordStatus(), other), refused)
    assert list(api.objects) == [f"{CLUSTERS}/llm-0"]


async def test_a_delete_of_something_gone_or_replaced_is_done(
    api: Any, applier: Applier, cache: Cache
) -> None:
    api.put(f"{CLUSTERS}/llm-0", cluster("llm-0") | {"metadata": {"name": "llm-0", "uid": "new"}})
    for name, uid in (("llm-0", "old"), ("llm-1", "gone")):
        delete = DeleteChild(kind=ChildKind.RAY_CLUSTER, name=name, uid=uid, why="test")
        await applier.carry_out(KEY, (delete,), never)
    assert list(api.objects) == [f"{CLUSTERS}/llm-0"]


async def test_a_deleted_child_counts_as_going_until_the_index_knows(
    api: Any, applier: Applier, cache: Cache
) -> None:
    cache.wrote(views.RAYCLUSTERS, KEY, api.put(f"{CLUSTERS}/llm-0", cluster("llm-0")))
    (body,) = cache.children(views.RAYCLUSTERS, KEY)
    uid = body["metadata"]["uid"]
    delete = DeleteChild(kind=ChildKind.RAY_CLUSTER, name="llm-0", uid=uid, why="test")
    await applier.carry_out(KEY, (delete,), never)
    (going,) = cache.children(views.RAYCLUSTERS, KEY)
    assert "deletionTimestamp" in going["metadata"]
    cache.seen(views.RAYCLUSTERS, body, gone=True)
    assert cache.children(views.RAYCLUSTERS, KEY) == []


async def test_adoption_keeps_other_owners_and_names_the_version_it_saw(
    api: Any, applier: Applier, cache: Cache
) -> None:
    other = {"kind": "Other", "uid": "o"}
    body = {"metadata": {"name": "llm-0", "uid": "u", "ownerReferences": [other]}}
    cache.wrote(views.RAYCLUSTERS, KEY, api.put(f"{CLUSTERS}/llm-0", body))
    ours = {"kind": "TPInference", "uid": "t", "controller": True}
    adopt = AdoptChild(kind=ChildKind.RAY_CLUSTER, name="llm-0", uid="u", owner_reference=ours)
    await applier.carry_out(KEY, (adopt,), never)
    assert api.objects[f"{CLUSTERS}/llm-0"]["metadata"]["ownerReferences"] == [other, ours]
    assert api.sent[-1].body["metadata"]["resourceVersion"] == "101"


SERVICE_MANIFEST = {
    "metadata": {"name": "llm"},
    "spec": {"ports": [{"port": 8000, "protocol": "TCP"}]},
}


async def test_a_service_is_applied_from_the_start_and_forced_only_when_it_is_ours(
    api: Any, applier: Applier, cache: Cache
) -> None:
    await applier.carry_out(KEY, (ApplyService(manifest=SERVICE_MANIFEST, uid=None),), never)
    (body,) = cache.children(views.SERVICES, KEY)
    uid = body["metadata"]["uid"]
    await applier.carry_out(KEY, (ApplyService(manifest=SERVICE_MANIFEST, uid=uid),), never)
    assert api.writes == [("PATCH", f"{SERVICES}/llm")] * 2
    assert [r.content_type for r in api.sent] == [APPLY_PATCH] * 2
    made, forced = api.sent
    assert (made.query["force"], "uid" in made.body["metadata"]) == ("false", False)
    assert (forced.query["force"], forced.body["metadata"]["uid"]) == ("true", uid)


async def test_a_service_that_has_our_name_already_is_shown_and_not_touched(
    api: Any, applier: Applier, cache: Cache
) -> None:
    foreign = api.put(f"{SERVICES}/llm", {"metadata": {"name": "llm"}, "spec": {"ports": []}})
    with pytest.raises(PlanAgain):
        await applier.carry_out(KEY, (ApplyService(manifest=SERVICE_MANIFEST, uid=None),), never)
    assert api.objects[f"{SERVICES}/llm"] == foreign
    assert [b["metadata"]["name"] for b in cache.children(views.SERVICES, KEY)] == ["llm"]


@pytest.mark.parametrize("there", [{"uid": "new"}, None], ids=["replaced", "gone"])
async def test_a_service_that_is_not_the_one_that_was_seen_backs_off(
    api: Any, applier: Applier, there: dict[str, Any] | None
) -> None:
    if there:
        api.put(f"{SERVICES}/llm", {"metadata": {"name": "llm", **there}})
    before = copy.deepcopy(api.objects)
    with pytest.raises(ApiConflict):
        await applier.carry_out(KEY, (ApplyService(manifest=SERVICE_MANIFEST, uid="old"),), never)
    assert api.objects == before


async def test_ports_that_apply_leaves_in_place_are_taken_away(
    api: Any, applier: Applier, cache: Cache
) -> None:
    def leave_a_port(request: Request) -> Answer | None:
        if request.content_type != APPLY_PATCH:
            return None
        more = [{"port": 9}, *request.body["spec"]["ports"]] if request.body else []
        body = {"metadata": {"name": "llm", "uid": "u"}, "spec": {"ports": more}}
        return Answer(200, api.put(f"{SERVICES}/llm", body))

    api.refuse = leave_a_port
    await applier.carry_out(KEY, (ApplyService(manifest=SERVICE_MANIFEST, uid="u"),), never)
    assert api.sent[-1].body == {"spec": SERVICE_MANIFEST["spec"], "metadata": {"uid": "u"}}
    assert api.objects[f"{SERVICES}/llm"]["spec"] == SERVICE_MANIFEST["spec"]


async def test_a_pods_label_is_patched_by_uid_and_a_gone_pod_plans_again(
    api: Any, applier: Applier
) -> None:
    api.put(f"{PODS}/head", {"metadata": {"name": "head", "uid": "u"}})
    label = PatchPodLabel(pod="head", uid="u", label="traffic", value="off")
    await applier.carry_out(KEY, (label,), never)
    assert api.objects[f"{PODS}/head"]["metadata"]["labels"] == {"traffic": "off"}
    gone = PatchPodLabel(pod="gone", uid="u", label="traffic", value="off")
    with pytest.raises(PlanAgain):
        await applier.carry_out(KEY, (gone,), never)


async def test_an_engine_that_does_not_hear_does_not_stop_the_plan(
    api: Any, applier: Applier, engines: Engines
) -> None:
    create = CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-0"))
    await applier.carry_out(KEY, (DrainEngine(pod_uid="u", pod_ip="10.0.0.1"), create), never)
    assert (engines.drained, len(api.objects)) == (["10.0.0.1"], 1)


async def test_an_api_error_stops_the_plan(api: Any, applier: Applier) -> None:
    def refuse(request: Request) -> Answer | ApiUnavailable | None:
        return ApiUnavailable("down") if request.path == CLUSTERS else None

    api.refuse = refuse
    create = CreateChild(kind=ChildKind.RAY_CLUSTER, manifest=cluster("llm-0"))
    with pytest.raises(ApiUnavailable):
        await applier.carry_out(KEY, (create, RecordStatus()), never)
