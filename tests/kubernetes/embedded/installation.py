"""What stands on the cluster before the first TPInference: KubeRay, both charts, the images.

The demo and the e2e tests share it; it is the same that a user installs, from the same charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedded import kuberay_deployment
from embedded.cluster import ensure_cluster
from embedded.control_plane import ControlPlane
from embedded.helm import Helm
from embedded.images import Images, build_images, load_image
from embedded.node import Node
from embedded.places import REPOSITORY
from embedded.progress import step
from embedded.tools import ensure_tools

OPERATOR_NAMESPACE = "tpinference-system"
CRDS_CHART = "tpinference-crds"
OPERATOR_CHART = "tpinference-operator"
ROLLOUT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Installation:
    """A cluster with everything installed."""

    cluster: ControlPlane
    node: Node
    images: Images


def ensure_installation(root: Path | None = None) -> Installation:
    """Makes what is missing and upgrades what has changed."""
    ensure_tools()
    cluster = ensure_cluster(root)
    node = Node.of(cluster)
    images = build_images()
    for image in (images.operator, images.engine):
        load_image(node, image)
    with step("install KubeRay"):
        kuberay_deployment.install(cluster, node)
    with step("install the operator's charts"):
        install_charts(cluster, images)
    return Installation(cluster, node, images)


def install_charts(cluster: ControlPlane, images: Images) -> None:
    helm = Helm(cluster.kubectl)
    charts = REPOSITORY / "charts"
    helm.install(CRDS_CHART, charts / CRDS_CHART, OPERATOR_NAMESPACE)
    helm.install(
        OPERATOR_CHART,
        charts / OPERATOR_CHART,
        OPERATOR_NAMESPACE,
        {
            "image.repository": images.operator.name,
            "image.tag": images.operator.tag,
            "engine.image": images.engine.reference,
        },
    )
    cluster.kubectl.wait_for_rollout(OPERATOR_CHART, OPERATOR_NAMESPACE, ROLLOUT_TIMEOUT_S)
