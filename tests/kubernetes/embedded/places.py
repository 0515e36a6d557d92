"""Where the embedded cluster keeps what outlives it (cache) and what does not (root)."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# tests/kubernetes/embedded/places.py
REPOSITORY = Path(__file__).resolve().parents[3]
TOOL_MODULES = REPOSITORY / "tests" / "kubernetes" / "tools"


def cache_dir() -> Path:
    """The folder for what is slow to make; safe to delete, never cleaned by `down`."""
    given = os.environ.get("TPINFERENCE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "tpinference"


def default_root() -> Path:
    """The folder of the one cluster that `up`, `demo` and the e2e tests share."""
    return cache_dir() / "cluster"


def wheels_dir() -> Path | None:
    """A folder of wheels that pip should prefer (a CPU torch), if this checkout has one."""
    given = os.environ.get("TPINFERENCE_WHEELS")
    for folder in [Path(given)] if given else [REPOSITORY.parent / "shared" / "wheels"]:
        if any(folder.glob("*.whl")):
            return folder.resolve()
    return None


def go_architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
