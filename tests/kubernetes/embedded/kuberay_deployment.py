"""KubeRay's operator as a Deployment, from the manifests of its own module.

Its published image can't be had without a registry, so the node gets one with the program that was
built from the same module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from embedded import kuberay
from embedded.control_plane import ControlPlane
from embedded.node import Node
from embedded.program_image import ProgramImage
from embedded.tools import KUBERAY, tool_path

NAMESPACE = "kuberay-system"
NAME = "kuberay-operator"
ROLLOUT_TIMEOUT_S = 120.0


def install(cluster: ControlPlane, node: Node) -> None:
    """Returns once the operator is available. Changes nothing if it is there already."""
    kuberay.install_crds(cluster.kubectl)
    reference = load_image(node)
    cluster.kubectl.apply(*render(KUBERAY.data_dir("config"), reference))
    cluster.kubectl.wait_for_rollout(NAME, NAMESPACE, ROLLOUT_TIMEOUT_S)


def load_image(node: Node) -> str:
    # The folder of the program is keyed by the pins that it was built from.
    version = KUBERAY.built.name.rpartition("-")[2]
    reference = f"localhost/{NAME}:{version}"
    if reference not in node.ctr("images", "ls", "-q").split():
        archive = node.folder / "kuberay.tar"
        node.import_image(ProgramImage(reference, tool_path(kuberay.PROCESS)).write(archive))
        archive.unlink()
    return reference


def render(config: Path, image: str) -> list[dict[str, Any]]:
    """The namespace, RBAC and Deployment, with our image and without a CPU limit."""
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    ]
    files = ["service_account", "role", "role_binding", "leader_election_role"]
    paths = [config / "rbac" / f"{name}.yaml" for name in files]
    paths += [
        config / "rbac" / "leader_election_role_binding.yaml",
        config / "manager/manager.yaml",
    ]
    for path in paths:
        documents += [document for document in yaml.safe_load_all(path.read_text()) if document]
    for document in documents[1:]:
        if not document["kind"].startswith("Cluster"):
            document["metadata"]["namespace"] = NAMESPACE
        for subject in document.get("subjects", []):
            subject["namespace"] = NAMESPACE
        if document["kind"] == "Deployment":
            _use_image(document["spec"]["template"]["spec"]["containers"][0], image)
    return documents


def _use_image(container: dict[str, Any], image: str) -> None:
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    container["command"] = [f"/{kuberay.PROCESS}"]
    # Its limit of a tenth of a core, on a machine of two that is busy, costs it its probes.
    container["resources"] = {"requests": {"cpu": "50m", "memory": "128Mi"}}
