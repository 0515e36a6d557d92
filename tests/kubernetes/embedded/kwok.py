"""kwok plays the kubelet of nodes that do not exist: a pod bound to one becomes Ready at once."""

from __future__ import annotations

from typing import Any

from embedded.command import flags
from embedded.kubectl import Kubectl
from embedded.port import free_ports
from embedded.processes import Processes
from embedded.tools import KWOK, ensure_tools, tool_path
from embedded.wait import wait_for

PROCESS = "kwok"
ANNOTATION = "kwok.x-k8s.io/node"
DEFAULT_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "500"}
READY_TIMEOUT_S = 60.0


def start_process(processes: Processes, kubectl: Kubectl, *arguments: str) -> None:
    """`arguments`: more flags, such as --cidr=127.20.0.1/16 for pod addresses that answer here."""
    ensure_tools([PROCESS])
    stages = [
        path
        for folder in KWOK.data
        for path in sorted(KWOK.data_dir(folder).glob("*.yaml"))
        if path.name != "kustomization.yaml"
    ]
    (port,) = free_ports(1)
    options = {
        "kubeconfig": kubectl.kubeconfig,
        "manage-nodes-with-annotation-selector": f"{ANNOTATION}=fake",
        "server-address": f"127.0.0.1:{port}",
        "node-lease-duration-seconds": 40,
    }
    configs = [f"--config={stage}" for stage in stages]
    processes.start(PROCESS, [tool_path(PROCESS), *flags(options), *configs, *arguments])


def stop_process(processes: Processes) -> None:
    processes.stop(PROCESS)


def add_node(processes: Processes, kubectl: Kubectl, name: str, **capacity: str) -> None:
    """A node, Ready when this returns. `capacity` adds to or replaces the default resources."""
    kubectl.apply(render_node(name, {**DEFAULT_CAPACITY, **capacity}))

    def is_ready() -> bool:
        processes.check_running(PROCESS)
        conditions = kubectl.get("node", name).get("status", {}).get("conditions", [])
        return any(seen["type"] == "Ready" and seen["status"] == "True" for seen in conditions)

    wait_for(
        f"the fake node {name}",
        is_ready,
        timeout_s=READY_TIMEOUT_S,
        describe=lambda: processes.log_tail(PROCESS),
    )


def render_node(name: str, capacity: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok"},
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }
