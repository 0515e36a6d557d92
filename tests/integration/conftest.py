"""One real control plane a session: etcd, kube-apiserver, controllers, scheduler, KubeRay, kwok.

Between it and the operator stands the fault proxy. Each test gets a namespace of its own.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from embedded.control_plane import ControlPlane
from embedded.wait import wait_for
from harness.cluster_client import ClusterClient
from harness.fake_engine import POD_CIDR, FakeEngines
from harness.fault_proxy import Fault, FaultProxy
from harness.lag import LagMeter
from harness.operator_process import OperatorProcess, write_kubeconfig

from tpinference_operator.settings import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
CRD_FILE = ROOT / "crds" / "tpinferences.yaml"

PACE = ("resync_seconds", "discovery_seconds", "engine_status_seconds")

KEPT_CLUSTER_ENV = "TPINFERENCE_KEPT_CLUSTER"
"""A folder with a control plane that was furnished before, for running one test again and again."""

StartOperator = Callable[..., OperatorProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    kept = ControlPlane.attach(Path(os.environ.get(KEPT_CLUSTER_ENV, os.devnull)))
    if kept is not None:
        yield kept
        return
    with ControlPlane.start(tmp_path_factory.mktemp("cluster")) as cluster:
        furnish(cluster)
        yield cluster


def furnish(cluster: ControlPlane) -> None:
    cluster.start_kwok(f"--cidr={POD_CIDR}")
    cluster.add_fake_node("n0")
    cluster.add_fake_node("n1")
    cluster.start_kuberay()
    cluster.kubectl.apply(yaml.safe_load(CRD_FILE.read_text()))
    cluster.kubectl.wait_for_crds(["tpinferences.serving.tpinference.dev"])


@pytest.fixture(scope="session")
def session_proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    proxy = FaultProxy(control_plane.url, control_plane.ca_file)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(session_proxy: FaultProxy) -> Iterator[FaultProxy]:
    session_proxy.forget()
    yield session_proxy
    session_proxy.heal()


@pytest.fixture(scope="session")
def session_engines() -> Iterator[FakeEngines]:
    engines = FakeEngines()
    yield engines
    engines.close()


@pytest.fixture
def engines(session_engines: FakeEngines) -> Iterator[FakeEngines]:
    yield session_engines
    session_engines.reset()


@pytest.fixture(scope="session")
def session_client(control_plane: ControlPlane) -> Iterator[ClusterClient]:
    client = ClusterClient(control_plane.url, control_plane.admin_token, control_plane.ca_file)
    yield client
    client.close()


@pytest.fixture
def client(session_client: ClusterClient) -> Iterator[ClusterClient]:
    """A client of a fresh namespace, which goes in the background when the test has ended."""
    client = session_client.make_namespace(f"t{uuid.uuid4().hex[:6]}")
    yield client
    client.remove_namespace()


@pytest.fixture
def start_operator(
    control_plane: ControlPlane, proxy: FaultProxy, client: ClusterClient, tmp_path: Path
) -> Iterator[StartOperator]:
    """Starts a replica that watches this test's namespace, unless told otherwise."""
    started: list[OperatorProcess] = []

    def start(
        name: str = "op", *, token: str = "", version: Path | None = None, **settings: str
    ) -> OperatorProcess:
        number = len(started)
        kubeconfig = write_kubeconfig(
            tmp_path / f"{name}-{number}.kubeconfig",
            server=proxy.listen(name),
            token=token or control_plane.admin_token,
        )
        operator = OperatorProcess(
            name,
            kubeconfig,
            tmp_path / f"{name}.log",
            {
                "namespaces": client.namespace,
                "lease_namespace": client.namespace,
                "identity": f"{name}-{number}",
                **settings,
            },
            python_path=(version,) if version is not None else (),
        )
        started.append(operator)
        return operator.start()

    yield start
    for operator in started:
        operator.kill()


@pytest.fixture
def operator(start_operator: StartOperator) -> OperatorProcess:
    return start_operator().wait_acting()


@pytest.fixture
def make_tpi() -> Callable[..., dict[str, Any]]:
    """The smallest TPInference that comes up on fake nodes."""

    def make(name: str = "llm", **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "serving.tpinference.dev/v1alpha1",
            "kind": "TPInference",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": "file:///models/tiny"},
                "engine": {"device": "CPU", "image": "example.invalid/engine:1"},
                "parallelism": {"tensor": 2, "gpusPerNode": 1},
                "updateStrategy": {"drainSeconds": 1},
                **spec,
            },
        }

    return make


@pytest.fixture
def operator_at_own_pace(start_operator: StartOperator) -> OperatorProcess:
    """With the defaults for how often it looks, as it is installed."""
    return start_operator(**{name: default_of(name) for name in PACE}).wait_acting()


def default_of(name: str) -> str:
    return next(option.default for option in OPTIONS if option.field == name)


@pytest.fixture
def measure_lag(capsys: pytest.CaptureFixture[str]) -> LagMeter:
    return LagMeter(capsys.disabled)


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_for


@pytest.fixture
def make_fault() -> Callable[..., Fault]:
    return Fault
