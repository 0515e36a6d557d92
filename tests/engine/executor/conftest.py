"""Real rank processes that echo: groups to speak to in whole steps, and a Ray to run them on."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.base import Executor
from tpinference_engine.executor.factory import make_executor
from tpinference_engine.executor.ray_environment import prepare_ray_environment
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, EchoRunner, echo_token
from tpinference_engine.step import (
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampleRow,
    StepInput,
    StepOutput,
)

MAX_MODEL_LEN = 64
PROMPT = (3, 1, 4)
POLL_S = 0.005
RAYLET_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")


class Group:
    """An executor under test."""

    def __init__(self, config: EngineConfig, runner: RunnerFactory) -> None:
        self.config = config
        self.stages: list[str] = []
        self.executor: Executor = make_executor(config, MAX_MODEL_LEN, runner)
        self.step_id = 0
        self.generation = 0
        self.pending: tuple[SampleRow, ...] = ()

    def start(self) -> None:
        self.executor.start(self.stages.append)

    @property
    def pids(self) -> list[int]:
        return [place.pid for place in self.executor.places]

    def step(self, **parts: Any) -> StepOutput:
        self.submit(**parts)
        return self.executor.collect()

    def submit(self, **parts: Any) -> None:
        bucket = sum(row.num_tokens for row in parts.get("forward", ()))
        self.executor.submit(StepInput(self.step_id, self.config.epoch, bucket, **parts))
        self.step_id += 1

    def echo(self, num_tokens: int) -> list[int]:
        """Prefills PROMPT into slot 0, which may have been used before, and decodes after it."""
        length, self.generation = len(PROMPT), self.generation + 1
        slot = 0, self.generation
        self.step(
            sample=self.pending,
            free=(0,) if self.pending else (),
            new=(NewSlot(*slot, length, 0.0, 1.0, 0, 0),),
            appends=(BlockAppend(0, tuple(range(16))[::-1]),),
            forward=(ForwardRow(*slot, 0, length, PROMPT, True),),
        )
        tokens: list[int] = []
        for position in range(length, length + num_tokens):
            output = self.step(
                sample=(SampleRow(*slot, position),),
                forward=(ForwardRow(*slot, position, 1, (), True),),
            )
            tokens.append(output.tokens[0].token)
        self.pending = (SampleRow(*slot, length + num_tokens),)
        return tokens

    @staticmethod
    def predict(num_tokens: int) -> list[int]:
        tokens = list(PROMPT)
        for _ in range(num_tokens):
            tokens.append(
                echo_token(tokens, prompt_length=len(PROMPT), vocab_size=DEFAULT_VOCAB_SIZE)
            )
        return tokens[len(PROMPT) :]


class Processes:
    """What runs on this machine."""

    @staticmethod
    def alive(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def still_alive(self, pids: set[int]) -> list[int]:
        return [pid for pid in pids if self.alive(pid)]

    @staticmethod
    def descendants(pid: int) -> set[int]:
        """Not multiprocessing's resource tracker, which serves its process until the end."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                command = (stat.parent / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"resource_tracker" not in command:
                parents[int(stat.parent.name)] = int(fields[1])
        found = {pid}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {pid}

    @staticmethod
    def ray_agents() -> set[int]:
        titles = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/cmdline")}
        return {pid for pid, path in titles.items() if _is_agent(path)}

    def shared_memory(self) -> set[str]:
        """Names there, but for the semaphores of raylets that other programs run."""
        ours = self.descendants(os.getpid())
        named = {name: RAYLET_SEMAPHORE.match(name) for name in os.listdir("/dev/shm")}
        return {name for name, match in named.items() if not match or int(match[1]) in ours}

    @staticmethod
    def wait_until(what: Callable[[], object], within_s: float, seen: Callable[[], object]) -> None:
        pause = threading.Event()
        end = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < end, f"not within {within_s} s, seen: {seen()}"
            pause.wait(POLL_S)

    def wait_until_ended(self, pids: set[int], within_s: float) -> None:
        self.wait_until(
            lambda: not self.still_alive(pids), within_s, lambda: self.still_alive(pids)
        )


def _is_agent(command: Path) -> bool:
    try:
        title = command.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return title.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Not started. Whatever became of it, it is shut down after the test."""
    groups: list[Group] = []

    def make(runner: RunnerFactory = EchoRunner, **changes: Any) -> Group:
        config = EngineConfig(
            model=tmp_path,
            served_model_name=("echo",),
            device="cpu",
            tensor_parallel_size=2,
            max_num_seqs=4,
            block_size=4,
            epoch=3,
            step_timeout_s=30.0,
            startup_timeout_s=90.0,
        )
        groups.append(Group(replace(config, **changes), runner))
        return groups[-1]

    yield make
    for group in groups:
        group.executor.shutdown()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of faulty runners. Spawned ranks find it, Ray's get it by value."""
    from ray import cloudpickle

    monkeypatch.syspath_prepend(Path(__file__).with_name("faults"))
    module = importlib.import_module("rank_faults")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)


RUN_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
limits = {"object_store_memory": 100 * 2**20}
head = {"num_cpus": int(sys.argv[1]), **limits}
cluster = Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, cluster.head_node.node_id, flush=True)
for _ in sys.stdin:
    print(cluster.add_node(num_cpus=1, **limits).node_id, flush=True)
cluster.shutdown()
"""


class Cluster:
    """Ray nodes on this machine: a head, which holds ranks if it has CPUs, and workers when asked.

    In a process of their own, since Ray has state for a whole process.
    """

    def __init__(self, head_cpus: int = 0) -> None:
        # Short, as sockets lie below it.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")
        environ = {**os.environ, "RAY_TMPDIR": self._folder.name}
        prepare_ray_environment(environ)
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN_CLUSTER, str(head_cpus)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.head_id = self._read().split()

    def add_worker(self) -> str:
        """The node's id."""
        assert self._process.stdin is not None
        self._process.stdin.write("worker\n")
        self._process.stdin.flush()
        return self._read().strip()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._folder.cleanup()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster's process ended with {self._process.wait()}"
        return line


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two workers."""
    cluster = Cluster()
    cluster.add_worker()
    cluster.add_worker()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def one_raylet() -> Iterator[Cluster]:
    """A head that holds two ranks."""
    cluster = Cluster(head_cpus=2)
    yield cluster
    cluster.close()


@pytest.fixture
def make_cluster() -> Iterator[Callable[[], Cluster]]:
    """A head alone, for one test."""
    clusters: list[Cluster] = []

    def make() -> Cluster:
        clusters.append(Cluster())
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture(params=["compiled graph", "actor call", "processes"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Changes to the config of a group."""
    if request.param == "processes":
        return {"distributed_executor_backend": "mp"}
    cluster: Cluster = request.getfixturevalue("cluster")
    return {"ray_address": cluster.address, "step_transport": request.param.replace(" ", "-")}
