"""Killed between any two writes, the operator converges when it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.plan_world import World

MakeWorld = Callable[..., World]
Change = Callable[[World], None]

CHANGES: dict[str, tuple[Change, int]] = {
    "create": (lambda world: None, 2),
    "change": (lambda world: world.change(engine={"image": "new"}), 2),
    "scale up": (lambda world: world.change(replicas=4), 4),
    "scale down": (lambda world: world.change(replicas=1), 1),
    "change and scale down": (lambda world: world.change(replicas=1, engine={"image": "new"}), 1),
    "change and scale up": (lambda world: world.change(replicas=3, engine={"image": "new"}), 3),
    "lost head": (lambda world: world.lose_head("0/1"), 2),
    "failed engine": (lambda world: world.fail_engine("1/2", "GroupFailed"), 2),
    "lost cluster": (lambda world: world.objects["RayCluster"].clear(), 2),
    "lost status": (lambda world: world.tpi.pop("status") and None, 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_killed_after_each_action_it_converges(
    make_world: MakeWorld, make_running: MakeWorld, name: str
) -> None:
    change, replicas = CHANGES[name]
    num_actions = 0
    while True:
        world = make_world(replicas=2) if name == "create" else make_running(replicas=2)
        change(world)
        killed = world.run_until_killed(num_actions)
        world.settle()
        assert_converged(world, replicas)
        if not killed:
            break
        num_actions += 1
    assert num_actions > 0


@pytest.mark.parametrize("name", CHANGES)
def test_a_lost_status_in_the_middle_converges_too(
    make_world: MakeWorld, make_running: MakeWorld, name: str
) -> None:
    change, replicas = CHANGES[name]
    for num_actions in range(12):
        world = make_world(replicas=2) if name == "create" else make_running(replicas=2)
        change(world)
        world.run_until_killed(num_actions)
        world.tpi.pop("status", None)
        world.settle()
        assert_converged(world, replicas)


def assert_converged(world: World, replicas: int) -> None:
    status = world.status()
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (ready.status, ready.message) == ("True", "")
    assert status.ready_replicas == status.replicas == status.updated_replicas == replicas
    assert len(world.all("RayCluster")) == replicas
    assert len({c.ordinal for c in world.observed().ray_clusters}) == replicas
    assert len(world.all("Pod")) == replicas * 3
    assert len(world.all("Service")) == 1
    assert world.plan().actions == ()
