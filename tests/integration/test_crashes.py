"""Killed after each single write, the operator goes on from what is there.

Each process does exactly one write and is killed before it has the answer; the next one takes
over. So every write of a scenario is once the last one before a crash. A Lease of its own for each
process saves the wait for the dead one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

MAX_CRASHES = 40


@pytest.fixture
def crash_until(start_operator: Any, proxy: Any, client: Any) -> Callable[..., int]:
    """Runs one process after the other, each until its first write, until `look` is true of a
    process that had nothing to write. Returns how many were killed."""
    serial = iter(range(1000))

    def run(look: Callable[[], bool], *, is_idle: Callable[[Any], bool]) -> int:
        for num_crashes in range(MAX_CRASHES):
            number = next(serial)
            operator = start_operator(f"op{number}", lease_name=f"lease{number}")
            proxy.kill_after_write(1, operator.kill)
            while operator.is_running:
                if look() and is_idle(operator):
                    proxy.heal()
                    operator.kill()
                    return num_crashes
                wait_a_look(operator)
        raise AssertionError(f"not there after {MAX_CRASHES} crashes\n{client.describe('llm')}")

    return run


@pytest.fixture
def settled(client: Any) -> Callable[..., bool]:
    def look(num_clusters: int, is_good: Callable[[Any], bool] = bool) -> bool:
        clusters = client.list("rayclusters")
        ready = client.condition("llm", "Ready")
        generation = client.get("tpinferences", "llm")["metadata"]["generation"]
        good = ready.get("status") == "True" and ready.get("observedGeneration") == generation
        return good and len(clusters) == num_clusters and all(map(is_good, clusters))

    return look


@pytest.fixture
def applied(start_operator: Any, client: Any, make_tpi: Any) -> Callable[..., None]:
    """A TPInference that is Ready, and no operator."""

    def apply(**spec: Any) -> None:
        operator = start_operator("before", lease_name="before").wait_acting()
        client.create("tpinferences", make_tpi(**spec))
        client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
        operator.stop()

    return apply


def test_apply(
    crash_until: Callable[..., int], settled: Callable[..., bool], client: Any, make_tpi: Any
) -> None:
    client.create("tpinferences", make_tpi())
    assert crash_until(lambda: settled(1), is_idle=has_looked) >= 4


def test_change(
    crash_until: Callable[..., int], settled: Callable[..., bool], client: Any, applied: Any
) -> None:
    applied()
    client.patch("tpinferences", "llm", {"spec": {"engine": {"maxModelLen": 512}}})
    assert crash_until(lambda: settled(1, has_new_length), is_idle=has_looked) >= 4
    (group,) = client.get("tpinferences", "llm")["status"]["groups"]
    assert group["epoch"] == 2


def test_scale_up(
    crash_until: Callable[..., int], settled: Callable[..., bool], client: Any, applied: Any
) -> None:
    applied()
    first = client.list("rayclusters")[0]["metadata"]["uid"]
    client.patch("tpinferences", "llm", {"spec": {"replicas": 2}})
    assert crash_until(lambda: settled(2), is_idle=has_looked) >= 2
    assert first in [body["metadata"]["uid"] for body in client.list("rayclusters")]


def test_scale_down(
    crash_until: Callable[..., int], settled: Callable[..., bool], client: Any, applied: Any
) -> None:
    applied(replicas=2)
    client.patch("tpinferences", "llm", {"spec": {"replicas": 1}})
    assert crash_until(lambda: settled(1), is_idle=has_looked) >= 2
    (cluster,) = client.list("rayclusters")
    assert cluster["metadata"]["labels"]["serving.tpinference.dev/ordinal"] == "0"


def test_delete(crash_until: Callable[..., int], client: Any, applied: Any) -> None:
    applied()
    client.delete("tpinferences", "llm")
    crash_until(lambda: client.snapshot() == {}, is_idle=lambda _: True)


def has_new_length(cluster: Any) -> bool:
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return "--max-model-len" in container["command"]


def has_looked(operator: Any) -> bool:
    """It acts, and has looked three times without a write."""
    return bool(
        operator.is_acting() and operator.metric("tpinference_operator_reconcile_seconds_count") > 3
    )


def wait_a_look(operator: Any) -> None:
    """A request to it takes a moment, and returns at once when it was killed."""
    operator.get("/livez")
