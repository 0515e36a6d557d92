"""Plans after something was lost: restarts, their back-off and their budget."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from harness.plan_world import Body, World

from tpinference_operator.api.reasons import Reason
from tpinference_operator.observe import format_time

MakeWorld = Callable[..., World]


def only_group(world: World) -> Body:
    groups: list[Body] = world.tpi["status"]["groups"]
    assert len(groups) == 1
    return groups[0]


def test_a_lost_head_restarts_the_whole_group_under_a_new_epoch(make_running: MakeWorld) -> None:
    world = make_running()
    world.lose_head("0/1")
    assert world.plan_once() == ["record", "delete 0/HeadLost"]
    world.kuberay()
    assert world.plan_once() == ["create 0/2"]
    assert only_group(world)["restarts"] == 1
    assert only_group(world)["lastFailure"]["reason"] == "HeadLost"


def test_a_head_that_ended_is_lost_and_its_end_is_told(make_running: MakeWorld) -> None:
    world = make_running()
    pod = world.set_pod(world.pod_of("0/1")["metadata"]["name"], phase="Failed")
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": ""}}
    pod["status"]["containerStatuses"] = [{"state": ended}]
    world.plan_once()
    failure = only_group(world)["lastFailure"]
    assert (failure["exitCode"], failure["node"]) == (137, "n0")
    assert "OOMKilled" in failure["message"]


def test_a_head_that_was_never_ready_is_left_to_kuberay(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    world.kuberay()
    world.lose_head("0/1")
    assert world.plan_once() == []


def test_a_lost_worker_is_left_to_kuberay(make_running: MakeWorld) -> None:
    world = make_running()
    world.remove("Pod", world.pod_of("0/1", "worker")["metadata"]["name"])
    assert world.plan_once() == []
    assert world.status().ready_replicas == 0


def test_the_wait_before_a_restart_doubles(make_running: MakeWorld) -> None:
    world = make_running()
    waits = []
    for epoch in (1, 2, 3, 4):
        world.lose_head(f"0/{epoch}")
        world.plan_once()
        world.kuberay()
        wait_s = world.plan().wake_after_s
        waits.append(wait_s or 0)
        world.now += timedelta(seconds=wait_s or 0)
        assert world.plan_once() == [f"create 0/{epoch + 1}"]
        world.kuberay()
        world.kubelets()
        world.kuberay()
        world.plan_once()
    assert waits == [0, 10, 20, 40]


def test_a_group_that_fails_too_often_is_left_until_the_hour_is_over(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    for epoch in range(1, 6):
        world.lose_head(f"0/{epoch}")
        world.settle()
    world.lose_head("0/6")
    assert world.plan_once() == []
    assert {c.type: c.reason for c in world.status().conditions}["Stalled"] == (
        Reason.RESTART_BUDGET_EXHAUSTED
    )
    world.now += timedelta(hours=1)
    assert world.plan_once() == ["record", "delete 0/HeadLost"]


def test_a_new_revision_gets_a_new_budget(make_running: MakeWorld) -> None:
    world = make_running()
    for epoch in range(1, 6):
        world.lose_head(f"0/{epoch}")
        world.settle()
    world.change(engine={"image": "fixed"})
    world.settle()
    assert "recentRestarts" not in only_group(world)


@pytest.mark.parametrize("reason", ["GroupFailed", "EngineCrashed"])
def test_an_engine_that_gave_up_is_restarted_as_a_group(
    make_running: MakeWorld, reason: str
) -> None:
    world = make_running()
    world.fail_engine("0/1", reason)
    assert world.plan_once() == ["record", f"delete 0/{reason}"]
    assert only_group(world)["lastFailure"]["message"] == "what happened"


def test_a_failure_has_the_time_that_the_engine_gives_and_not_that_of_the_look(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    world.fail_engine("0/1", "GroupFailed")
    failed_at = format_time(world.now - timedelta(seconds=7))
    (engine,) = [seen for seen in world.engines.values() if seen["state"] == "failed"]
    engine["lastFailure"] = {
        "reason": "GroupFailed",
        "message": "rank 1 died",
        "time": failed_at,
        "rank": 1,
    }
    world.plan_once()
    last = only_group(world)["lastFailure"]
    assert (last["time"], last["rank"], last["message"]) == (failed_at, 1, "rank 1 died")


@pytest.mark.parametrize("reason", ["InvalidModel", "InvalidConfig", "InsufficientResources"])
def test_an_engine_that_would_fail_again_is_left_standing(
    make_running: MakeWorld, reason: str
) -> None:
    world = make_running()
    world.fail_engine("0/1", reason)
    assert world.plan_once() == []


def test_a_raycluster_deleted_by_hand_comes_back_under_a_new_name(make_running: MakeWorld) -> None:
    world = make_running()
    name = world.all("RayCluster")[0]["metadata"]["name"]
    world.remove("RayCluster", name)
    # Once more by uid: what is gone from our watches may only have lost its label.
    assert world.plan_once() == ["delete 0/not seen any more", "record"]
    world.kuberay()
    assert world.plan_once() == ["create 0/2"]
    assert name not in world.objects["RayCluster"]


def test_a_raycluster_that_is_being_deleted_is_waited_for(make_running: MakeWorld) -> None:
    world = make_running()
    cluster = world.all("RayCluster")[0]
    cluster["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert world.plan_once() == ["record"]
    assert world.plan_once() == []
    world.remove("RayCluster", cluster["metadata"]["name"])
    world.kuberay()
    assert world.plan_once() == ["create 0/2"]


def test_a_quota_refusal_removes_the_group_and_tries_again_after_a_while(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.plan_once()
    world.refuse_pods('pods "x" is forbidden: exceeded quota: q, requested: cpu=1')
    assert world.plan_once() == ["record", "delete 0/QuotaExceeded"]
    assert world.plan_once() == []
    assert world.plan().wake_after_s == 30
    world.now += timedelta(seconds=30)
    assert world.plan_once() == ["create 0/2"]
    assert only_group(world)["restarts"] == 0
