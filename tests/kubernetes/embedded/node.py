"""A real node: containerd, kubelet, kube-proxy and cluster DNS in namespaces of their own.

One recorded process holds the node's mount, network, process, IPC and host name namespaces. When
it ends, the kernel ends every process of the node and drops its mounts, links and firewall rules.
So a node is removed, or lost on purpose by a test, with one signal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embedded import machine, node_files
from embedded.command import flags, run
from embedded.control_plane import ControlPlane
from embedded.kubectl import Kubectl
from embedded.pki import ADMIN, PROXY, Pki, node_identity, sign
from embedded.processes import Processes
from embedded.program_image import ProgramImage
from embedded.tools import NODE_TOOLS, ensure_tools, tool_path
from embedded.wait import wait_for

CONTAINERD_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 120.0
IMPORT_TIMEOUT_S = 900.0
# Bound to folders of the node's own, so that nothing of it lands in the machine's.
PRIVATE_FOLDERS = tuple(
    Path(path) for path in ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers")
)
UNSHARE = "unshare --mount --net --pid --ipc --uts --fork --kill-child --mount-proc"


@dataclass(frozen=True)
class Node:
    """Node `n<index>` of a cluster. Everything of it is under `folder`."""

    index: int
    root: Path
    pki: Pki
    processes: Processes
    kubectl: Kubectl

    @classmethod
    def of(cls, cluster: ControlPlane, index: int = 0) -> Node:
        return cls(index, cluster.root, cluster.pki, cluster.processes, cluster.kubectl)

    @classmethod
    def remains(cls, root: Path, processes: Processes, index: int) -> Node:
        """A node to stop, of a cluster of which perhaps only the folder is left."""
        pki = Pki(root / "pki")
        return cls(index, root, pki, processes, Kubectl(pki.kubeconfig(ADMIN), root))

    @property
    def name(self) -> str:
        return f"n{self.index}"

    @property
    def address(self) -> str:
        return f"10.200.0.{self.index + 1}"

    @property
    def pod_network(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def cgroup(self) -> str:
        return f"tpi-{self.name}"

    @property
    def containerd_socket(self) -> Path:
        return self.folder / "containerd.sock"

    def start(self) -> None:
        """Returns once the node is Ready."""
        ensure_tools(NODE_TOOLS)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_namespaces()
        machine.make_cgroups(self.cgroup)
        self._start_containerd()
        pause = ProgramImage(node_files.PAUSE_IMAGE, tool_path("pause"))
        self.import_image(pause.write(self.folder / "pause.tar"))
        self._start_dns()
        self._start_kubelet()
        self._start_proxy()
        self._wait_until_ready()

    def stop(self) -> None:
        """Ends everything that runs on the node. Fine if it is half up or down already."""
        self.processes.kill(self._holder)
        for program in ("kubelet", "kube-proxy", "coredns", "containerd"):
            self.processes.stop(f"{program}-{self.name}")
        machine.flush_routes(self.address)
        machine.remove_cgroups(self.cgroup)

    def is_running(self) -> bool:
        programs = ("kubelet", "kube-proxy", "coredns", "containerd")
        return all(self.processes.is_running(f"{program}-{self.name}") for program in programs)

    def import_image(self, archive: Path) -> None:
        """Gives the node an image from a docker archive."""
        self.ctr("images", "import", str(archive))

    def ctr(self, *arguments: str) -> str:
        base = ["ctr", "--address", str(self.containerd_socket), "--namespace", "k8s.io"]
        return self.run([*base, *arguments], timeout_s=IMPORT_TIMEOUT_S)

    def run(self, argv: list[str], timeout_s: float = 60.0) -> str:
        """Runs a command inside the node."""
        return run([*self._enter(), *argv], timeout_s=timeout_s)

    @property
    def _holder(self) -> str:
        return f"node-{self.name}"

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._init_pid()}", "-m", "-n", "-p", "-i", "-u", "--"]

    def _init_pid(self) -> int:
        """The node's process 1, seen from outside: the only child of the recorded process."""
        record = self.processes.find(self._holder)
        if record is None:
            return 0
        children = Path(f"/proc/{record.pid}/task/{record.pid}/children")
        listed = children.read_text().split() if children.exists() else []
        return int(listed[0]) if listed else 0

    def _make_namespaces(self) -> None:
        pause = tool_path("pause")
        self.processes.start(self._holder, [*UNSHARE.split(), "--", pause])

        def holds() -> bool:
            self.processes.check_running(self._holder)
            executable = Path(f"/proc/{self._init_pid()}/exe")
            return executable.exists() and executable.resolve() == pause.resolve()

        wait_for(f"the namespaces of {self.name}", holds, timeout_s=10)
        for path in PRIVATE_FOLDERS:
            own = self.folder / str(path).lstrip("/").replace("/", "-")
            own.mkdir(exist_ok=True)
            self.run(["mount", "--bind", str(own), str(path)])
        self.run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
        self._use_own_resolver()
        # Volumes that a pod's mounts must reach need a root that passes mounts on.
        self.run(["mount", "--make-rshared", "/"])
        self.run(["hostname", self.name])
        self._connect()

    def _use_own_resolver(self) -> None:
        """The node reaches nothing beyond this machine: a name fails at once, not by time-out."""
        used = Path("/etc/resolv.conf").resolve()
        # A file under /run is out of sight by now, and 127.0.0.1 is what programs then ask.
        if used.exists() and not used.is_relative_to("/run"):
            own = self.folder / "resolv.conf"
            own.write_text("nameserver 127.0.0.1\n")
            self.run(["mount", "--bind", str(own), str(used)])

    def _connect(self) -> None:
        link = f"tpi-{self.name}"
        run(
            ["ip", "link", "add", link, "type", "veth"]
            + ["peer", "name", "eth0", "netns", str(self._init_pid())]
        )
        run(["ip", "link", "set", link, "master", machine.BRIDGE, "up"])
        self.run(["ip", "link", "set", "lo", "up"])
        self.run(["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])
        self.run(["ip", "route", "add", "default", "via", machine.MACHINE_ADDRESS])
        self.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"])
        machine.add_routes(self.address, self.pod_network)

    def _start_containerd(self) -> None:
        cni = self.folder / "cni"
        cni.mkdir(exist_ok=True)
        (cni / "10-pods.conflist").write_text(node_files.render_cni(self.pod_network))
        config = self.folder / "containerd.toml"
        config.write_text(node_files.render_containerd(self.folder, self.containerd_socket))
        self._start("containerd", ["containerd", "--config", str(config)])

        def answers() -> bool:
            self.processes.check_running(f"containerd-{self.name}")
            if not self.containerd_socket.exists():
                return False
            return "Server" in self.ctr("version")

        self._wait_for("containerd", answers, CONTAINERD_TIMEOUT_S)

    def _start_dns(self) -> None:
        corefile = self.folder / "Corefile"
        corefile.write_text(node_files.render_corefile(self.kubectl.kubeconfig))
        self._start("coredns", [str(tool_path("coredns")), "-conf", str(corefile)])

    def _start_kubelet(self) -> None:
        identity = node_identity(self.name)
        subject = f"/O=system:nodes/CN={identity.user}"
        sign(self.pki, f"kubelet-{self.name}", subject, (self.address, "127.0.0.1"))
        config = self.folder / "kubelet.json"
        config.write_text(
            node_files.render_kubelet(
                self.folder,
                self.pki,
                name=self.name,
                address=self.address,
                cgroup=self.cgroup,
                socket=self.containerd_socket,
            )
        )
        options = {
            "config": config,
            "kubeconfig": self.pki.kubeconfig(identity),
            "hostname-override": self.name,
            "node-ip": self.address,
        }
        self._start("kubelet", [str(tool_path("kubelet")), *flags(options)])

    def _start_proxy(self) -> None:
        config = self.folder / "kube-proxy.json"
        config.write_text(node_files.render_proxy(self.name, self.pki.kubeconfig(PROXY)))
        self._start("kube-proxy", [str(tool_path("kube-proxy")), f"--config={config}"])

    def _start(self, program: str, argv: list[str]) -> None:
        self.processes.start(f"{program}-{self.name}", [*self._enter(), *argv])

    def _wait_until_ready(self) -> None:
        def is_ready() -> bool:
            for program in ("kubelet", "kube-proxy", "coredns"):
                self.processes.check_running(f"{program}-{self.name}")
            conditions = self.kubectl.get("node", self.name).get("status", {}).get("conditions", [])
            return any(seen["type"] == "Ready" and seen["status"] == "True" for seen in conditions)

        self._wait_for("kubelet", is_ready, READY_TIMEOUT_S)

    def _wait_for(self, program: str, look: Callable[[], bool], timeout_s: float) -> None:
        wait_for(
            f"{program} on {self.name}",
            look,
            timeout_s=timeout_s,
            describe=lambda: self.processes.log_tail(f"{program}-{self.name}"),
        )
