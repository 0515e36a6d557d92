"""What can't work is said in a condition, in the cluster's own words, soon."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from embedded.wait import wait_for

pytestmark = pytest.mark.timeout(180)

SOON_S = 60.0
"""Ten seconds on a machine that has nothing else to do."""


@pytest.fixture
def apply_bad(operator: Any, client: Any, make_tpi: Any) -> Any:
    """Applies a TPInference and waits until a condition says what is wrong with it."""

    def apply(condition: str, reason: str, **spec: Any) -> str:
        client.create("tpinferences", make_tpi(**spec))
        seen = client.wait_condition(
            "llm", condition, "False", reason=reason, timeout_s=SOON_S, describe=operator.log_tail
        )
        client.wait_condition("llm", "Ready", "False", describe=operator.log_tail)
        return str(seen["message"])

    return apply


def test_a_memory_request_that_no_node_can_hold(apply_bad: Any) -> None:
    workers = {"resources": {"requests": {"memory": "900Ti"}, "limits": {"memory": "900Ti"}}}
    message = apply_bad("Scheduled", "Unschedulable", workers=workers)
    assert "Insufficient memory" in message


def test_a_claim_that_does_not_exist(apply_bad: Any) -> None:
    message = apply_bad("Scheduled", "VolumeNotReady", model={"uri": "pvc://no-such-claim/a"})
    assert "no-such-claim" in message


def test_a_quota_that_refuses_pods_and_that_is_raised(
    apply_bad: Any, client: Any, operator: Any
) -> None:
    quotas = f"/api/v1/namespaces/{client.namespace}/resourcequotas"
    hard = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    client.request("POST", quotas, hard)
    message = apply_bad("Scheduled", "QuotaExceeded")
    assert "exceeded quota: q" in message
    client.request("DELETE", f"{quotas}/q")
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


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
    operator: Any, client: Any, make_tpi: Any, silent_node: dict[str, str]
) -> None:
    there = {"nodeSelector": silent_node}
    client.create("tpinferences", make_tpi(head=there, workers=there))
    wait_for("three pods", lambda: len(client.list("pods")) == 3, timeout_s=90)
    said = "Back-off pulling image: name unknown"
    state = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
    container = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Pending", "containerStatuses": [container | {"state": state}]}
    for pod in client.list("pods"):
        client.patch("pods", pod["metadata"]["name"], {"status": status}, "status")
    seen = client.wait_condition(
        "llm",
        "RayClusterReady",
        "False",
        reason="ImagePullFailed",
        timeout_s=SOON_S,
        describe=operator.log_tail,
    )
    assert said in seen["message"]


def test_an_engine_that_failed_is_quoted_and_its_pods_are_left(
    operator: Any, client: Any, make_tpi: Any, engines: Any
) -> None:
    said = "spec.model.uri: no config.json in /models/tiny"
    failure = {"reason": "InvalidModel", "message": said, "time": "2026-01-01T00:00:00Z"}
    failed = {"state": "failed", "reason": "InvalidModel", "message": said, "lastFailure": failure}
    status: dict[str, Any] = engines.answer("") | failed

    def answer(_: str) -> dict[str, Any]:
        return status

    engines.answer = answer
    client.create("tpinferences", make_tpi())
    wait_for("three pods", lambda: len(client.list("pods")) == 3, timeout_s=90)
    for pod in client.list("pods"):
        wait_for("it to run", partial(make_unready, client, pod), timeout_s=90)
    seen = client.wait_condition(
        "llm",
        "EngineReady",
        "False",
        reason="InvalidModel",
        timeout_s=SOON_S,
        describe=operator.log_tail,
    )
    assert said in seen["message"]
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
