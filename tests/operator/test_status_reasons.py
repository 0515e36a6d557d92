"""Why a group does not work, in the cluster's or the engine's own words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from harness.plan_world import Body, World

from tpinference_operator.api.reasons import Reason
from tpinference_operator.api.status import (
    MAX_MESSAGE,
    MAX_RANKS,
)
from tpinference_operator.observe import format_time

MakeWorld = Callable[..., World]


def pod_status(world: World, role: str, **status: Any) -> Body:
    pod = world.pod_of("0/1", role)
    pod["status"] = {"phase": "Pending", **status}
    return pod


# Pods


def test_no_node_that_fits_is_told_in_the_schedulers_words(starting: World) -> None:
    said = "0/1 nodes are available: 1 Insufficient memory."
    unfit = {"type": "PodScheduled", "status": "False", "message": said}
    pod_status(starting, "worker", conditions=[unfit])
    status, reason, message = starting.told()
    assert (status, reason) == ("False", Reason.UNSCHEDULABLE)
    assert message.endswith(said)
    assert starting.told("Degraded")[:2] == ("True", Reason.UNSCHEDULABLE)


@pytest.mark.parametrize(
    "said",
    [
        'persistentvolumeclaim "models" not found',
        "pod has unbound immediate PersistentVolumeClaims",
    ],
)
def test_a_claim_that_is_missing_or_pending_is_told(starting: World, said: str) -> None:
    unfit = {"type": "PodScheduled", "status": "False", "message": said}
    pod_status(starting, "head", conditions=[unfit])
    assert starting.told()[1] == Reason.VOLUME_NOT_READY
    assert said in starting.told("Scheduled")[2]


EVENT_TIMES: dict[str, Callable[[str], Body]] = {
    "kubelet": lambda now: {"firstTimestamp": "2025-12-31T00:00:00Z", "lastTimestamp": now},
    "once": lambda now: {"eventTime": now},
    "series": lambda now: {
        "eventTime": "2025-12-31T00:00:00Z",
        "series": {"count": 9, "lastObservedTime": now},
    },
}


@pytest.mark.parametrize("event_times", EVENT_TIMES.values(), ids=EVENT_TIMES)
def test_a_failing_mount_is_told_from_its_event_and_forgotten(
    starting: World, event_times: Callable[[str], Body]
) -> None:
    """The kubelet tells it again every two minutes while it holds."""
    scheduled = {"type": "PodScheduled", "status": "True"}
    pod = pod_status(starting, "head", conditions=[scheduled])
    starting.events.append(
        {
            "type": "Warning",
            "reason": "FailedMount",
            "message": "MountVolume.SetUp failed: no such device",
            "involvedObject": {"uid": pod["metadata"]["uid"]},
            "metadata": {},
            **event_times(format_time(starting.now)),
        }
    )
    assert starting.told("RayClusterReady")[1] == Reason.VOLUME_NOT_READY
    assert starting.told()[2].endswith("no such device")
    starting.now += timedelta(minutes=4)
    assert starting.told("RayClusterReady")[1] == Reason.PODS_STARTING


@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
def test_an_image_that_can_not_be_pulled_is_told_with_its_cause(
    starting: World, where: str
) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}
    pod = pod_status(starting, "worker", **{where: [{"state": {"waiting": waiting}}]})
    starting.events.append(
        {
            "type": "Warning",
            "reason": "Failed",
            "message": 'Failed to pull image "x": not found',
            "involvedObject": {"uid": pod["metadata"]["uid"]},
            "metadata": {},
        }
    )
    status, reason, message = starting.told()
    assert (status, reason) == ("False", Reason.IMAGE_PULL_FAILED)
    assert "Back-off pulling" in message and "not found" in message


def test_a_container_that_can_not_be_made_is_told(starting: World) -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}
    pod_status(starting, "head", containerStatuses=[{"state": {"waiting": waiting}}])
    assert starting.told()[1] == Reason.CONTAINER_FAILED
    assert 'secret "s" not found' in starting.told()[2]


def test_a_pod_security_refusal_is_told(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    said = 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'
    world.refuse_pods(said)
    assert world.told() == ("False", Reason.PODS_REFUSED, said)


def test_a_quota_refusal_is_told_before_and_during_the_wait(make_world: MakeWorld) -> None:
    world = make_world()
    world.plan_once()
    said = 'pods "x" is forbidden: exceeded quota: q, requested: cpu=1'
    world.refuse_pods(said)
    for _ in range(3):
        status, reason, message = world.told()
        assert (status, reason) == ("False", Reason.QUOTA_EXCEEDED)
        assert said in message
        world.plan_once()


def test_pods_that_start_are_counted(starting: World) -> None:
    for pod in starting.all("Pod"):
        starting.set_pod(pod["metadata"]["name"])
    pod_status(starting, "worker", conditions=[{"type": "PodScheduled", "status": "True"}])
    assert starting.told("RayClusterReady") == ("False", "PodsStarting", "2 of 3 pods run")
    assert starting.told("Degraded")[0] == "False"


# The engine


def run_pods(world: World, **engine: Any) -> None:
    for pod in world.all("Pod"):
        world.set_pod(pod["metadata"]["name"])
    world.engines[world.pod_of("0/1")["metadata"]["uid"]] = {"epoch": 1, **engine}


def test_the_stage_of_a_start_is_told_and_kept(starting: World) -> None:
    stages = [
        {"name": "rayJoined", "startedAt": "2026-01-01T00:00:01Z", "seconds": 2.4},
        {"name": "weightsLoaded", "startedAt": "2026-01-01T00:00:03.5Z", "seconds": None},
    ]
    run_pods(starting, state="starting", stages=stages)
    assert starting.told() == ("False", "EngineStarting", "stage weightsLoaded")
    starting.plan_once()
    starting.engines.clear()
    startup = starting.status().groups[0].startup
    assert startup.stage == "weightsLoaded"
    assert [(s.name, s.seconds) for s in startup.stages] == [
        ("rayJoined", 2),
        ("weightsLoaded", None),
    ]


@pytest.mark.parametrize("reason", ["InvalidModel", "InvalidConfig", "InsufficientResources"])
def test_an_engine_that_can_not_start_is_told_in_its_words(starting: World, reason: str) -> None:
    failure = {"reason": reason, "message": "config.json is missing", "exitCode": 1}
    run_pods(starting, state="failed", reason=reason, message="short", lastFailure=failure)
    assert starting.told() == ("False", reason, "config.json is missing")
    assert starting.told("Stalled")[1] == reason
    assert starting.told("Progressing")[:2] == ("False", reason)
    last = starting.status().groups[0].last_failure
    assert last is not None and (last.reason, last.exit_code) == (reason, 1)


def test_the_engines_failure_is_told_before_pods_that_wait(starting: World) -> None:
    run_pods(starting, state="failed", reason="InvalidModel", message="no weights")
    pod_status(starting, "worker")
    assert starting.told()[:2] == ("False", "InvalidModel")


def test_a_failing_rank_is_named_with_its_pod(starting: World) -> None:
    failure = {"reason": "InvalidModel", "message": "cut", "rank": 1, "pod": "w-1"}
    run_pods(starting, state="failed", reason="InvalidModel", lastFailure=failure)
    assert starting.told()[2] == "rank 1 on pod w-1: cut"


def test_readiness_is_the_pods_whatever_the_engine_says(make_running: MakeWorld) -> None:
    world = make_running()
    assert world.engines == {}
    assert world.told()[0] == "True"
    world.set_pod(world.pod_of("0/1")["metadata"]["name"], ready=False)
    world.engines[world.pod_of("0/1")["metadata"]["uid"]] = {"state": "ready", "epoch": 1}
    assert world.told()[:2] == ("False", Reason.ENGINE_NOT_READY)


def test_lost_workers_end_readiness_at_once(make_running: MakeWorld) -> None:
    world = make_running()
    world.remove("Pod", world.pod_of("0/1", "worker")["metadata"]["name"])
    assert world.told() == ("False", Reason.WORKERS_LOST, "2 of 3 pods run")


def test_ranks_are_shown_failing_first_and_at_most_128(make_running: MakeWorld) -> None:
    world = make_running()
    ranks = [{"rank": r, "pod": "p", "state": "dead" if r == 150 else "alive"} for r in range(200)]
    world.engines[world.pod_of("0/1")["metadata"]["uid"]] = {"state": "ready", "ranks": ranks}
    shown = world.status().groups[0].ranks
    assert len(shown) == MAX_RANKS
    assert [rank.rank for rank in shown[:3]] == [150, 0, 1]


def test_messages_are_cut_before_they_are_written(starting: World) -> None:
    run_pods(starting, state="failed", reason="InvalidModel", message="x" * 5000)
    assert len(starting.told()[2]) == MAX_MESSAGE
