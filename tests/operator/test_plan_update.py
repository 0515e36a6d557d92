"""Updates that nobody notices: drains, whose turn it is, and room for the next incarnation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from harness.plan_world import Body, World

MakeWorld = Callable[..., World]

SECOND = timedelta(seconds=1)


def plan_until(world: World, start: str) -> None:
    """Plans ten times a second until an action starts so."""
    for _ in range(100):
        if any(done.startswith(start) for done in world.plan_once()):
            return
        world.now += SECOND / 10
    raise AssertionError(f"no {start!r}; incarnations {world.incarnations()}")


def updating(world: World) -> World:
    """The first plan after a change."""
    world.change(engine={"image": "new"})
    world.plan_once()
    return world


def told_to_drain(world: World) -> World:
    updating(world)
    world.now += 2 * SECOND
    assert world.plan_once() == ["drain 0/1"]
    return world


def requests(world: World, running: int) -> None:
    world.engines[world.pod_of("0/1")["metadata"]["uid"]]["requests"]["running"] = running


def set_ready(world: World, incarnation: str, *, ready: bool) -> Body:
    return world.set_pod(world.pod_of(incarnation)["metadata"]["name"], ready=ready)


# Drain


def test_traffic_leaves_first_then_the_engine_is_told_then_it_goes(make_running: MakeWorld) -> None:
    """An engine that drains answers 503: nobody may be sent to it any more by then."""
    world = make_running()
    world.change(engine={"image": "new"})
    assert world.plan_once() == ["create ControllerRevision", "record", "traffic off 0/1"]
    for _ in range(2):
        assert world.plan_once() == []
        assert world.plan().wake_after_s == 1
        world.now += SECOND
    assert world.plan_once() == ["drain 0/1"]
    assert world.plan_once() == ["record"]
    world.now += SECOND
    assert world.plan_once() == []
    world.now += SECOND
    replaced = [step.split("/replaced")[0] for step in world.plan_once()]
    assert replaced == ["record", "delete 0"]
    world.kuberay()
    assert world.plan_once() == ["create 0/2"]


@pytest.mark.parametrize("part_s", [0.0, 0.001, 0.5, 0.999])
def test_a_wait_is_never_shorter_though_recorded_times_are_whole_seconds(
    make_running: MakeWorld, part_s: float
) -> None:
    world = make_running()
    world.now += timedelta(seconds=part_s)
    began = updating(world).now
    plan_until(world, "drain 0/1")
    assert 2 <= (world.now - began).total_seconds() < 3.2
    idle = world.now
    plan_until(world, "delete 0")
    assert 2 <= (world.now - idle).total_seconds() < 3.2


def test_a_drain_waits_for_requests_until_its_deadline(make_running: MakeWorld) -> None:
    world = told_to_drain(make_running(updateStrategy={"drainSeconds": 30}))
    requests(world, 1)
    world.now += 27 * SECOND
    assert world.plan_once() == []
    world.now += SECOND
    assert world.plan_once()[0] == "record"
    assert world.incarnations() == []


def test_no_request_must_be_left_for_two_seconds_on_end(make_running: MakeWorld) -> None:
    world = told_to_drain(make_running())
    assert world.plan_once() == ["record"]
    world.now += SECOND
    requests(world, 1)
    assert world.plan_once() == ["record"]
    world.now += SECOND
    assert world.plan_once() == []
    requests(world, 0)
    world.now += SECOND
    assert world.plan_once() == ["record"]
    world.now += SECOND
    assert world.plan_once() == []
    world.now += SECOND
    assert any(done.startswith("delete 0") for done in world.plan_once())


def test_a_drain_that_the_engine_did_not_hear_is_told_again(make_running: MakeWorld) -> None:
    world = told_to_drain(make_running())
    world.engines.clear()
    assert world.plan_once() == ["drain 0/1"]
    assert world.plan().refresh_engines == {world.pod_of("0/1")["metadata"]["uid"]}


def test_one_failed_look_does_not_end_a_drain(make_running: MakeWorld) -> None:
    """A head that drains is not ready, so only its engine can say that it still works."""
    world = told_to_drain(make_running())
    requests(world, 1)
    set_ready(world, "0/1", ready=False)
    world.engines.clear()
    assert world.plan_once() == ["drain 0/1"]
    assert world.incarnations() == ["0/1"]


# Whose turn it is


def flap_during_update(world: World) -> None:
    """Group 1 is being replaced when group 0's readiness fails for a moment."""
    updating(world)
    for _ in range(20):
        if "1/3" in world.incarnations():
            break
        world.now += SECOND
        world.plan_once()
        world.kuberay()
    assert world.incarnations() == ["0/1", "1/3"]
    set_ready(world, "0/1", ready=False)


def test_a_flap_during_an_update_is_no_reason_to_replace_both(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    flap_during_update(world)
    world.now += 60 * SECOND
    assert world.plan_once() == []
    set_ready(world, "0/1", ready=True)
    world.settle()
    assert world.incarnations() == ["0/4", "1/3"]


def test_a_group_that_stays_unready_is_replaced_at_once(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    flap_during_update(world)
    world.now += 61 * SECOND
    assert any(done.startswith("delete 0") for done in world.plan_once())


def test_of_unready_groups_only_one_is_replaced_at_a_time(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    for incarnation in ("0/1", "1/2", "2/3"):
        set_ready(world, incarnation, ready=False)
    world.change(engine={"image": "new"})
    deletes = [done for done in world.plan_once() if done.startswith("delete")]
    assert [done[:8] for done in deletes] == ["delete 2"]


def test_an_unready_group_goes_before_those_that_answer(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    set_ready(world, "0/1", ready=False)
    done = updating_steps(world)
    assert any(step.startswith("delete 0") for step in done)
    assert not any(step.startswith("traffic off") for step in done)


def updating_steps(world: World) -> list[str]:
    world.change(engine={"image": "new"})
    return world.plan_once()


# Room


def test_the_next_incarnation_waits_for_the_pods_of_the_one_before(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    world.fail_engine("0/1", "GroupFailed")
    assert world.plan_once() == ["record", "delete 0/GroupFailed"]
    for _ in range(2):
        assert world.plan_once() == []
        assert (world.plan().wake_after_s or 99) <= 5
        world.now += SECOND
    pods = world.all("Pod")
    for pod in pods[:-1]:
        world.remove("Pod", pod["metadata"]["name"])
    assert world.plan_once() == []
    world.remove("Pod", pods[-1]["metadata"]["name"])
    assert world.plan_once() == ["create 0/2"]


def test_pods_that_do_not_end_are_not_waited_for_for_ever(make_running: MakeWorld) -> None:
    """On a node that is gone they never do."""
    world = make_running()
    world.fail_engine("0/1", "GroupFailed")
    world.plan_once()
    world.now += 29 * SECOND
    assert world.plan_once() == []
    world.now += 2 * SECOND
    assert world.plan_once() == ["create 0/2"]


def test_pods_of_another_group_are_not_waited_for(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.fail_engine("1/2", "GroupFailed")
    world.plan_once()
    world.kuberay()
    assert world.plan_once() == ["create 1/3"]


def test_what_is_waited_for_is_told(make_running: MakeWorld) -> None:
    world = make_running()
    told_to_drain(world)
    world.plan_once()
    world.now += 2 * SECOND
    world.plan_once()
    found = {c.type: c for c in world.status().conditions}["RayClusterReady"]
    assert (found.status, found.reason) == ("False", "RayClusterNotCreated")
    assert "3 pods" in found.message
