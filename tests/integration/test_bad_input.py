"""What can't work is said in a condition, in the cluster's own words, soon after the cluster or the
engine said it. The operator looks as often as one that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from embedded.wait import wait_for

pytestmark = pytest.mark.timeout(180)

CLUSTER_TIMEOUT_S = 90.0
"""For what the cluster takes to find out, on a busy machine."""

WaitTold = Callable[[str, str, Callable[[], object]], str]


@pytest.fixture
def operator(operator_at_own_pace: Any) -> Any:
    return operator_at_own_pace


@pytest.fixture
def wait_told(operator: Any, client: Any, measure_lag: Any) -> WaitTold:
    """The message of a condition, once it is False with that reason. `sign` is true from when the
    cluster or the engine has said so."""

    def wait(condition: str, reason: str, sign: Callable[[], object]) -> str:
        def told() -> Any:
            unready = client.find_condition("llm", "Ready", "False")
            return unready and client.find_condition("llm", condition, "False", reason)

        seen = measure_lag(
            f"{condition}, {reason}",
            sign=sign,
            told=told,
            timeout_s=CLUSTER_TIMEOUT_S,
            describe=lambda: f"{client.describe('llm')}\n{operator.log_tail()}",
        )
        return str(seen["message"])

    return wait


def is_said(client: Any, plural: str, condition: str, words: str) -> bool:
    """Whether a condition of one of those objects says so."""
    return any(
        seen["type"] == condition and words in seen.get("message", "")
        for body in client.list(plural)
        for seen in body.get("status", {}).get("conditions", [])
    )


def test_a_memory_request_that_no_node_can_hold(
    wait_told: WaitTold, client: Any, make_tpi: Any
) -> None:
    workers = {"resources": {"requests": {"memory": "900Ti"}, "limits": {"memory": "900Ti"}}}
    client.create("tpinferences", make_tpi(workers=workers))
    words = "Insufficient memory"
    sign = partial(is_said, client, "pods", "PodScheduled", words)
    assert words in wait_told("Scheduled", "Unschedulable", sign)


def test_a_claim_that_does_not_exist(wait_told: WaitTold, client: Any, make_tpi: Any) -> None:
    words = "no-such-claim"
    client.create("tpinferences", make_tpi(model={"uri": f"pvc://{words}/a"}))
    sign = partial(is_said, client, "pods", "PodScheduled", words)
    assert words in wait_told("Scheduled", "VolumeNotReady", sign)


def test_a_quota_that_refuses_pods_and_that_is_raised(
    wait_told: WaitTold, client: Any, make_tpi: Any, operator: Any
) -> None:
    quotas = f"/api/v1/namespaces/{client.namespace}/resourcequotas"
    hard = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    client.request("POST", quotas, hard)
    client.create("tpinferences", make_tpi())
    words = "exceeded quota: q"

    def kuberay_said() -> bool:
        """Its RayCluster is gone by the time that the condition says so."""
        return any(words in event.get("message", "") for event in client.list("events"))

    assert words in wait_told("Scheduled", "QuotaExceeded", kuberay_said)
    client.request("DELETE", f"{quotas}/q")
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_a_mount_that_fails_is_told_from_its_event(
    wait_told: WaitTold, client: Any, make_tpi: Any, silent_node: dict[str, str]
) -> None:
    """Nothing but an Event says so, and no watch brings those."""
    head = start_on(silent_node, client, make_tpi)
    said = "MountVolume.SetUp failed for volume model: no such device"
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    involved = {"kind": "Pod", "namespace": client.namespace, **pick(head, "name", "uid")}
    event = {
        "metadata": {"name": "mount"},
        "involvedObject": involved,
        "reason": "FailedMount",
        "message": said,
        "type": "Warning",
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
    client.create("events", event)
    assert said in wait_told("RayClusterReady", "VolumeNotReady", lambda: True)


def pick(body: Any, *fields: str) -> dict[str, Any]:
    return {field: body["metadata"][field] for field in fields}


def start_on(node: dict[str, str], client: Any, make_tpi: Any) -> Any:
    """The head pod of a TPInference, once all its pods exist and have that node."""
    there = {"nodeSelector": node}
    client.create("tpinferences", make_tpi(head=there, workers=there))

    def scheduled() -> Any:
        pods = [p for p in client.list("pods") if p["spec"].get("nodeName")]
        return pods if len(pods) == 3 else None

    pods = wait_for("three pods with a node", scheduled, timeout_s=90)
    role = "serving.tpinference.dev/role"
    return next(pod for pod in pods if pod["metadata"]["labels"][role] == "head")


def test_a_namespace_that_enforces_restricted_simply_works(
    operator: Any, client: Any, make_tpi: Any
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{client.namespace}"
    patch = {"metadata": {"labels": labels}}
    client.request("PATCH", path, patch, "application/merge-patch+json")
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


@pytest.fixture
def silent_node(client: Any) -> Iterator[dict[str, str]]:
    """A node that nobody plays: its pods start only as far as the test says. Its selector."""
    name = f"silent-{client.namespace}"
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "100"}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
    node = {
        "metadata": {"name": name, "labels": {"silent": name}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }
    client.request("POST", "/api/v1/nodes", node)
    yield {"silent": name}
    client.request("DELETE", f"/api/v1/nodes/{name}")


def test_an_image_that_can_not_be_pulled(
    wait_told: WaitTold, client: Any, make_tpi: Any, silent_node: dict[str, str]
) -> None:
    start_on(silent_node, client, make_tpi)
    said = "Back-off pulling image: name unknown"
    state = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
    container = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Pending", "containerStatuses": [container | {"state": state}]}
    for pod in client.list("pods"):
        client.patch("pods", pod["metadata"]["name"], {"status": status}, "status")
    assert said in wait_told("RayClusterReady", "ImagePullFailed", lambda: True)


def test_an_engine_that_failed_is_quoted_and_its_pods_are_left(
    operator: Any, wait_told: WaitTold, client: Any, make_tpi: Any, engines: Any
) -> None:
    said = "spec.model.uri: no config.json in /models/tiny"
    failure = {"reason": "InvalidModel", "message": said, "time": "2026-01-01T00:00:00Z"}
    failed = {"state": "failed", "reason": "InvalidModel", "message": said, "lastFailure": failure}
    starting: dict[str, Any] = engines.answer("") | {"state": "starting"}
    engines.answer = lambda _: starting
    client.create("tpinferences", make_tpi())
    wait_for("three pods", lambda: len(client.list("pods")) == 3, timeout_s=90)
    for pod in client.list("pods"):
        wait_for("it to run", partial(make_unready, client, pod), timeout_s=90)
    client.wait_condition("llm", "EngineReady", "False", describe=operator.log_tail)
    engines.answer = lambda _: starting | failed
    assert said in wait_told("EngineReady", "InvalidModel", lambda: True)
    assert len(client.list("pods")) == 3


def make_unready(client: Any, pod: Any) -> bool:
    """A pod that runs and whose readiness probe fails, as a kubelet would say it."""
    live = client.get("pods", pod["metadata"]["name"])
    conditions = live["status"].get("conditions", [])
    if live["status"].get("phase") != "Running":
        return False
    for condition in conditions:
        if condition["type"] in ("Ready", "ContainersReady"):
            condition["status"] = "False"
    client.patch("pods", live["metadata"]["name"], {"status": {"conditions": conditions}}, "status")
    return True
