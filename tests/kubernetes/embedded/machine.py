"""What a real node changes on the machine outside its namespaces, and how each change is undone.

That is: one bridge with its routes, cgroups, empty mount points, and six kernel settings. All the
rest (processes, mounts, links, firewall rules) lives in the node's own namespaces and ends with it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from embedded.command import run
from embedded.errors import CommandFailed, MachineError
from embedded.wait import wait_for

BRIDGE = "tpi0"
MACHINE_ADDRESS = "10.200.0.254"
NODE_NETWORK = "10.200.0.0/24"
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
CGROUPS = Path("/sys/fs/cgroup")
PROC_SYS = Path("/proc/sys")
# kubelet sets these for the whole machine.
KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
STATE_FILE = "machine.json"
# By default all pods together weigh as much as one busy process of the machine, whatever they
# request. As many as there are cores is fair; more would starve the API server, since engines spin.
_CORES = os.cpu_count() or 1
# In version 1 of cgroups, and in version 2.
CPU_WEIGHT = {"cpu.shares": str(1024 * _CORES), "cpu.weight": str(min(100 * _CORES, 10000))}


def prepare(root: Path, mount_points: tuple[Path, ...]) -> None:
    """Makes the changes, after writing down in `root` what was there before."""
    _check_networks_are_free()
    state = root / STATE_FILE
    if not state.exists():
        made = [str(path) for path in mount_points for path in _missing(path)]
        settings = {name: (PROC_SYS / name).read_text().strip() for name in KERNEL_SETTINGS}
        state.write_text(json.dumps({"made": made, "settings": settings}, indent=2))
    for path in mount_points:
        path.mkdir(parents=True, exist_ok=True)
    if not _has_bridge():
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "address", "replace", f"{MACHINE_ADDRESS}/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])


def restore(root: Path) -> None:
    """Undoes `prepare`. Fine if only a part of it was done."""
    if _has_bridge():
        run(["ip", "link", "delete", BRIDGE])
    try:
        state = json.loads((root / STATE_FILE).read_text())
    except (OSError, ValueError):
        return
    for name, value in state["settings"].items():
        if (PROC_SYS / name).read_text().strip() != value:
            (PROC_SYS / name).write_text(value)
    for name in reversed(state["made"]):
        path = Path(name)
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def make_cgroups(name: str) -> None:
    """One cgroup a node: two kubelets under one would end each other's pods."""
    for hierarchy in _hierarchies():
        folder = hierarchy / name
        folder.mkdir(exist_ok=True)
        # Version 1's cpuset starts empty, and nothing can then run in it.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            file = folder / setting
            if hierarchy.name.startswith("cpuset") and not file.read_text().strip():
                file.write_text((hierarchy / setting).read_text())
        for setting, value in CPU_WEIGHT.items():
            if (folder / setting).exists():
                (folder / setting).write_text(value)


def remove_cgroups(name: str) -> None:
    """Fine if there are none. A cgroup stays busy for a moment after its last process ended."""
    for hierarchy in dict.fromkeys([*_hierarchies(), CGROUPS / "unified"]):
        folder = hierarchy / name
        if folder.is_dir():
            wait_for(f"{folder} to be empty", partial(_remove_empty, folder), timeout_s=10)


def _remove_empty(folder: Path) -> bool:
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)
    except OSError:
        return False
    return True


def remove_tree(root: Path) -> None:
    """Removes a run's folder, but never through a mount that is still under it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, key=len, reverse=True):
        if mount.startswith(f"{root}/"):
            run(["umount", mount])
    if root.exists():
        shutil.rmtree(root)


def _hierarchies() -> list[Path]:
    """The roots in which a cgroup can be made: one in version 2, one a controller in version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if (path / "cgroup.procs").exists()]


def _missing(path: Path) -> list[Path]:
    """The folders that have to be made for `path`, outermost first."""
    return [part for part in [*reversed(path.parents), path] if not part.exists()]


def _has_bridge() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def _check_networks_are_free() -> None:
    ours = [ipaddress.ip_network(text) for text in (NODE_NETWORK, POD_NETWORK, SERVICE_NETWORK)]
    routes = json.loads(run(["ip", "-json", "-4", "route", "show"]) or "[]")
    for route in routes:
        if route["dst"] == "default" or route.get("dev") == BRIDGE:
            continue
        theirs = ipaddress.ip_network(route["dst"], strict=False)
        for network in ours:
            if network.overlaps(theirs):
                raise MachineError(
                    f"the cluster needs {network}, but this machine routes {theirs} to "
                    f"{route.get('dev')!r}"
                )


def add_routes(node_address: str, pod_network: str) -> None:
    """Lets this machine reach a node's pods, and Services through it."""
    for network in (pod_network, SERVICE_NETWORK):
        run(["ip", "route", "replace", network, "via", node_address, "dev", BRIDGE])


def flush_routes(node_address: str) -> None:
    with suppress(CommandFailed):  # the bridge, and the routes with it, are gone already
        run(["ip", "route", "flush", "via", node_address])
