"""Renders the configuration files of a node's programs. Pure: it reads and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embedded import machine
from embedded.packages import CNI_PLUGINS
from embedded.pki import Pki

PAUSE_IMAGE = "localhost/pause:1"
POD_NETWORK_NAME = "tpi-pods"
CLUSTER_DOMAIN = "cluster.local"


def render_containerd(folder: Path, socket: Path) -> str:
    return f"""\
version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
enable_unprivileged_ports = true
netns_mounts_under_state_dir = true
# Without CAP_SYS_RESOURCE no score can be lowered, and every sandbox would fail on it.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{folder}/runc"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{folder}/cni"
"""


def render_cni(pod_network: str) -> str:
    """Point-to-point links: pods reach each other by routing, so that the node's connection
    tracking sees both ways of a connection through a Service; over a bridge it need not."""
    ranges = [[{"subnet": pod_network}]]
    ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    plugin = {"type": "ptp", "ipMasq": False, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": POD_NETWORK_NAME, "plugins": [plugin]})


def render_corefile(kubeconfig: Path) -> str:
    return f"""\
.:53 {{
    errors
    health 127.0.0.1:8181
    cache 5
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
    }}
}}
"""


def render_proxy(name: str, kubeconfig: Path) -> str:
    # The limits of connection tracking belong to the machine: 0 leaves them as they are.
    untouched = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "mode": "iptables",
            "clusterCIDR": machine.POD_NETWORK,
            "hostnameOverride": name,
            "conntrack": untouched,
        }
    )


def render_kubelet(
    folder: Path, pki: Pki, *, name: str, address: str, cgroup: str, socket: Path
) -> str:
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.ca_file)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.certificate(f"kubelet-{name}")),
        "tlsPrivateKeyFile": str(pki.key(f"kubelet-{name}")),
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "clusterDNS": [address],
        "clusterDomain": CLUSTER_DOMAIN,
        # The machine's own name servers and search domains are none of the pods' business.
        "resolvConf": "",
        # The disk is the whole machine's: how full it is, is not ours to judge.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "syncFrequency": "10s",
        "makeIPTablesUtilChains": False,
    }
    return json.dumps(config, indent=2)
