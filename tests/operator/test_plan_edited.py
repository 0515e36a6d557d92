"""A RayCluster edited by hand is made anew; what others rightly add or write differently is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
from harness.plan_world import Body, World

from tpinference_operator.api.reasons import Reason

MakeWorld = Callable[..., World]
Edit = Callable[[Body], object]


def head(spec: Body) -> Body:
    template: Body = spec["headGroupSpec"]["template"]["spec"]
    return template


def container(spec: Body) -> Body:
    first: Body = head(spec)["containers"][0]
    return first


def workers(spec: Body) -> Body:
    group: Body = spec["workerGroupSpecs"][0]
    return group


def env_of(spec: Body, name: str) -> Body:
    found: Body = next(e for e in container(spec)["env"] if e["name"] == name)
    return found


EDITS: dict[str, Edit] = {
    "image": lambda spec: container(spec).update(image="other"),
    "replicas": lambda spec: workers(spec).update(replicas=2),
    "hosts": lambda spec: workers(spec).update(numOfHosts=1),
    "an argument": lambda spec: container(spec)["command"].append("--trust-remote-code"),
    "arguments in another order": lambda spec: container(spec)["command"].reverse(),
    "a variable": lambda spec: env_of(spec, "HOME").update(value="/root"),
    "a variable taken away": lambda spec: container(spec)["env"].pop(),
    "a section taken away": lambda spec: spec.pop("authOptions"),
    "security": lambda spec: container(spec)["securityContext"].update(runAsNonRoot=False),
    "a start parameter": lambda spec: spec["headGroupSpec"]["rayStartParams"].update(
        {"num-cpus": "4"}
    ),
    "memory": lambda spec: container(spec)["resources"]["limits"].update(memory="2Gi"),
    "all workers": lambda spec: spec["workerGroupSpecs"].clear(),
}

ADDITIONS: dict[str, Edit] = {
    "nothing": lambda spec: None,
    "Kueue suspends": lambda spec: spec.update(suspend=True),
    "Kueue picks nodes": lambda spec: head(spec).update(nodeSelector={"zone": "a"}),
    "Kueue tolerates": lambda spec: head(spec)["tolerations"].insert(0, {"operator": "Exists"}),
    "a defaulted field": lambda spec: workers(spec).update(idleTimeoutSeconds=60),
    "an injected sidecar": lambda spec: head(spec)["containers"].append({"name": "proxy"}),
    "an injected variable": lambda spec: container(spec)["env"].insert(0, {"name": "A"}),
    "an injected volume": lambda spec: head(spec)["volumes"].insert(0, {"name": "token"}),
    "a quantity written as Go does": lambda spec: container(spec)["resources"]["limits"].update(
        memory="1Gi", cpu="500m"
    ),
    "what is empty left out": lambda spec: container(spec)["resources"].pop("requests"),
}


@pytest.fixture
def running(make_running: MakeWorld) -> World:
    return make_running(head={"resources": {"limits": {"memory": "1024Mi", "cpu": "0.5"}}})


def edit(world: World, change: Edit) -> None:
    cluster = world.all("RayCluster")[0]
    cluster["spec"] = copy.deepcopy(cluster["spec"])
    change(cluster["spec"])
    cluster["metadata"]["generation"] = 2


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_raycluster_is_made_anew(running: World, name: str) -> None:
    edit(running, EDITS[name])
    assert running.plan_once() == ["record", f"delete 0/{Reason.RAY_CLUSTER_EDITED}"]
    last = running.status().groups[0].last_failure
    assert last is not None and last.reason == Reason.RAY_CLUSTER_EDITED
    running.settle()
    assert running.incarnations() == ["0/2"]
    assert running.plan_once() == []


@pytest.mark.parametrize("name", ADDITIONS)
def test_what_others_add_is_left_alone(running: World, name: str) -> None:
    edit(running, ADDITIONS[name])
    assert running.plan_once() == []


def test_where_it_was_edited_is_told(running: World) -> None:
    edit(running, EDITS["hosts"])
    running.plan_once()
    last = running.status().groups[0].last_failure
    assert last is not None and "spec.workerGroupSpecs" in last.message


def test_an_older_revision_is_compared_with_its_own_rendering(make_running: MakeWorld) -> None:
    world = make_running(replicas=2)
    world.all("RayCluster")[0]["metadata"]["generation"] = 2
    world.change(engine={"image": "new"})
    assert all("RayClusterEdited" not in done for done in world.settle())


def test_one_that_is_edited_again_and_again_is_left_after_a_while(running: World) -> None:
    for epoch in range(1, 6):
        edit(running, EDITS["image"])
        running.settle()
        assert running.incarnations() == [f"0/{epoch + 1}"]
    edit(running, EDITS["image"])
    assert running.plan_once() == []
    running.now += timedelta(hours=1)
    assert running.plan_once()[0] == "record"
