"""The Debian packages that a real node and its images need; installed only if missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from embedded.command import run
from embedded.errors import MachineError
from embedded.progress import step

CNI_PLUGINS = Path("/usr/lib/cni")
# A program (or a file) that shows that the package is there, and the package.
NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "openssl": "openssl",
    str(CNI_PLUGINS / "ptp"): "containernetworking-plugins",
}
INSTALL_TIMEOUT_S = 600.0


def missing_packages() -> list[str]:
    return [package for shows, package in NEEDED.items() if shutil.which(shows) is None]


def missing_reason() -> str | None:
    """Why no real node can run here; None if it can."""
    if os.geteuid() != 0:
        return "a real node needs root"
    missing = missing_packages()
    if missing and shutil.which("apt-get") is None:
        return f"a real node needs {' '.join(missing)}, and there is no apt-get to install them"
    return None


def ensure_packages() -> None:
    reason = missing_reason()
    if reason:
        raise MachineError(reason)
    missing = missing_packages()
    if not missing:
        return
    with step(f"install {' '.join(missing)}"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], env=env, timeout_s=INSTALL_TIMEOUT_S)
        install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
        run(install, env=env, timeout_s=INSTALL_TIMEOUT_S)
