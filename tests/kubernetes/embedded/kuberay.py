"""KubeRay's CRDs, and its operator as a process outside the cluster."""

from __future__ import annotations

import urllib.error
import urllib.request

from embedded.command import flags
from embedded.kubectl import Kubectl
from embedded.port import free_ports
from embedded.processes import Processes
from embedded.tools import KUBERAY, ensure_tools, tool_path
from embedded.wait import wait_for

PROCESS = "kuberay-operator"
CRDS = tuple(f"{kind}.ray.io" for kind in ("rayclusters", "rayjobs", "rayservices", "raycronjobs"))
START_TIMEOUT_S = 60.0


def install_crds(kubectl: Kubectl) -> None:
    ensure_tools([PROCESS])
    kubectl.apply_folder(KUBERAY.data_dir("config") / "crd" / "bases")
    kubectl.wait_for_crds(CRDS)


def remove_crds(kubectl: Kubectl) -> None:
    kubectl("delete", "crd", "--ignore-not-found", *CRDS)


def start_process(processes: Processes, kubectl: Kubectl, *arguments: str) -> None:
    """Returns once the operator is up. `arguments`: more flags, such as --watch-namespace=a,b."""
    ensure_tools([PROCESS])
    metrics_port, probe_port = free_ports(2)
    options = {
        "enable-leader-election": "false",
        "metrics-addr": f"127.0.0.1:{metrics_port}",
        "health-probe-bind-address": f"127.0.0.1:{probe_port}",
    }
    processes.start(
        PROCESS,
        [tool_path(PROCESS), *flags(options), *arguments],
        env={"KUBECONFIG": str(kubectl.kubeconfig)},
    )

    def is_up() -> bool:
        processes.check_running(PROCESS)
        return _answers(f"http://127.0.0.1:{probe_port}/readyz")

    wait_for(
        "KubeRay's operator to be ready",
        is_up,
        timeout_s=START_TIMEOUT_S,
        describe=lambda: processes.log_tail(PROCESS),
    )


def stop_process(processes: Processes) -> None:
    processes.stop(PROCESS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
