"""Parsing raw objects: whose they are, what their containers say, and what can't be read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tpinference_operator import names
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.observe import observe, parse_engine, parse_time, parse_tpinference
from tpinference_operator.observed import Children, KubeRay, Observed, Ownership, SeenPod

Body = dict[str, Any]
MakeTpi = Callable[..., Body]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def look(owner: Body, **children: Any) -> Observed:
    return observe(owner, Children(**children), kuberay=KubeRay.SERVED, now=NOW)


def child(name: str = "llm", *, controller: str | None = "owner-uid", **labels: str) -> Body:
    references = [{"uid": controller, "controller": True}] if controller else []
    own = {**names.child_labels("llm"), **labels}
    return {
        "metadata": {"name": name, "uid": "u", "labels": own, "ownerReferences": references},
    }


def pod(status: Body, **metadata: Any) -> SeenPod:
    body = child("p", controller="cluster-uid")
    body["metadata"].update(metadata)
    owner: Body = {
        "metadata": {"name": "llm", "namespace": "ns", "uid": "owner-uid"},
        "spec": {"model": {"uri": "file:///m"}, "parallelism": {"tensor": 1}},
    }
    return look(owner, pods=({**body, "status": status},)).pods[0]


@pytest.mark.parametrize(
    ("controller", "labels", "ownership"),
    [
        ("owner-uid", {}, Ownership.OURS),
        (None, {}, Ownership.ORPHAN),
        ("other-uid", {}, Ownership.FOREIGN),
        (None, {names.NAME_LABEL: "other"}, Ownership.FOREIGN),
        (None, {names.MANAGED_BY_LABEL: "helm"}, Ownership.FOREIGN),
    ],
    ids=["ours", "orphan", "of another owner", "orphan of another name", "unlabelled"],
)
def test_ownership_is_by_controller_uid(
    make_tpi: MakeTpi, controller: str | None, labels: dict[str, str], ownership: Ownership
) -> None:
    body = child(controller=controller)
    body["metadata"]["labels"].update(labels)
    seen = look(make_tpi(), services=(body,)).service
    assert seen is not None and seen.meta.ownership is ownership


def test_children_of_a_deleted_namesake_are_its_predecessors(make_tpi: MakeTpi) -> None:
    body = child(controller="old-uid")
    body["metadata"]["ownerReferences"][0].update(kind=names.KIND, name="llm")
    seen = look(make_tpi(), services=(body,)).service
    assert seen is not None and seen.meta.ownership is Ownership.PREDECESSOR


def test_unreadable_spec_names_every_field(make_tpi: MakeTpi) -> None:
    raw = make_tpi(replicas=-1, engine={"device": "TPU"})
    with pytest.raises(InvalidSpec) as caught:
        parse_tpinference(raw)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "spec.replicas",
        "spec.engine.device",
    ]


def test_unreadable_status_counts_as_lost(make_tpi: MakeTpi) -> None:
    raw = {**make_tpi(), "status": {"groups": "none"}}
    assert parse_tpinference(raw).status == TPInferenceStatus()


def test_pod_that_is_being_deleted_is_neither_ready_nor_live() -> None:
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    dying = pod(ready, deletionTimestamp="2026-01-01T00:00:00Z")
    assert (pod(ready).ready, pod(ready).lost) == (True, False)
    assert (dying.ready, dying.lost) == (False, True)


def test_scheduler_words_are_kept() -> None:
    said = "0/3 nodes are available: 3 Insufficient memory."
    condition = {"type": "PodScheduled", "status": "False", "message": said}
    seen = pod({"phase": "Pending", "conditions": [condition]})
    assert (seen.scheduled, seen.unschedulable) == (False, said)


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}, True),
        ({"initContainerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}, True),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}]}, False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, False),
        ({"initContainerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}, False),
        ({"containerStatuses": [{"state": {"running": {}}}]}, False),
    ],
    ids=["pull", "failed init", "init runs", "creating", "init done", "runs"],
)
def test_only_containers_in_trouble_are_a_problem(statuses: Body, reason: bool) -> None:
    assert (pod({"phase": "Pending", **statuses}).problem is not None) is reason


def test_engine_status_with_nothing_in_it_is_read() -> None:
    seen = parse_engine({"state": "starting", "reason": None, "lastFailure": None, "ranks": None})
    assert (seen.state, seen.reason, seen.in_flight, seen.ranks) == ("starting", "", 0, ())


def test_in_flight_is_running_and_waiting() -> None:
    assert parse_engine({"requests": {"running": 2, "waiting": 3}}).in_flight == 5


def test_only_warnings_are_kept_newest_first(make_tpi: MakeTpi) -> None:
    def event(kind: str, message: str, time: str) -> Body:
        return {"type": kind, "message": message, "lastTimestamp": time, "metadata": {}}

    seen = look(
        make_tpi(),
        events=(
            event("Normal", "fine", "2026-01-01T00:00:03Z"),
            event("Warning", "old", "2026-01-01T00:00:01Z"),
            event("Warning", "new", "2026-01-01T00:00:02Z"),
        ),
    )
    assert [e.message for e in seen.events] == ["new", "old"]


@pytest.mark.parametrize("text", [None, "", "yesterday"])
def test_a_time_that_can_not_be_read_is_long_ago(text: str | None) -> None:
    assert parse_time(text) == datetime(1970, 1, 1, tzinfo=UTC)


def test_kubernetes_and_engine_times_are_read() -> None:
    assert parse_time("2026-01-01T00:00:00Z") == NOW
    assert parse_time("2026-01-01T01:00:00.250000+01:00").second == 0
