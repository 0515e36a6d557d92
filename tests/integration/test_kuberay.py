"""KubeRay comes, goes, is too old, or looks elsewhere: each is said, and none needs a restart.

These tests take KubeRay's CRDs away, so they put back what the other tests stand on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from embedded import kuberay

pytestmark = pytest.mark.timeout(420)

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/rayclusters.ray.io"
OWN_CRD = f"{CRDS}/tpinferences.serving.tpinference.dev"


@pytest.fixture
def restored_kuberay(control_plane: Any) -> Iterator[Any]:
    """The control plane; afterwards KubeRay is as it was."""
    yield control_plane
    control_plane.stop_kuberay()
    control_plane.start_kuberay()


@pytest.fixture
def measure_told(client: Any, measure_lag: Any) -> Any:
    """Waits for a condition that is False for a reason, from now on or from when `sign` is true."""

    def measure(
        condition: str, reason: str, operator: Any, sign: Callable[[], object] = lambda: True
    ) -> None:
        measure_lag(
            f"{condition}, {reason}",
            sign=sign,
            told=lambda: client.find_condition("llm", condition, "False", reason),
            timeout_s=90,
            describe=lambda: f"{client.describe('llm')}\n{operator.log_tail()}",
        )

    return measure


def test_kuberays_crds_appear_vanish_and_reappear(
    restored_kuberay: Any, request: Any, client: Any, make_tpi: Any, measure_told: Any
) -> None:
    cluster = restored_kuberay
    cluster.stop_kuberay()
    kuberay.remove_crds(cluster.kubectl)
    operator = request.getfixturevalue("operator_at_own_pace")
    client.create("tpinferences", make_tpi())
    measure_told("Accepted", "KubeRayNotInstalled", operator)
    cluster.start_kuberay()
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)

    cluster.stop_kuberay()
    kuberay.remove_crds(cluster.kubectl)
    measure_told("Accepted", "KubeRayNotInstalled", operator)
    cluster.start_kuberay()
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    assert operator.is_running


def test_a_kuberay_that_is_too_old_is_named_until_it_is_upgraded(
    restored_kuberay: Any, request: Any, client: Any, make_tpi: Any, measure_told: Any
) -> None:
    crd = client.request("GET", CRD)
    versions = [version["name"] for version in crd["spec"]["versions"]]
    path = (
        f"/spec/versions/{versions.index('v1')}/schema/openAPIV3Schema/properties/spec"
        "/properties/authOptions"
    )
    remove = [{"op": "remove", "path": path}]
    client.request("PATCH", CRD, remove, "application/json-patch+json")
    operator = request.getfixturevalue("operator_at_own_pace")
    client.create("tpinferences", make_tpi())
    measure_told("Accepted", "KubeRayTooOld", operator)
    assert client.list("rayclusters") == []
    kuberay.install_crds(restored_kuberay.kubectl)
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_a_kuberay_that_watches_another_namespace_is_noticed(
    restored_kuberay: Any, request: Any, client: Any, make_tpi: Any, measure_told: Any
) -> None:
    restored_kuberay.stop_kuberay()
    restored_kuberay.start_kuberay("--watch-namespace=default")
    operator = request.getfixturevalue("operator_at_own_pace")
    client.create("tpinferences", make_tpi())
    made = partial(client.list, "rayclusters")
    measure_told("Scheduled", "WaitingForKubeRay", operator, made)
    assert client.condition("llm", "Ready")["reason"] == "WaitingForKubeRay"
    assert client.condition("llm", "Degraded")["status"] == "False"
    client.wait_condition(
        "llm",
        "RayClusterReady",
        "False",
        reason="RayClusterNotObserved",
        describe=operator.log_tail,
    )
    restored_kuberay.stop_kuberay()
    restored_kuberay.start_kuberay()
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_an_operator_that_comes_before_our_crd_waits_and_says_so(
    control_plane: Any, start_operator: Any, client: Any, make_tpi: Any, eventually: Any
) -> None:
    body = client.request("GET", OWN_CRD)
    client.request("DELETE", OWN_CRD)
    eventually("the CRD to go", lambda: client.is_gone(OWN_CRD), timeout_s=60)
    operator = start_operator()
    eventually(
        "the CRD to be named",
        lambda: "tpinferences.serving.tpinference.dev" in operator.get("/readyz")[1],
        timeout_s=60,
        describe=operator.log_tail,
    )
    fresh = {"apiVersion": body["apiVersion"], "kind": body["kind"], "spec": body["spec"]}
    fresh["metadata"] = {"name": body["metadata"]["name"]}
    client.request("POST", CRDS, fresh)
    control_plane.kubectl.wait_for_crds(["tpinferences.serving.tpinference.dev"])
    operator.wait_acting()
    eventually("a TPInference to be taken", lambda: try_create(client, make_tpi()), timeout_s=30)
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def try_create(client: Any, body: Any) -> bool:
    """Discovery and storage of a new CRD are not there in the same moment."""
    try:
        client.create("tpinferences", body)
    except Exception as error:
        if getattr(error, "code", 0) != 404:
            raise
        return False
    return True
