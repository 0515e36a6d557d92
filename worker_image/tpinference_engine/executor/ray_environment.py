"""What Ray must find in the environment, before anything imports it.

A module of its own, as importing `ray` is too late: it reads part of its settings then.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_DEFAULTS = {
    # Devices are chosen by index; nobody rewrites CUDA_VISIBLE_DEVICES.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # Ranks are the work, not a background task.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare_ray_environment(environ: MutableMapping[str, str]) -> None:
    """What the pod or the user set wins."""
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
