"""The charts as helm renders them, and the operator with exactly their Role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from embedded.command import run
from embedded.errors import CommandFailed
from embedded.tools import ensure_tools, tool_path
from embedded.wait import wait_for

pytestmark = pytest.mark.timeout(180)

CHARTS = Path(__file__).resolve().parents[2] / "charts"
RELEASE = "tpi"
ROLE = "serving.tpinference.dev/role"
TRAFFIC = "serving.tpinference.dev/traffic"

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def render() -> Render:
    """`helm template` with values as --set takes them; the objects, or CommandFailed."""
    ensure_tools(["helm"])

    def template(
        *values: str, chart: str = "tpinference-operator", namespace: str = "ns"
    ) -> list[dict[str, Any]]:
        settings = [f"--set={value}" for value in values]
        options = [f"--namespace={namespace}", "--kube-version=1.34.0", *settings]
        helm = tool_path("helm")
        text = run([helm, "template", RELEASE, CHARTS / chart, *options], timeout_s=60)
        return [document for document in yaml.safe_load_all(text) if document]

    return template


@pytest.fixture
def install_rbac(render: Render, control_plane: Any, client: Any) -> Iterator[Callable[[str], str]]:
    """Installs the chart's accounts and roles, and nothing else of it; a token of the account."""
    name = client.namespace

    def install(scope: str) -> str:
        values = (f"rbac.scope={scope}", f"fullnameOverride={name}")
        objects = render(*values, namespace=name)
        rbac = [o for o in objects if "rbac" in o["apiVersion"] or o["kind"] == "ServiceAccount"]
        control_plane.kubectl.apply(*rbac)
        return str(control_plane.create_token(name, name))

    yield install
    kinds = "clusterrole,clusterrolebinding"
    control_plane.kubectl("delete", kinds, name, "--ignore-not-found")


@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_the_operator_runs_with_exactly_the_charts_role(
    scope: str, install_rbac: Any, start_operator: Any, proxy: Any, client: Any, make_tpi: Any
) -> None:
    operator = start_operator(
        token=install_rbac(scope),
        namespaces=client.namespace if scope == "namespace" else "",
        lease_name=client.namespace,
    ).wait_acting()
    client.create("tpinferences", make_tpi(replicas=2))
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    client.delete("services", "llm")
    client.patch("tpinferences", "llm", {"spec": {"replicas": 1, "engine": {"maxNumSeqs": 7}}})
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    (head,) = [p for p in client.list("pods") if p["metadata"]["labels"].get(ROLE) == "head"]
    off = {"metadata": {"labels": {TRAFFIC: "off"}}}
    client.patch("pods", head["metadata"]["name"], off)
    wait_for("traffic on", lambda: traffic(client, head) == "on", timeout_s=60)
    refused = [str(seen) for seen in proxy.since(0) if seen.status in (401, 403)]
    assert [r for r in refused if not is_of_another_namespace(r, client.namespace)] == []


def is_of_another_namespace(request: str, own: str) -> bool:
    """Namespaces of other tests are being terminated meanwhile, which is refused with 403 too."""
    return "/namespaces/" in request and f"/namespaces/{own}/" not in request


def traffic(client: Any, pod: Any) -> str:
    return str(client.get("pods", pod["metadata"]["name"])["metadata"]["labels"][TRAFFIC])


def test_the_chart_is_accepted_by_a_real_api_server_that_enforces_restricted(
    render: Render, control_plane: Any, client: Any
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    client.request(
        "PATCH",
        f"/api/v1/namespaces/{client.namespace}",
        {"metadata": {"labels": labels}},
        "application/merge-patch+json",
    )
    name = f"fullnameOverride={client.namespace}"
    more = ("podDisruptionBudget.enabled=true", "replicas=2", "rbac.scope=namespace")
    objects = render(name, *more, namespace=client.namespace)
    assert {o["kind"] for o in objects} >= {"Deployment", "PodDisruptionBudget", "Service", "Role"}
    control_plane.kubectl.apply(*objects)
    (deployment,) = [o for o in objects if o["kind"] == "Deployment"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "op", "namespace": client.namespace},
        "spec": deployment["spec"]["template"]["spec"],
    }
    made = client.request("POST", client.path("pods") + "?dryRun=All", pod)
    (container,) = made["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_both_scopes_grant_the_same_rules(render: Render) -> None:
    def rules(kind: str, *values: str) -> Any:
        return [o["rules"] for o in render(*values) if o["kind"] == kind]

    (cluster,) = rules("ClusterRole")
    many = ("rbac.scope=namespace", "watchNamespaces={a,b}")
    first, second, lease = rules("Role", *many)
    assert cluster == first == second
    assert rules("Role") == [lease]
    assert rules("ClusterRole", *many) == []


def test_watched_namespaces_reach_the_operator(render: Render) -> None:
    def watched(*values: str) -> str:
        (deployment,) = [o for o in render(*values) if o["kind"] == "Deployment"]
        env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        return str({e["name"]: e["value"] for e in env}["TPINFERENCE_OPERATOR_NAMESPACES"])

    assert watched() == ""
    assert watched("rbac.scope=namespace") == "ns"
    assert watched("rbac.scope=namespace", "watchNamespaces={a,b}") == "a,b"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("watchNamespaces={a}", "rbac.scope=namespace"),
        ("rbac.scope=both", "rbac"),
        ("image.repositry=x", "repositry"),
        ("replica=2", "replica"),
        ("serviceAccount.create=false", "serviceAccount.name"),
    ],
)
def test_values_that_contradict_or_are_misspelt_stop_helm(
    render: Render, value: str, message: str
) -> None:
    with pytest.raises(CommandFailed, match=message):
        render(value)


def test_pull_secrets_and_globals_of_a_parent_chart(render: Render) -> None:
    objects = render("imagePullSecrets[0].name=s", "global.anything=1", "nameOverride=n")
    (deployment,) = [o for o in objects if o["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "s"}]


def test_the_crd_is_kept_when_its_chart_goes(render: Render) -> None:
    (crd,) = render(chart="tpinference-crds")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    checked_in = yaml.safe_load((CHARTS.parent / "crds" / "tpinferences.yaml").read_text())
    assert crd["spec"] == checked_in["spec"]
