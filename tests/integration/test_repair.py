"""What somebody else does to the children is put right; what is not ours is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from embedded.wait import wait_for

pytestmark = pytest.mark.timeout(180)

NAME = "serving.tpinference.dev/name"
TRAFFIC = "serving.tpinference.dev/traffic"
MANAGED = {"app.kubernetes.io/managed-by": "tpinference-operator", NAME: "llm"}


@pytest.fixture
def ready(operator: Any, client: Any, make_tpi: Any) -> Callable[..., Any]:
    """Waits until `llm`, made if it is not there, is Ready; its one RayCluster."""

    def wait(**spec: Any) -> Any:
        if client.get("tpinferences", "llm") is None:
            client.create("tpinferences", make_tpi(**spec))
        client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
        return client.list("rayclusters")[0]

    return wait


def test_a_deleted_raycluster_comes_back_as_another_incarnation(
    ready: Callable[..., Any], client: Any, eventually: Any
) -> None:
    old = ready()
    client.delete("rayclusters", old["metadata"]["name"])
    eventually(
        "a new RayCluster",
        lambda: [c for c in client.list("rayclusters") if is_other(c, old)],
        timeout_s=90,
        describe=lambda: client.describe("llm"),
    )
    new = ready()
    labels = new["metadata"]["labels"]
    assert labels["serving.tpinference.dev/epoch"] == "2"
    assert new["metadata"]["name"] != old["metadata"]["name"]


@pytest.mark.parametrize("plural", ["services", "controllerrevisions"])
def test_a_deleted_child_is_made_again_and_nothing_restarts(
    ready: Callable[..., Any], client: Any, eventually: Any, plural: str
) -> None:
    cluster = ready()
    old = find_child(client, plural)
    client.delete(plural, old["metadata"]["name"])
    eventually(
        f"the {plural} to be there again",
        lambda: is_other(find_child(client, plural) or old, old),
        timeout_s=90,
        describe=lambda: client.describe("llm"),
    )
    assert ready()["metadata"]["uid"] == cluster["metadata"]["uid"]


def test_a_service_that_was_edited_is_put_right_and_foreign_labels_stay(
    ready: Callable[..., Any], client: Any, eventually: Any
) -> None:
    ready()
    wanted = client.get("services", "llm")
    edits = {
        "metadata": {"labels": {"team": "blue", NAME: "wrong"}},
        "spec": {
            "selector": {"role": None, TRAFFIC: "off"},
            "ports": [{"name": "extra", "port": 99, "targetPort": 99}],
        },
    }
    client.patch("services", "llm", edits)

    def is_right() -> bool:
        live = client.get("services", "llm")
        same = live["spec"]["selector"] == wanted["spec"]["selector"]
        ports = [port["port"] for port in live["spec"]["ports"]]
        labels = live["metadata"]["labels"]
        return bool(same and ports == [8000] and labels[NAME] == "llm" and labels["team"] == "blue")

    eventually("the Service to be right", is_right, timeout_s=90, describe=lambda: show(client))


def test_traffic_that_was_switched_off_by_hand_is_switched_on(
    ready: Callable[..., Any], client: Any, eventually: Any
) -> None:
    ready()
    head = find_head(client)
    client.patch("pods", head["metadata"]["name"], {"metadata": {"labels": {TRAFFIC: "off"}}})
    eventually(
        "traffic to be on",
        lambda: find_head(client)["metadata"]["labels"][TRAFFIC] == "on",
        timeout_s=90,
        describe=lambda: client.describe("llm"),
    )


def test_a_lost_head_is_a_new_group(
    ready: Callable[..., Any], client: Any, eventually: Any
) -> None:
    old = ready()
    client.delete("pods", find_head(client)["metadata"]["name"])
    eventually(
        "the group to be replaced",
        lambda: [c for c in client.list("rayclusters") if is_other(c, old)],
        timeout_s=90,
        describe=lambda: client.describe("llm"),
    )
    ready()
    (group,) = client.get("tpinferences", "llm")["status"]["groups"]
    assert (group["epoch"], group["restarts"]) == (2, 1)


@pytest.mark.parametrize("plural", ["services", "controllerrevisions"])
def test_a_foreign_object_with_our_name_is_never_touched(
    operator: Any, client: Any, make_tpi: Any, plural: str
) -> None:
    foreign = foreign_object(plural, client, make_tpi, operator)
    client.create("tpinferences", make_tpi(replicas=0 if plural == "services" else 1))
    client.wait_condition(
        "llm", "Accepted", "False", reason="NameConflict", describe=operator.log_tail
    )
    live = client.get(plural, foreign["metadata"]["name"])
    assert live["metadata"]["uid"] == foreign["metadata"]["uid"]
    assert live.get("spec", live.get("data")) == foreign.get("spec", foreign.get("data"))
    client.delete(plural, foreign["metadata"]["name"])
    client.patch("tpinferences", "llm", {"spec": {"replicas": 1}})
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_an_orphan_is_adopted_and_keeps_running(
    ready: Callable[..., Any], client: Any, operator: Any, make_tpi: Any, eventually: Any
) -> None:
    old = ready()
    client.delete("tpinferences", "llm", propagation="Orphan")
    eventually("it to go", lambda: client.get("tpinferences", "llm") is None, timeout_s=90)
    assert client.get("rayclusters", old["metadata"]["name"])
    client.create("tpinferences", make_tpi())
    adopted = ready()
    assert adopted["metadata"]["uid"] == old["metadata"]["uid"]
    owner = client.get("tpinferences", "llm")["metadata"]["uid"]
    for plural in ("rayclusters", "services", "controllerrevisions"):
        child = find_child(client, plural)
        assert [r["uid"] for r in child["metadata"]["ownerReferences"]] == [owner], plural


def test_delete_and_apply_at_once_gives_a_fresh_one(
    ready: Callable[..., Any], client: Any, make_tpi: Any, eventually: Any
) -> None:
    old = ready()
    client.delete("tpinferences", "llm")
    client.create("tpinferences", make_tpi())
    new = ready()
    eventually(
        "the old one to go",
        lambda: [c["metadata"]["uid"] for c in client.list("rayclusters")] != [],
        timeout_s=90,
    )
    owner = client.get("tpinferences", "llm")["metadata"]["uid"]
    assert [r["uid"] for r in new["metadata"]["ownerReferences"]] == [owner]
    assert new["metadata"]["uid"] != old["metadata"]["uid"]


@pytest.mark.parametrize("is_running", [True, False])
def test_delete_removes_everything_with_or_without_the_operator(
    ready: Callable[..., Any], client: Any, operator: Any, eventually: Any, is_running: bool
) -> None:
    ready(replicas=2)
    if not is_running:
        assert operator.stop() == 0
    client.delete("tpinferences", "llm")
    eventually(
        "everything to go",
        lambda: client.snapshot() == {},
        timeout_s=90,
        describe=lambda: client.describe("llm"),
    )


def test_a_namespace_that_is_deleted_goes(
    ready: Callable[..., Any], client: Any, operator: Any, eventually: Any
) -> None:
    ready()
    path = f"/api/v1/namespaces/{client.namespace}"
    client.request("DELETE", path)
    eventually("the namespace to go", lambda: client.is_gone(path), timeout_s=90)
    assert operator.is_running or operator.exit_code == 3


def foreign_object(plural: str, client: Any, make_tpi: Any, operator: Any) -> Any:
    """Somebody's object under the name that our child would have."""
    if plural == "services":
        port = {"port": 80, "targetPort": 80}
        return client.create(
            "services",
            {"metadata": {"name": "llm"}, "spec": {"ports": [port], "clusterIP": "None"}},
        )
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    (ours,) = client.list("controllerrevisions")
    client.delete("tpinferences", "llm")
    wait_all_gone(client)
    body = {"apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1, "data": {"a": 1}}
    return client.create(plural, body | {"metadata": {"name": ours["metadata"]["name"]}})


def wait_all_gone(client: Any) -> None:
    wait_for("all of it to go", lambda: client.snapshot() == {}, timeout_s=90)


def find_child(client: Any, plural: str) -> Any:
    """The child of `llm`, not KubeRay's Services."""
    found = [b for b in client.list(plural) if b["metadata"].get("labels", {}).get(NAME) == "llm"]
    return found[0] if found else None


def find_head(client: Any) -> Any:
    role = "serving.tpinference.dev/role"
    return next(p for p in client.list("pods") if p["metadata"]["labels"].get(role) == "head")


def is_other(body: Any, old: Any) -> bool:
    return bool(body["metadata"]["uid"] != old["metadata"]["uid"])


def show(client: Any) -> str:
    return str(client.get("services", "llm"))
