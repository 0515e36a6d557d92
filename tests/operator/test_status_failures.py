"""Failures gone a moment later: pods that KubeRay replaces, engines that can't be asked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from harness.plan_world import Body, World

from tpinference_operator.api.reasons import Reason
from tpinference_operator.observe import format_time

MakeWorld = Callable[..., World]


def end_pod(world: World, role: str, *, phase: str = "Failed", **ended: Any) -> Body:
    pod = world.set_pod(world.pod_of("0/1", role)["metadata"]["name"], phase=phase)
    ended = {"finishedAt": format_time(world.now), **ended}
    pod["status"]["containerStatuses"] = [{"state": {"terminated": ended}}]
    return pod


def replace_pod(world: World, pod: Body) -> None:
    """As KubeRay does within a second, and the new one only starts."""
    world.remove("Pod", pod["metadata"]["name"])
    world.kuberay()


ENDS: dict[str, tuple[str, Body, str]] = {
    "entrypoint": ("Failed", {"exitCode": 127, "reason": "Error"}, "exit code 127"),
    "memory": ("Failed", {"exitCode": 137, "reason": "OOMKilled"}, "OOMKilled"),
    "message": ("Failed", {"exitCode": 1, "reason": "Error", "message": "no such flag"}, "such"),
    "zero": ("Succeeded", {"exitCode": 0, "reason": "Completed"}, "exit code 0"),
}


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("end", ENDS)
def test_a_pod_that_ends_during_the_start_is_told_and_stays_told(
    starting: World, role: str, end: str
) -> None:
    phase, ended, word = ENDS[end]
    pod = end_pod(starting, role, phase=phase, **ended)
    status, reason, message = starting.told()
    assert (status, reason) == ("False", Reason.CONTAINER_FAILED)
    assert word in message and pod["metadata"]["name"] in message
    starting.plan_once()
    replace_pod(starting, pod)
    assert starting.told() == (status, reason, message)
    last = starting.status().groups[0].last_failure
    assert last is not None
    assert (last.reason, last.exit_code) == (Reason.CONTAINER_FAILED, ended["exitCode"])
    assert (last.pod, last.node, last.epoch) == (pod["metadata"]["name"], "n0", 1)


def test_a_pod_that_ended_is_written_once(starting: World) -> None:
    end_pod(starting, "worker", exitCode=1)
    starting.plan_once()
    before = starting.status()
    starting.now += timedelta(minutes=1)
    assert starting.status() == before


def test_an_evicted_pod_is_told(starting: World) -> None:
    pod = starting.set_pod(starting.pod_of("0/1", "worker")["metadata"]["name"], phase="Failed")
    pod["status"] |= {"reason": "Evicted", "message": "The node was low on memory."}
    assert starting.told()[1] == Reason.CONTAINER_FAILED
    assert "Evicted: The node was low on memory." in starting.told()[2]


def test_a_pod_that_ends_because_it_is_deleted_did_not_fail(starting: World) -> None:
    """KubeRay deletes all workers of a group when one is lost."""
    asked = starting.now
    starting.now += timedelta(seconds=3)
    pod = end_pod(starting, "worker", exitCode=143, reason="Error")
    pod["metadata"] |= {
        "deletionTimestamp": format_time(asked + timedelta(seconds=90)),
        "deletionGracePeriodSeconds": 90,
    }
    assert starting.told()[1] == Reason.WAITING_FOR_PODS
    assert starting.status().groups[0].last_failure is None


def test_a_pod_that_ended_and_is_deleted_then_is_told(starting: World) -> None:
    pod = end_pod(starting, "worker", exitCode=1, reason="Error")
    starting.now += timedelta(seconds=1)
    pod["metadata"] |= {
        "deletionTimestamp": format_time(starting.now + timedelta(seconds=90)),
        "deletionGracePeriodSeconds": 90,
    }
    assert starting.told()[1] == Reason.CONTAINER_FAILED


def test_an_end_is_told_while_the_next_pod_starts_its_engine(starting: World) -> None:
    pod = end_pod(starting, "worker", exitCode=137, reason="OOMKilled")
    starting.plan_once()
    replace_pod(starting, pod)
    for each in starting.all("Pod"):
        starting.set_pod(each["metadata"]["name"])
    status, reason, message = starting.told()
    assert (status, reason) == ("False", Reason.ENGINE_STARTING)
    assert "OOMKilled" in message


def test_why_a_worker_of_a_running_group_was_lost_is_told(make_running: MakeWorld) -> None:
    world = make_running()
    pod = end_pod(world, "worker", exitCode=137, reason="OOMKilled")
    for _ in range(2):
        status, reason, message = world.told()
        assert (status, reason) == ("False", Reason.WORKERS_LOST)
        assert message.startswith("2 of 3 pods run; ") and "OOMKilled" in message
        world.plan_once()
        replace_pod(world, pod)


def test_an_end_before_a_restart_is_not_told_of_the_next_incarnation(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    end_pod(world, "head", exitCode=137, reason="OOMKilled")
    world.plan_once()
    world.kuberay()
    world.plan_once()
    world.kuberay()
    assert world.status().groups[0].epoch == 2
    assert world.told()[1] == Reason.WAITING_FOR_PODS


# An engine that can't be asked


def fail(world: World, reason: str, **failure: Any) -> None:
    for pod in world.all("Pod"):
        world.set_pod(pod["metadata"]["name"])
    engine = {"state": "failed", "epoch": 1, "reason": reason, "message": "what happened"}
    last = {"lastFailure": {"reason": reason, **failure}} if failure else {}
    world.engines[world.pod_of("0/1")["metadata"]["uid"]] = {**engine, **last}


@pytest.mark.parametrize("reason", ["InvalidModel", "InvalidConfig", "InsufficientResources"])
@pytest.mark.parametrize(
    "failure",
    [{}, {"message": "cut"}, {"message": "cut", "rank": 1, "pod": "w-1"}],
    ids=["bare", "whole", "of a rank"],
)
def test_a_failed_object_stays_failed_when_its_engine_can_not_be_asked(
    starting: World, reason: str, failure: Body
) -> None:
    """Also right after the operator was started: it has asked nobody yet."""
    fail(starting, reason, **failure)
    starting.plan_once()
    before = starting.status()
    assert "Stalled" in starting.conditions()
    starting.engines.clear()
    assert starting.status() == before
    assert starting.plan_once() == []


def test_a_spent_budget_stays_told_when_the_engine_can_not_be_asked(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    for epoch in range(1, 6):
        world.fail_engine(f"0/{epoch}", "GroupFailed")
        world.settle()
    world.fail_engine("0/6", "GroupFailed")
    assert world.plan_once() == []
    before = world.status()
    assert world.told("Stalled")[1] == Reason.RESTART_BUDGET_EXHAUSTED
    world.engines.clear()
    assert world.status() == before


def test_a_recorded_failure_is_over_when_the_pod_is_ready(starting: World) -> None:
    fail(starting, "InvalidModel")
    starting.plan_once()
    starting.engines.clear()
    for pod in starting.all("Pod"):
        starting.set_pod(pod["metadata"]["name"], ready=True)
    assert starting.told()[0] == "True"


def test_a_failure_of_an_older_incarnation_is_not_this_ones(make_running: MakeWorld) -> None:
    world = make_running()
    world.fail_engine("0/1", "InvalidModel")
    world.plan_once()
    world.remove("RayCluster", world.all("RayCluster")[0]["metadata"]["name"])
    world.kuberay()
    world.plan_once()
    world.plan_once()
    world.kuberay()
    assert world.incarnations() == ["0/2"]
    assert "Stalled" not in world.conditions()
