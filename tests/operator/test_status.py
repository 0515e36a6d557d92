"""The status as a whole: numbers, times, generations, and what each condition sums up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from harness.plan_world import World

from tpinference_operator.api.reasons import ConditionType, Reason
from tpinference_operator.api.status import (
    TPInferenceStatus,
)
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.observed import KubeRay
from tpinference_operator.status import status_of_invalid_spec, urgent

MakeWorld = Callable[..., World]


_SUMMARIES = {"Ready", "Available", "Degraded"}


# Nothing is wrong


def test_all_is_true_when_everything_is_up(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    found = {kind: condition.status for kind, condition in world.conditions().items()}
    assert found == {
        "Ready": "True",
        "Available": "True",
        "Accepted": "True",
        "Scheduled": "True",
        "RayClusterReady": "True",
        "EngineReady": "True",
        "RouteReady": "True",
        "Progressing": "False",
        "Degraded": "False",
    }


def test_numbers_of_a_running_object(make_running: MakeWorld) -> None:
    status = make_running(replicas=2).status()
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (2, 2, 2)
    assert status.available_replicas == 2
    assert status.current_revision == status.update_revision != ""
    assert status.url == "http://llm.ns:8000/v1"
    assert status.layout is not None
    assert (status.layout.nodes, status.layout.gpus) == (2, 0)


def test_scaled_to_zero_is_ready_and_not_available(make_running: MakeWorld) -> None:
    world = make_running()
    world.change(replicas=0)
    world.settle()
    assert world.told()[:2] == ("True", Reason.SCALED_TO_ZERO)
    assert world.told("Available")[:2] == ("False", Reason.SCALED_TO_ZERO)
    assert "Reconciling" not in world.conditions()


def test_status_does_not_change_when_nothing_does(make_running: MakeWorld) -> None:
    world = make_running()
    world.plan_once()
    before = world.status()
    world.now += timedelta(minutes=10)
    assert world.status() == before


def test_stored_status_equals_the_computed_one(make_running: MakeWorld) -> None:
    world = make_running()
    world.plan_once()
    assert world.observed().tpi.status == world.status()


def test_every_condition_has_the_generation_after_each_change(make_running: MakeWorld) -> None:
    world = make_running()
    world.change(service={"port": 80})
    status = world.status()
    assert status.observed_generation == 2
    assert {c.observed_generation for c in status.conditions} == {2}


def test_a_time_moves_only_when_its_condition_flips(make_running: MakeWorld) -> None:
    world = make_running()
    world.plan_once()
    before = world.conditions()
    world.now += timedelta(minutes=1)
    world.set_pod(world.pod_of("0/1")["metadata"]["name"], ready=False)
    after = world.conditions()
    moved = {k for k in before if before[k].last_transition_time != after[k].last_transition_time}
    flipped = {k for k in before if before[k].status != after[k].status}
    assert (
        moved
        == flipped
        == {"Ready", "Available", "EngineReady", "RouteReady", "Progressing", "Degraded"}
    )


# The spec or the cluster around it


def test_an_unreadable_spec_is_named_and_stalled_and_decisions_are_kept(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    error = InvalidSpec(("spec.replicas: too small",))
    world.tpi["metadata"]["generation"] = 7
    status = status_of_invalid_spec(world.tpi, error, now="2026-01-01T00:00:00Z")
    found = {c.type: (c.status, c.reason) for c in status.conditions}
    assert found["Accepted"] == ("False", "InvalidSpec")
    assert found["Stalled"] == ("True", "InvalidSpec")
    assert status.observed_generation == 7
    assert status.groups == world.observed().tpi.status.groups


def test_an_unreadable_spec_leaves_what_is_known_of_groups_that_serve(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    world.plan_once()
    before = world.conditions()
    error = InvalidSpec(("spec.replicas: too small",))
    world.tpi["metadata"]["generation"] = 7
    status = status_of_invalid_spec(world.tpi, error, now="2027-01-01T00:00:00Z")
    after = {c.type: c for c in status.conditions}
    for kind in ("Available", "Scheduled", "RayClusterReady", "EngineReady", "RouteReady"):
        assert after[kind] == before[kind].model_copy(update={"observed_generation": 7})
    assert [c.type for c in status.conditions] == [k for k in ConditionType if k in after]


def test_an_object_that_never_was_readable_has_no_conditions_about_groups(
    make_world: MakeWorld,
) -> None:
    status = status_of_invalid_spec(
        make_world().tpi, InvalidSpec(("x",)), now="2027-01-01T00:00:00Z"
    )
    assert {c.type for c in status.conditions} == {
        *("Ready", "Accepted", "Progressing", "Degraded", "Stalled")
    }


def test_an_unreadable_spec_is_not_at_work_any_more(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    assert "Reconciling" in world.conditions()
    status = status_of_invalid_spec(world.tpi, InvalidSpec(("x",)), now="2027-01-01T00:00:00Z")
    assert "Reconciling" not in {c.type for c in status.conditions}


@pytest.mark.parametrize(
    ("served", "reason", "word"),
    [
        (KubeRay.MISSING, Reason.KUBERAY_NOT_INSTALLED, "install KubeRay"),
        (KubeRay.TOO_OLD, Reason.KUBERAY_TOO_OLD, "1.6 or newer"),
    ],
)
def test_missing_or_old_kuberay_is_told_and_waited_for(
    make_world: MakeWorld, served: KubeRay, reason: Reason, word: str
) -> None:
    world = make_world()
    world.served = served
    status, found, message = world.told("Accepted")
    assert (status, found) == ("False", reason)
    assert word in message
    assert world.told()[:2] == ("False", reason)
    assert "Reconciling" in world.conditions() and "Stalled" not in world.conditions()


def test_a_name_conflict_is_stalled(make_world: MakeWorld) -> None:
    world = make_world()
    world.add("Service", {"metadata": {"name": "llm"}, "spec": {}})
    assert world.told("Accepted")[:2] == ("False", Reason.NAME_CONFLICT)
    assert world.told("Stalled")[1] == Reason.NAME_CONFLICT


def test_kuberay_that_watches_elsewhere_is_hinted_at_and_is_a_failure_after_30_s(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.plan_once()
    world.now += timedelta(seconds=5)
    assert world.told()[1] == Reason.WAITING_FOR_PODS
    world.now += timedelta(seconds=1)
    for kind in ("Ready", "Scheduled", "RayClusterReady"):
        status, reason, message = world.told(kind)
        assert (status, reason) == ("False", Reason.WAITING_FOR_KUBERAY)
        assert "namespace 'ns'" in message
    assert world.told("Degraded")[0] == "False"
    world.now += timedelta(seconds=24)
    status, reason, message = world.told()
    assert (status, reason) == ("False", Reason.RAY_CLUSTER_NOT_OBSERVED)
    assert "namespace 'ns'" in message
    assert world.told("Degraded")[0] == "True"


def test_a_silent_kuberay_is_told_within_ten_seconds(make_world: MakeWorld) -> None:
    """Nothing wakes anybody meanwhile but the plans themselves."""
    world = make_world()
    world.plan_once()
    created = world.now
    while world.told()[1] != Reason.WAITING_FOR_KUBERAY:
        world.now += timedelta(seconds=world.plan().wake_after_s or 60)
    assert (world.now - created).total_seconds() <= 10


def test_a_kuberay_that_comes_late_is_no_failure(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    world.now += timedelta(seconds=20)
    assert world.told()[1] == Reason.WAITING_FOR_KUBERAY
    world.kuberay()
    assert world.told()[1] == Reason.WAITING_FOR_PODS


def test_kuberays_refusal_is_told_in_its_words(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    uid = world.all("RayCluster")[0]["metadata"]["uid"]
    world.events.append(
        {
            "type": "Warning",
            "reason": "InvalidRayClusterSpec",
            "message": "The RayCluster spec is invalid: no",
            "involvedObject": {"uid": uid},
            "metadata": {},
        }
    )
    assert world.told() == (
        "False",
        Reason.RAY_CLUSTER_INVALID,
        "The RayCluster spec is invalid: no",
    )
    assert "Stalled" in world.conditions()
    world.now += timedelta(minutes=1)
    assert world.told("Scheduled")[1] == Reason.WAITING_FOR_PODS


# Several groups, updates, the route


def test_available_holds_while_one_of_two_groups_answers(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.set_pod(world.pod_of("1/2")["metadata"]["name"], ready=False)
    assert world.told("Available")[0] == "True"
    status, reason, message = world.told()
    assert (status, reason) == ("False", Reason.ENGINE_NOT_READY)
    assert message.startswith("group 1: ")


def test_an_update_is_told_until_its_last_group_answers(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.change(engine={"image": "new"})
    world.plan_once()
    assert world.told("Progressing")[:2] == ("True", Reason.UPDATING)
    assert world.told()[:2] == ("False", Reason.DRAINING)
    assert world.told("Available")[0] == "True"
    assert world.status().current_revision != world.status().update_revision
    world.settle()
    assert world.told()[0] == "True"
    assert world.status().current_revision == world.status().update_revision


def test_ready_is_false_at_once_for_a_new_generation(make_running: MakeWorld) -> None:
    world = make_running()
    world.change(engine={"image": "new"})
    assert world.told()[0] == "False"


def test_a_lost_head_is_told_while_its_group_comes_back(make_running: MakeWorld) -> None:
    world = make_running()
    world.lose_head("0/1")
    assert world.told()[:2] == ("False", Reason.HEAD_LOST)
    world.plan_once()
    assert world.told("Progressing")[:2] == ("True", Reason.RESTARTING)


def test_a_load_balancer_without_address_is_not_a_route(make_running: MakeWorld) -> None:
    world = make_running(service={"type": "LoadBalancer"})
    assert world.told("RouteReady")[:2] == ("False", Reason.ADDRESS_PENDING)
    world.all("Service")[0]["status"] = {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}}
    assert world.told()[0] == "True"


# Writing


def test_only_a_condition_that_flips_is_urgent(make_running: MakeWorld) -> None:
    status = make_running().status()
    other_message = [c.model_copy(update={"message": "x"}) for c in status.conditions]
    other_reason = [c.model_copy(update={"reason": "X"}) for c in status.conditions]
    assert not urgent(status, status.model_copy(update={"conditions": other_message}))
    assert urgent(status, status.model_copy(update={"conditions": other_reason}))
    assert urgent(TPInferenceStatus(), status)


def test_conditions_are_always_in_the_same_order(make_running: MakeWorld) -> None:
    kinds = [c.type for c in make_running().status().conditions]
    assert kinds == [kind for kind in ConditionType if kind in kinds]
