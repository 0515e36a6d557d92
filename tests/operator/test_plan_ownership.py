"""Plans about whose an object is, about what was recorded, and about repairs by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from harness.plan_world import Body, World

from tpinference_operator import names
from tpinference_operator.actions import (
    AdoptChild,
    ApplyService,
    CreateChild,
    DeleteChild,
    RecordStatus,
)
from tpinference_operator.api.reasons import Reason

MakeWorld = Callable[..., World]


# Ownership and recorded decisions


def test_children_of_an_older_epoch_are_deleted(make_running: MakeWorld) -> None:
    world = make_running()
    old = world.all("RayCluster")[0]
    stale = {**old, "metadata": {**old["metadata"], "name": "llm-0-stale", "uid": "stale"}}
    stale["metadata"]["labels"] = {**old["metadata"]["labels"], names.EPOCH_LABEL: "0"}
    world.add("RayCluster", stale)
    deletes = [a for a in world.plan().actions if isinstance(a, DeleteChild)]
    assert [(a.name, a.uid) for a in deletes] == [("llm-0-stale", "stale")]


def test_a_lost_status_is_read_back_from_labels(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    del world.tpi["status"]
    assert world.plan_once() == ["record"]
    assert world.tpi["status"]["epoch"] == 2
    assert world.plan_once() == []
    assert world.incarnations() == ["0/1", "1/2"]


def test_orphans_are_adopted_and_keep_running(make_running: MakeWorld) -> None:
    world = make_running()
    world.tpi["metadata"]["uid"] = "new-uid"
    del world.tpi["status"]
    for kind in ("RayCluster", "Service", "ControllerRevision"):
        del world.all(kind)[0]["metadata"]["ownerReferences"]
    assert world.plan_once() == [
        "adopt ControllerRevision",
        "adopt RayCluster",
        "adopt Service",
        "record",
    ]
    assert world.plan_once() == []
    assert world.incarnations() == ["0/1"]


def test_adoption_is_by_uid_and_makes_us_the_controller(make_running: MakeWorld) -> None:
    world = make_running()
    service = world.all("Service")[0]["metadata"]
    del service["ownerReferences"]
    adopted = [a for a in world.plan().actions if isinstance(a, AdoptChild)]
    assert [(a.uid, a.owner_reference["controller"]) for a in adopted] == [(service["uid"], True)]


@pytest.mark.parametrize("kind", ["Service", "RayCluster", "ControllerRevision"])
def test_a_foreign_object_under_our_name_stops_everything(make_world: MakeWorld, kind: str) -> None:
    world = make_world()
    creates = [a for a in world.plan().actions if isinstance(a, CreateChild)]
    wanted = {a.kind.value: a.name for a in creates} | {"Service": "llm"}
    world.add(kind, {"metadata": {"name": wanted[kind]}, "spec": {}})
    assert world.plan_once() == []
    finding = world.plan().findings[0]
    assert finding.reason == Reason.NAME_CONFLICT
    assert f"{kind} {wanted[kind]!r}" in finding.message


def test_a_conflict_is_looked_at_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("Service", {"metadata": {"name": "llm"}, "spec": {}})
    assert world.plan().wake_after_s == 8
    world.remove("Service", "llm")
    assert "create Service" in world.plan_once()


def test_somebody_elses_raycluster_with_our_labels_is_not_in_the_way(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    copy = {**world.all("RayCluster")[0]["metadata"], "name": "copy", "uid": "copy"}
    copy["ownerReferences"] = [{"uid": "other", "kind": "RayService", "controller": True}]
    world.add("RayCluster", {"metadata": copy, "spec": {}})
    assert world.plan_once() == []
    assert world.status().replicas == 1


@pytest.mark.parametrize("kind", ["Service", "RayCluster", "ControllerRevision"])
def test_children_of_a_deleted_namesake_are_waited_for(make_running: MakeWorld, kind: str) -> None:
    """`kubectl delete` and `apply` at once."""
    world = make_running()
    left = world.all(kind)[0]
    for every in world.objects.values():
        every.clear()
    world.add(kind, left)
    world.tpi["metadata"]["uid"] = "new-uid"
    del world.tpi["status"]
    assert world.plan_once() == []
    assert world.plan().wake_after_s == 2
    world.objects[kind].clear()
    assert world.plan_once()[-1] == "create 0/1"


def test_a_dying_namesake_of_the_service_is_waited_for(make_world: MakeWorld) -> None:
    world = make_world()
    dying = {"name": "llm", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    world.add("Service", {"metadata": dying, "spec": {}})
    assert world.plan_once() == ["create ControllerRevision", "record", "create 0/1"]
    assert world.plan().wake_after_s == 2


# Repairs


def test_a_service_edited_by_hand_is_applied_again(make_running: MakeWorld) -> None:
    world = make_running()
    world.all("Service")[0]["spec"]["selector"] = {"app": "other"}
    assert world.plan_once() == ["apply Service"]
    assert world.plan_once() == []


def test_a_port_that_is_not_ours_is_replaced(make_running: MakeWorld) -> None:
    world = make_running()
    (service,) = world.all("Service")
    service["spec"]["ports"].append({"name": "x", "port": 9, "targetPort": 9})
    applied = [a for a in world.plan().actions if isinstance(a, ApplyService)]
    assert [a.uid for a in applied] == [service["metadata"]["uid"]]


def test_a_changed_port_touches_the_service_alone(make_running: MakeWorld) -> None:
    world = make_running()
    world.change(service={"port": 80})
    assert world.plan_once() == ["apply Service"]


def test_a_deleted_service_is_made_again(make_running: MakeWorld) -> None:
    world = make_running()
    world.remove("Service", "llm")
    assert world.plan_once() == ["create Service"]


def test_a_traffic_label_taken_off_by_hand_is_put_back(make_running: MakeWorld) -> None:
    world = make_running()
    del world.pod_of("0/1")["metadata"]["labels"][names.TRAFFIC_LABEL]
    assert world.plan_once() == ["traffic on 0/1"]


def test_a_drain_whose_record_was_lost_is_finished(make_running: MakeWorld) -> None:
    world = make_running()
    world.change(engine={"image": "new"})
    world.plan_once()
    world.now += timedelta(seconds=2)
    assert world.plan_once() == ["drain 0/1"]
    del world.tpi["status"]
    world.change(engine={"image": None})
    world.settle()
    assert world.incarnations() == ["0/2"]


def test_a_revision_deleted_by_hand_is_stored_again(make_running: MakeWorld) -> None:
    world = make_running()
    world.objects["ControllerRevision"].clear()
    assert world.plan_once() == ["create ControllerRevision"]
    assert world.plan_once() == []


@pytest.mark.parametrize("label", [None, "00000000"])
def test_an_edited_label_of_a_revision_changes_nothing(
    make_running: MakeWorld, label: str | None
) -> None:
    world = make_running()
    world.all("ControllerRevision")[0]["metadata"]["labels"][names.REVISION_LABEL] = label
    assert world.plan_once() == []
    for image in "abcde":
        world.change(engine={"image": image})
        world.settle()
    assert [r["revision"] for r in world.all("ControllerRevision")] == [3, 4, 5, 6]


def test_a_revision_of_ours_that_holds_nothing_is_told_and_not_written_over(
    make_running: MakeWorld,
) -> None:
    """Its data can't be changed, so a create would be refused again and again."""
    world = make_running()
    world.all("ControllerRevision")[0]["data"] = {}
    assert world.plan_once() == []
    assert [f.reason for f in world.plan().findings] == [Reason.NAME_CONFLICT]
    assert world.plan().wake_after_s is not None


def test_a_revision_that_is_being_deleted_is_waited_for(make_running: MakeWorld) -> None:
    world = make_running()
    revision = world.all("ControllerRevision")[0]["metadata"]
    revision["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert world.plan_once() == []
    assert (world.plan().findings, world.plan().wake_after_s) == ((), 2)
    world.remove("ControllerRevision", revision["name"])
    assert world.plan_once() == ["create ControllerRevision"]


def test_a_raycluster_that_lost_our_name_label_is_deleted_by_its_uid(
    make_running: MakeWorld,
) -> None:
    """It is in no watch of ours any more, and may serve on."""
    world = make_running()
    uid = world.all("RayCluster")[0]["metadata"]["uid"]
    hidden = world.objects["RayCluster"].copy()
    world.objects["RayCluster"].clear()
    actions = world.plan().actions
    deletes = [a for a in actions if isinstance(a, DeleteChild)]
    assert [(a.name, a.uid) for a in deletes] == [(next(iter(hidden)), uid)]
    # The uid is in the record that goes, so cut in between it must have been used already.
    assert actions.index(deletes[0]) < actions.index(RecordStatus())


@pytest.mark.parametrize("change", [{"replicas": 0}, {"engine": {"image": "new"}}], ids=str)
def test_a_raycluster_that_lost_our_name_label_is_deleted_whatever_comes_next(
    make_running: MakeWorld, change: Body
) -> None:
    world = make_running()
    uid = world.all("RayCluster")[0]["metadata"]["uid"]
    world.objects["RayCluster"].clear()
    world.change(**change)
    assert [a.uid for a in world.plan().actions if isinstance(a, DeleteChild)] == [uid]


# What the acting half is asked to look at


def test_a_group_without_progress_has_its_events_listed(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    assert world.plan().watch_events_of == frozenset()
    world.now += timedelta(seconds=5)
    assert world.plan().watch_events_of == {world.all("RayCluster")[0]["metadata"]["uid"]}


def test_events_are_listed_of_pending_pods_and_of_nothing_that_runs(make_world: MakeWorld) -> None:
    """A model may load for an hour."""
    world = make_world()
    world.plan_once()
    world.kuberay()
    world.now += timedelta(seconds=5)
    head, *workers = world.all("Pod")
    world.set_pod(head["metadata"]["name"])
    assert world.plan().watch_events_of == {pod["metadata"]["uid"] for pod in workers}
    for pod in workers:
        world.set_pod(pod["metadata"]["name"])
    assert world.plan().watch_events_of == frozenset()


def test_an_engine_that_starts_is_asked_again_and_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    world.kuberay()
    pod = world.set_pod(world.pod_of("0/1")["metadata"]["name"], ready=False)
    assert world.plan().refresh_engines == {pod["metadata"]["uid"]}
    assert world.plan().wake_after_s == 2


def test_waiting_is_looked_at_less_and_less_often(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    looks: list[Any] = []
    for age_s in (0, 100, 3600):
        world.now += timedelta(seconds=age_s)
        looks.append(world.plan().wake_after_s)
    assert looks == [2, 10, 30]


def test_what_only_events_tell_is_looked_for_every_few_seconds(make_world: MakeWorld) -> None:
    """A mount that fails shows in no status, however old the group is by then."""
    world = make_world()
    world.plan_once()
    world.kuberay()
    world.now += timedelta(hours=1)
    assert world.plan().wake_after_s == 30
    pod = world.pod_of("0/1", "worker")
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    assert world.plan().wake_after_s == 5
    assert pod["metadata"]["uid"] in world.plan().watch_events_of


def test_an_engine_that_loads_for_an_hour_is_still_asked_every_few_seconds(
    make_world: MakeWorld,
) -> None:
    """Its failure changes no readiness: it never was ready."""
    world = make_world()
    world.plan_once()
    world.kuberay()
    world.set_pod(world.pod_of("0/1")["metadata"]["name"], ready=False)
    world.now += timedelta(hours=1)
    assert world.plan().wake_after_s == 5
