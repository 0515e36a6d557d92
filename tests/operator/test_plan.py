"""Exact sequences of what plans do. `ordinal/epoch` names an incarnation of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from harness.plan_world import World

from tpinference_operator.api.reasons import Reason
from tpinference_operator.errors import InvalidQuantity
from tpinference_operator.observed import KubeRay
from tpinference_operator.plan import Defaults
from tpinference_operator.settings import OPTIONS

MakeWorld = Callable[..., World]


# Create


def test_everything_is_created_in_one_plan_decisions_first(make_world: MakeWorld) -> None:
    world = make_world()
    assert world.plan_once() == [
        "create ControllerRevision",
        "record",
        "create Service",
        "create 0/1",
    ]
    assert world.plan_once() == []


def test_replicas_are_created_together_each_with_an_epoch_of_its_own(
    make_world: MakeWorld,
) -> None:
    world = make_world(replicas=3)
    assert world.plan_once()[-3:] == ["create 0/1", "create 1/2", "create 2/3"]


def test_nothing_is_done_when_everything_is_up(make_running: MakeWorld) -> None:
    decided = make_running(replicas=2).plan()
    assert decided.actions == ()
    assert decided.wake_after_s is None
    assert decided.refresh_engines == decided.watch_events_of == frozenset()


def test_no_replicas_means_a_service_and_no_group(make_world: MakeWorld) -> None:
    world = make_world(replicas=0)
    assert world.plan_once() == ["create ControllerRevision", "create Service"]
    assert world.plan_once() == []


def test_nothing_is_done_for_an_object_that_is_being_deleted(make_running: MakeWorld) -> None:
    world = make_running()
    world.tpi["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.change(engine={"image": "new"})
    assert world.plan_once() == []


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (KubeRay.MISSING, Reason.KUBERAY_NOT_INSTALLED),
        (KubeRay.TOO_OLD, Reason.KUBERAY_TOO_OLD),
    ],
)
def test_without_kuberay_nothing_is_done_until_it_is_there(
    make_world: MakeWorld, served: KubeRay, reason: Reason
) -> None:
    world = make_world()
    world.served = served
    assert world.plan_once() == []
    assert [finding.reason for finding in world.plan().findings] == [reason]
    world.served = KubeRay.SERVED
    assert world.plan_once()[-1] == "create 0/1"


# A spec that can't be acted on


def test_without_any_image_no_revision_is_made_until_there_is_one(make_world: MakeWorld) -> None:
    world = make_world()
    with_image, world.defaults = world.defaults, Defaults(image="", ray_version="2.60.0")
    assert world.plan_once() == []
    assert world.all("ControllerRevision") == []
    condition = next(c for c in world.status().conditions if c.type == "Accepted")
    assert (condition.status, condition.reason) == ("False", Reason.INVALID_SPEC)
    assert "spec.engine.image" in condition.message
    flag = next(o.flag for o in OPTIONS if o.field == "default_engine_image")
    assert flag in condition.message
    world.defaults = with_image
    assert world.plan_once()[-1] == "create 0/1"


def test_a_group_serves_on_when_the_default_image_is_taken_away(make_running: MakeWorld) -> None:
    world = make_running()
    world.defaults = Defaults(image="", ray_version="2.60.0")
    assert world.plan_once() == []
    assert world.plan().findings == ()


def test_a_quantity_that_only_planning_refuses_is_told(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> int:
        raise InvalidQuantity(f"quantity is {text!r}, no")

    monkeypatch.setattr("tpinference_operator.render.raycluster.quantity_ceil", refuse)
    world = make_world()
    assert world.plan_once() == []
    assert [f.reason for f in world.plan().findings] == [Reason.INVALID_SPEC]


# Update


def test_groups_are_replaced_one_at_a_time_from_the_highest(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    world.change(engine={"image": "new"})
    order = [
        s
        for s in world.settle()
        if s.startswith(("traffic off", "create 0", "create 1", "create 2"))
    ]
    assert order == [
        *("traffic off 2/3", "create 2/4"),
        *("traffic off 1/2", "create 1/5"),
        *("traffic off 0/1", "create 0/6"),
    ]


def test_a_broken_revision_stops_at_the_first_group(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.change(engine={"image": "broken"})
    for _ in range(10):
        world.plan_once()
        world.kuberay()
        world.now += timedelta(seconds=3)
    assert world.incarnations() == ["0/1", "1/3"]


def test_a_fix_replaces_what_answers_nobody_at_once(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.change(engine={"image": "broken"})
    for _ in range(5):
        world.plan_once()
        world.kuberay()
        world.now += timedelta(seconds=3)
    world.change(engine={"image": "fixed"})
    assert world.plan_once()[:2] == ["create ControllerRevision", "record"]
    assert world.incarnations() == ["0/1"]
    world.kuberay()
    assert world.plan_once() == ["create 1/4"]


def test_going_back_to_an_old_spec_is_the_old_revision(make_running: MakeWorld) -> None:
    world = make_running()
    first = world.tpi["status"]["currentRevision"]
    world.change(engine={"image": "new"})
    world.settle()
    world.change(engine={"image": None})
    assert "create ControllerRevision" not in world.settle()
    assert world.tpi["status"]["currentRevision"] == first
    assert world.incarnations() == ["0/3"]


def test_another_default_image_replaces_nothing_and_new_groups_are_alike(
    make_running: MakeWorld,
) -> None:
    world = make_running()
    world.defaults = type(world.defaults)(image="example.test/engine:2", ray_version="2.61.0")
    assert world.plan_once() == []
    world.change(replicas=2)
    world.settle()
    images = {
        cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
        for cluster in world.all("RayCluster")
    }
    assert images == {"example.test/engine:1"}


def test_unused_revisions_beyond_three_are_deleted(make_running: MakeWorld) -> None:
    world = make_running()
    for image in "abcdefg":
        world.change(engine={"image": image})
        world.settle()
    assert [r["revision"] for r in world.all("ControllerRevision")] == [5, 6, 7, 8]


# Scale


def test_scale_up_fills_the_lowest_free_ordinals(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    world.remove("RayCluster", world.pod_of("1/2")["metadata"]["name"].removesuffix("-0"))
    world.change(replicas=2)
    world.settle()
    assert world.incarnations() == ["0/1", "2/3"]
    world.change(replicas=4)
    assert [s for s in world.settle() if s.startswith("create ")] == ["create 1/4", "create 3/5"]


def test_scale_down_takes_the_highest_of_ready_groups(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    world.change(replicas=1)
    world.settle()
    assert world.incarnations() == ["0/1"]


def test_scale_down_takes_unready_groups_first(make_running: MakeWorld) -> None:
    world = make_running(replicas=3)
    world.set_pod(world.pod_of("0/1")["metadata"]["name"], ready=False)
    world.change(replicas=2)
    world.settle()
    assert world.incarnations() == ["1/2", "2/3"]


def test_scale_up_in_the_middle_of_a_drain_gives_a_fresh_group(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.change(replicas=1)
    assert "traffic off 1/2" in world.plan_once()
    world.change(replicas=2)
    world.settle()
    assert world.incarnations() == ["0/1", "1/3"]


def test_an_epoch_is_never_given_twice(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    for replicas in (1, 2, 1, 2):
        world.change(replicas=replicas)
        world.settle()
    assert world.incarnations() == ["0/1", "1/4"]
