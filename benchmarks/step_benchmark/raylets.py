"""Ray clusters of this machine: one raylet, or a second one that holds the ranks.

Each in a process of its own, since Ray has state for a whole process. Run as a program it is that
process: it ends when its standard input does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from step_benchmark.cell import Placement
from tpinference_engine.executor.ray_environment import prepare_ray_environment

_OBJECT_STORE_BYTES = 256 * 2**20
_END_S = 60


class RayletGroup:
    def __init__(self, placement: Placement, num_cpus: int, num_gpus: int) -> None:
        # Short, as sockets lie below it.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")
        packages = str(Path(__file__).resolve().parents[1])
        environ = {**os.environ, "RAY_TMPDIR": self._folder.name}
        # Ranks find this benchmark's runners by name.
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [packages, os.environ.get("PYTHONPATH")])
        )
        prepare_ray_environment(environ)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "step_benchmark.raylets", placement]
            + [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None, "a pipe was asked for"
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(f"Ray could not be started, exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_END_S)
        self._process.stdout.close()
        self._folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("placement", choices=("same", "across"))
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--num-gpus", type=int, required=True)
    args = parser.parse_args()
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": _OBJECT_STORE_BYTES}
    of_ranks = {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus, **store}
    head = of_ranks if args.placement == "same" else {"num_cpus": 0, "num_gpus": 0, **store}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    if args.placement == "across":
        cluster.add_node(**of_ranks)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
