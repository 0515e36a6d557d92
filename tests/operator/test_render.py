"""Manifests of children: what KubeRay, PodSecurity and the engine need of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from harness.plan_world import DEFAULTS, OWNER

from tpinference_operator import names
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.model_uri import parse_model_uri
from tpinference_operator.render.raycluster import (
    Owner,
    Stamp,
    group_name,
    render_raycluster,
    stamp_raycluster,
)
from tpinference_operator.render.service import (
    has_foreign_ports,
    render_service,
    service_differs,
)

Body = dict[str, Any]
MakeSpec = Callable[..., TPInferenceSpec]
Render = Callable[..., Body]


@pytest.fixture
def render(make_spec: MakeSpec) -> Render:
    """The spec of a rendered RayCluster."""

    def rendered(**spec: Any) -> Body:
        body: Body = render_raycluster(make_spec(**spec), "llm", DEFAULTS)["spec"]
        return body

    return rendered


def templates(spec: Body) -> list[Body]:
    return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]


def containers(spec: Body) -> list[Body]:
    return [template["spec"]["containers"][0] for template in templates(spec)]


def environment(container: Body) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


def test_one_replica_group_holds_all_worker_pods(render: Render) -> None:
    group = render(parallelism={"tensor": 16, "gpusPerNode": 8})["workerGroupSpecs"][0]
    sizes = {key: group[key] for key in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")}
    assert sizes == {"replicas": 1, "minReplicas": 1, "maxReplicas": 1, "numOfHosts": 2}


def test_ray_demands_a_token_and_the_head_takes_no_work(render: Render) -> None:
    spec = render()
    params = spec["headGroupSpec"]["rayStartParams"]
    assert spec["authOptions"] == {"mode": "token"}
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


def test_workers_find_a_head_that_is_not_ready(render: Render) -> None:
    service = render()["headGroupSpec"]["headService"]["spec"]
    assert service == {"clusterIP": "None", "publishNotReadyAddresses": True}


def test_fields_that_would_fight_with_us_are_unset(render: Render) -> None:
    forbidden = {
        "enableInTreeAutoscaling",
        "upgradeStrategy",
        "gcsFaultToleranceOptions",
        "suspend",
    }
    assert forbidden & render().keys() == set()


@pytest.mark.parametrize(
    ("spec", "cpus", "gpus"),
    [
        ({"engine": {"device": "CPU"}}, "1", "0"),
        ({"engine": {"device": "CPU"}, "parallelism": {"tensor": 4, "gpusPerNode": 4}}, "4", "0"),
        ({"engine": {"device": "CUDA"}, "parallelism": {"tensor": 8, "gpusPerNode": 8}}, "8", "8"),
        ({"engine": {"device": "CUDA"}, "workers": {"resources": {"limits": {"cpu": "2500m"}}}},
         "3", "1"),
        ({"engine": {"device": "CUDA"}, "workers": {"resources": {"requests": {"cpu": 12}}}},
         "12", "1"),
    ],
    ids=["cpu", "four ranks a pod", "eight gpus", "limit rounds up", "request counts"],
)  # fmt: skip
def test_ray_sees_one_slot_a_rank_in_whole_cpus(
    render: Render, spec: Body, cpus: str, gpus: str
) -> None:
    params = render(**spec)["workerGroupSpecs"][0]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == (cpus, gpus)


def test_all_start_params_are_text(render: Render) -> None:
    spec = render()
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    assert all(isinstance(v, str) for g in groups for v in g["rayStartParams"].values())


def test_object_store_and_ranks_share_dev_shm(render: Render) -> None:
    spec = render(workers={"shmSize": "512Mi"})
    stores = {
        g["rayStartParams"]["object-store-memory"]
        for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    }
    assert stores == {str(256 * 2**20)}
    for template in templates(spec):
        shm = next(v for v in template["spec"]["volumes"] if v["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}


def test_gpus_are_added_to_the_workers_alone(render: Render) -> None:
    head, worker = containers(
        render(
            engine={"device": "CUDA"},
            parallelism={"tensor": 4, "gpusPerNode": 4},
            workers={"gpuResourceName": "amd.com/gpu", "resources": {"limits": {"cpu": 8}}},
        )
    )
    assert worker["resources"]["limits"] == {"cpu": "8", "amd.com/gpu": "4"}
    assert worker["resources"]["requests"] == {"amd.com/gpu": "4"}
    assert head["resources"] == {"requests": {}, "limits": {}}


def test_no_gpu_is_asked_for_on_device_cpu(render: Render) -> None:
    assert "nvidia.com/gpu" not in str(render(engine={"device": "CPU"}))


def test_pods_pass_pod_security_restricted(render: Render) -> None:
    for template in templates(render()):
        pod, container = template["spec"], template["spec"]["containers"][0]
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False
        assert all({"emptyDir", "persistentVolumeClaim"} & v.keys() for v in pod["volumes"])


def test_pods_never_restart_in_place_and_have_time_to_drain(render: Render) -> None:
    for template in templates(render(updateStrategy={"drainSeconds": 100})):
        assert template["spec"]["restartPolicy"] == "Never"
        assert template["spec"]["terminationGracePeriodSeconds"] == 130


def test_a_lost_node_is_tolerated_briefly_unless_the_spec_says_else(render: Render) -> None:
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    head, worker = templates(render(head={"tolerations": [{**own, "effect": "NoExecute"}]}))
    assert [t["tolerationSeconds"] for t in head["spec"]["tolerations"]] == [5, 30]
    assert [t["tolerationSeconds"] for t in worker["spec"]["tolerations"]] == [30, 30]


def test_probes_are_ours_on_the_admin_port_with_time_to_answer(render: Render) -> None:
    for container in containers(render()):
        for kind, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
            probe = container[kind]
            assert probe["httpGet"] == {"path": path, "port": names.ADMIN_PORT}
            assert probe["timeoutSeconds"] > 1


def test_the_admin_port_is_in_no_service(render: Render) -> None:
    assert all("ports" not in container for container in containers(render()))


def test_nothing_names_the_cluster_domain(render: Render) -> None:
    assert "cluster.local" not in str(render())


def test_a_claim_is_mounted_read_only_into_both_pods(render: Render) -> None:
    for template in templates(render(model={"uri": "pvc://models/a/b"})):
        volume = template["spec"]["volumes"][-1]
        mount = template["spec"]["containers"][0]["volumeMounts"][-1]
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert (mount["mountPath"], mount["readOnly"]) == ("/models/models", True)


def test_a_model_in_the_image_mounts_nothing(render: Render) -> None:
    assert "persistentVolumeClaim" not in str(render(model={"uri": "file:///opt/m"}))


@pytest.mark.parametrize(
    ("uri", "directory", "claim"),
    [
        ("pvc://c/a/b", "/models/c/a/b", "c"),
        ("pvc://c", "/models/c", "c"),
        ("pvc://c/a/", "/models/c/a", "c"),
        ("file:///opt/m", "/opt/m", None),
    ],
)
def test_model_uri_gives_a_directory(uri: str, directory: str, claim: str | None) -> None:
    source = parse_model_uri(uri)
    assert (source.directory, source.claim) == (directory, claim)


@pytest.mark.parametrize("uri", ["hf://a/b", "pvc://", "file://host/m", "/opt/m"])
def test_other_uris_are_refused_by_name(uri: str) -> None:
    with pytest.raises(InvalidSpec, match="spec.model.uri is "):
        parse_model_uri(uri)


def test_env_of_the_spec_comes_last_in_both_pods(render: Render) -> None:
    for container in containers(render(engine={"env": [{"name": "NCCL_DEBUG", "value": "WARN"}]})):
        assert container["env"][-1] == {"name": "NCCL_DEBUG", "value": "WARN"}


def test_limits_of_the_graph_reach_ray_as_whole_numbers(render: Render) -> None:
    graph = {"submitTimeoutSeconds": 5, "getTimeoutSeconds": 6, "bufferSize": "2Mi"}
    for container in containers(render(engine={"compiledGraph": graph})):
        env = environment(container)
        assert env["RAY_CGRAPH_submit_timeout"] == "5"
        assert env["RAY_CGRAPH_get_timeout"] == "6"
        assert env["RAY_CGRAPH_teardown_timeout"] == "30"
        assert env["RAY_CGRAPH_buffer_size_bytes"] == "2097152"


def test_rendering_is_free_of_ordinal_and_epoch(render: Render) -> None:
    text = str(render())
    assert names.EPOCH_LABEL not in text and names.ORDINAL_LABEL not in text
    assert names.EPOCH_ENV not in text and names.ENGINE_ID_ENV not in text


def test_stamping_marks_every_pod_and_leaves_the_rendering_alone(make_spec: MakeSpec) -> None:
    rendered = render_raycluster(make_spec(), "llm", DEFAULTS)
    before = copy.deepcopy(rendered)
    stamped = stamp_raycluster(rendered, OWNER, Stamp(ordinal=3, revision="abc", epoch=7))
    assert rendered == before
    assert stamped["metadata"]["ownerReferences"][0]["uid"] == "owner-uid"
    for template, container in zip(
        templates(stamped["spec"]), containers(stamped["spec"]), strict=True
    ):
        labels = template["metadata"]["labels"]
        assert labels[names.ORDINAL_LABEL] == "3" and labels[names.EPOCH_LABEL] == "7"
        assert labels[names.REVISION_LABEL] == "abc" and labels[names.TRAFFIC_LABEL] == "on"
        env = environment(container)
        assert env[names.ENGINE_ID_ENV] == stamped["metadata"]["name"]
        assert env[names.EPOCH_ENV] == "7"


def test_names_of_incarnations_differ_by_owner_revision_and_epoch() -> None:
    base = Stamp(ordinal=0, revision="abc", epoch=1)
    other_owner = Owner(name="llm", namespace="ns", uid="another-uid")
    found = {
        group_name(OWNER, base),
        group_name(OWNER, Stamp(ordinal=0, revision="abc", epoch=2)),
        group_name(OWNER, Stamp(ordinal=0, revision="abd", epoch=1)),
        group_name(other_owner, base),
    }
    assert len(found) == 4


def test_longest_name_still_fits_kuberay() -> None:
    owner = Owner(name="a" * names.MAX_NAME_LENGTH, namespace="ns", uid="u")
    assert len(group_name(owner, Stamp(ordinal=63, revision="abc", epoch=10**9))) <= 53


@pytest.fixture
def service(make_spec: MakeSpec) -> Body:
    return render_service(make_spec(service={"port": 80}), OWNER)


@pytest.fixture
def live(service: Body) -> Body:
    """As the API server answers: with what it and others add."""
    body = copy.deepcopy(service)
    body["metadata"]["labels"]["team"] = "a"
    body["spec"].update(clusterIP="10.0.0.7", sessionAffinity="None", ipFamilies=["IPv4"])
    body["spec"]["ports"][0]["nodePort"] = 30000
    return body


def test_service_selects_heads_with_traffic(service: Body) -> None:
    assert service["spec"]["selector"] == {
        names.NAME_LABEL: "llm",
        names.ROLE_LABEL: "head",
        names.TRAFFIC_LABEL: "on",
    }
    assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(80, 8000)]


def test_what_the_api_server_adds_is_no_difference(service: Body, live: Body) -> None:
    assert not service_differs(live, service)


@pytest.mark.parametrize(
    "edit",
    [
        lambda live: live["spec"].update(type="NodePort"),
        lambda live: live["spec"]["selector"].pop(names.TRAFFIC_LABEL),
        lambda live: live["spec"]["ports"][0].update(targetPort=8001),
        lambda live: live["spec"]["ports"].append({"name": "x", "port": 1, "targetPort": 1}),
        lambda live: live["metadata"]["labels"].pop(names.NAME_LABEL),
    ],
    ids=["type", "selector", "target port", "extra port", "label"],
)
def test_edits_by_hand_are_a_difference(
    service: Body, live: Body, edit: Callable[[Body], object]
) -> None:
    edit(live)
    assert service_differs(live, service)


def test_only_other_ports_are_foreign(service: Body, live: Body) -> None:
    assert not has_foreign_ports(live, service)
    live["spec"]["ports"].append({"name": "x", "port": 1, "protocol": "TCP"})
    assert has_foreign_ports(live, service)
