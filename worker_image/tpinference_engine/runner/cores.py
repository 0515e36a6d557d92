"""How many CPU cores this process may use: affinity, and the container's CPU limit.

torch and os.cpu_count see the machine; a pod with a limit of two cores that runs 64 threads is
throttled, and then a collective waits for its slowest rank.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    """At least 1. `cpu_max` is cgroup v2's file; without one only affinity counts."""
    cores = len(os.sched_getaffinity(0))
    limit = _cpu_limit(cpu_max)
    return max(1, min(cores, math.ceil(limit) if limit else cores))


def _cpu_limit(cpu_max: Path) -> float | None:
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def threads_of_rank(ranks_on_node: int, cores: int) -> int:
    return max(1, cores // max(1, ranks_on_node))
