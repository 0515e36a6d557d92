"""The one real cluster of this machine: a control plane and nodes, up and down as a whole."""

from __future__ import annotations

from pathlib import Path

from embedded import machine
from embedded.control_plane import ControlPlane
from embedded.node import PRIVATE_FOLDERS, Node
from embedded.packages import ensure_packages
from embedded.pki import node_identity
from embedded.places import default_root
from embedded.processes import Processes
from embedded.progress import say, step

MAX_NODES = 4


def ensure_cluster(root: Path | None = None) -> ControlPlane:
    """The running cluster with its first node; what is left of a broken one is removed first."""
    root = root or default_root()
    cluster = attach(root)
    if cluster is not None:
        say(f"✓ the cluster in {root} is up already")
        return cluster
    if root.exists():
        take_down(root)
    ensure_packages()
    root.mkdir(parents=True)
    try:
        machine.prepare(root, PRIVATE_FOLDERS)
        with step("start the control plane"):
            cluster = ControlPlane.start(
                root,
                address=machine.MACHINE_ADDRESS,
                identities=tuple(node_identity(f"n{index}") for index in range(MAX_NODES)),
                tied=False,
            )
        with step("start node n0"):
            Node.of(cluster).start()
    except BaseException:
        _keep_logs(root)
        take_down(root)
        raise
    return cluster


def attach(root: Path | None = None) -> ControlPlane | None:
    """The cluster, if it runs with all its parts."""
    cluster = ControlPlane.attach(root or default_root())
    if cluster is None or not Node.of(cluster).is_running():
        return None
    return cluster


def take_down(root: Path | None = None) -> None:
    """Removes all that `ensure_cluster` made, however far it came. Fine if there is nothing."""
    root = root or default_root()
    if not root.exists():
        return
    with step(f"remove the cluster in {root}"):
        processes = Processes(root, tied=False)
        for index in range(MAX_NODES):
            Node.remains(root, processes, index).stop()
        processes.stop_all()
        machine.restore(root)
        machine.remove_tree(root)


def _keep_logs(root: Path) -> None:
    """After a failed start the folder goes, but not what could explain the failure."""
    logs = root / "logs"
    if not logs.is_dir():
        return
    kept = root.with_name(f"{root.name}-failed-logs")
    machine.remove_tree(kept)
    logs.rename(kept)
    say(f"the logs of the failed start are in {kept}")
