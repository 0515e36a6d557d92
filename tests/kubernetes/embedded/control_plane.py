"""A real control plane in one folder: etcd, kube-apiserver, controller manager, scheduler.

It needs no root and no network. It knows nothing of nodes: `kwok.py` plays them, `node.py` is a
real one. As a context manager it leaves nothing behind, whatever happens in between:

    with ControlPlane.start(tmp_path) as cluster:
        cluster.start_kuberay()
        cluster.start_kwok()
        cluster.add_fake_node("n0")
        cluster.kubectl("get", "nodes")
"""

from __future__ import annotations

import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from embedded import kuberay, kwok
from embedded.command import flags
from embedded.errors import ClusterError
from embedded.kubectl import Kubectl
from embedded.pki import ADMIN, CONTROLLER_MANAGER, PROXY, SCHEDULER, Identity, Pki, make_pki
from embedded.port import free_ports
from embedded.processes import Processes
from embedded.tools import CONTROL_PLANE_TOOLS, ensure_tools, tool_path
from embedded.wait import wait_for

START_TIMEOUT_S = 120.0
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc"
STATE_FILE = "control-plane.json"


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane. Everything of it is under `root`."""

    root: Path
    url: str
    pki: Pki
    processes: Processes

    @classmethod
    def start(
        cls,
        root: Path,
        *,
        address: str = "127.0.0.1",
        identities: tuple[Identity, ...] = (),
        tied: bool = True,
    ) -> ControlPlane:
        """Starts all four and returns once the API server is ready. `tied`: see Processes."""
        ensure_tools((*CONTROL_PLANE_TOOLS, "kubectl"))
        root.mkdir(parents=True, exist_ok=True)
        port, *etcd_ports = free_ports(3, address)
        url = f"https://{address}:{port}"
        pki = make_pki(
            root / "pki",
            url=url,
            addresses=tuple(dict.fromkeys((address, "127.0.0.1", "10.96.0.1"))),
            identities=(ADMIN, CONTROLLER_MANAGER, SCHEDULER, PROXY, *identities),
        )
        cluster = cls(root, url, pki, Processes(root, tied))
        try:
            cluster._start_etcd_and_api_server(address, port, etcd_ports)
            cluster._start_controllers()
            cluster._wait_until_usable()
        except BaseException:
            cluster.processes.stop_all()
            raise
        (root / STATE_FILE).write_text(json.dumps({"url": url}))
        return cluster

    @classmethod
    def attach(cls, root: Path) -> ControlPlane | None:
        """The control plane that an earlier `start(tied=False)` left running in `root`, if any."""
        try:
            url = str(json.loads((root / STATE_FILE).read_text())["url"])
        except (OSError, ValueError, KeyError):
            return None
        cluster = cls(root, url, Pki(root / "pki"), Processes(root, tied=False))
        return cluster if cluster.is_ready() else None

    @property
    def kubeconfig(self) -> Path:
        return self.pki.kubeconfig(ADMIN)

    @property
    def admin_token(self) -> str:
        return self.pki.token(ADMIN)

    @property
    def ca_file(self) -> Path:
        return self.pki.ca_file

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig, self.root / "kubectl-cache")

    def create_token(self, service_account: str, namespace: str) -> str:
        """A token with which a client is that ServiceAccount."""
        return self.kubectl("create", "token", service_account, "-n", namespace).strip()

    def start_kuberay(self, *arguments: str) -> None:
        """Installs KubeRay's CRDs and starts its operator outside the cluster."""
        kuberay.install_crds(self.kubectl)
        kuberay.start_process(self.processes, self.kubectl, *arguments)

    def stop_kuberay(self) -> None:
        kuberay.stop_process(self.processes)

    def start_kwok(self, *arguments: str) -> None:
        """From here on, the nodes of `add_fake_node` and the pods on them come up at once."""
        kwok.start_process(self.processes, self.kubectl, *arguments)

    def stop_kwok(self) -> None:
        kwok.stop_process(self.processes)

    def add_fake_node(self, name: str, **capacity: str) -> None:
        kwok.add_node(self.processes, self.kubectl, name, **capacity)

    def is_ready(self) -> bool:
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.admin_token}"}
        )
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            with urllib.request.urlopen(request, timeout=5, context=context) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Ends every process and removes the folder."""
        self.processes.stop_all()
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            raise ClusterError(f"{self.root} could not be removed")

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_etcd_and_api_server(self, address: str, port: int, ports: list[int]) -> None:
        etcd_url, peer_url = (f"http://{address}:{etcd_port}" for etcd_port in ports)
        etcd = {
            "data-dir": self.root / "etcd",
            "unsafe-no-fsync": True,
            "listen-client-urls": etcd_url,
            "advertise-client-urls": etcd_url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"default={peer_url}",
        }
        self.processes.start("etcd", [tool_path("etcd"), *flags(etcd)])
        api_server = self._api_server_options(address, port, etcd_url)
        self.processes.start("kube-apiserver", [tool_path("kube-apiserver"), *flags(api_server)])
        self._wait_for("the API server to be ready", self.is_ready, "kube-apiserver")

    def _api_server_options(self, address: str, port: int, etcd_url: str) -> dict[str, object]:
        key, certificate = self.pki.key, self.pki.certificate
        return {
            "etcd-servers": etcd_url,
            "bind-address": address,
            "advertise-address": address,
            "secure-port": port,
            # A loopback address can't be an Endpoint; nothing inside the cluster could reach it.
            "endpoint-reconciler-type": "none" if address.startswith("127.") else "lease",
            "allow-privileged": True,
            "authorization-mode": "Node,RBAC",
            "token-auth-file": self.pki.tokens_file,
            "client-ca-file": self.pki.ca_file,
            "tls-cert-file": certificate("apiserver"),
            "tls-private-key-file": key("apiserver"),
            "service-cluster-ip-range": SERVICE_RANGE,
            "service-account-issuer": SERVICE_ACCOUNT_ISSUER,
            "service-account-key-file": self.pki.service_account_key,
            "service-account-signing-key-file": self.pki.service_account_key,
            "kubelet-preferred-address-types": "InternalIP",
            "kubelet-certificate-authority": self.pki.ca_file,
            "kubelet-client-certificate": certificate("kubelet-client"),
            "kubelet-client-key": key("kubelet-client"),
        }

    def _start_controllers(self) -> None:
        # Port 0: they serve nothing, so several control planes never get in each other's way.
        common = {"leader-elect": "false", "secure-port": 0}
        controller_manager = {
            **common,
            "kubeconfig": self.pki.kubeconfig(CONTROLLER_MANAGER),
            "service-account-private-key-file": self.pki.service_account_key,
            "root-ca-file": self.pki.ca_file,
            "use-service-account-credentials": True,
        }
        scheduler = {**common, "kubeconfig": self.pki.kubeconfig(SCHEDULER)}
        for name, options in (
            ("kube-controller-manager", controller_manager),
            ("kube-scheduler", scheduler),
        ):
            self.processes.start(name, [tool_path(name), *flags(options)])

    def _wait_until_usable(self) -> None:
        """A pod can only be made once the controller manager has made the ServiceAccount."""

        def has_service_account() -> bool:
            return bool(self.kubectl.get("serviceaccount", "default", "-n", "default"))

        self._wait_for("the default ServiceAccount", has_service_account, "kube-controller-manager")

    def _wait_for(self, what: str, look: Callable[[], bool], program: str) -> None:
        def look_at_both() -> bool:
            for name in ("etcd", program):
                self.processes.check_running(name)
            return look()

        wait_for(
            what,
            look_at_both,
            timeout_s=START_TIMEOUT_S,
            describe=lambda: self.processes.log_tail(program),
        )
