"""When nothing happens, nothing is sent; one replica acts, whatever happens to it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from harness.operator_process import SHORT_LEASE

pytestmark = pytest.mark.timeout(180)

NUM_RESYNCS = 10


def test_ten_resyncs_and_a_restart_send_nothing_but_watches_and_the_lease(
    start_operator: Any, proxy: Any, client: Any, make_tpi: Any, engines: Any, eventually: Any
) -> None:
    operator = start_operator(resync_seconds="0.5").wait_acting()
    client.create("tpinferences", make_tpi(replicas=2))
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    settle(operator, client, eventually)
    before, mark, num_reconciles = client.snapshot(), proxy.mark(), reconciles(operator)
    num_asked = len(engines.asked)
    eventually(
        "ten resyncs",
        lambda: reconciles(operator) >= num_reconciles + NUM_RESYNCS,
        timeout_s=60,
    )
    eventually("the engines to be asked", lambda: len(engines.asked) > num_asked, timeout_s=60)
    assert [str(seen) for seen in proxy.since(mark) if is_unexpected(seen)] == []
    assert client.snapshot() == before

    assert operator.stop() == 0
    mark = proxy.mark()
    successor = start_operator("op2", resync_seconds="0.5").wait_acting()
    eventually("the restarted one to look", lambda: reconciles(successor) > 3, timeout_s=60)
    assert [str(seen) for seen in proxy.since(mark) if seen.is_write and not seen.is_lease] == []
    assert client.snapshot() == before


def test_two_replicas_act_as_one_and_a_killed_one_is_replaced(
    start_operator: Any, proxy: Any, client: Any, make_tpi: Any, eventually: Any
) -> None:
    first = start_operator("first", **SHORT_LEASE).wait_acting()
    second = start_operator("second", **SHORT_LEASE).wait_ready()
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=first.log_tail)
    assert writes(proxy, "second") == []
    assert not second.is_acting()
    first.kill()
    second.wait_acting()
    client.patch("tpinferences", "llm", {"spec": {"replicas": 2}})
    client.wait_condition("llm", "Ready", "True", describe=second.log_tail)
    assert len(client.list("rayclusters")) == 2


def test_a_clean_stop_hands_the_lease_over_at_once(start_operator: Any, client: Any) -> None:
    first = start_operator("first").wait_acting()
    second = start_operator("second").wait_ready()
    assert first.stop() == 0
    second.wait_acting()
    (lease,) = client.list("leases")
    assert lease["spec"]["holderIdentity"] == "second-1"


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_a_lease_that_can_not_be_renewed_ends_the_acting_one(
    start_operator: Any, proxy: Any, make_fault: Any, kind: str
) -> None:
    first = start_operator("first", **SHORT_LEASE).wait_acting()
    second = start_operator("second", **SHORT_LEASE).wait_ready()

    def is_firsts_lease(seen: Any) -> bool:
        return bool(seen.client == "first" and seen.is_lease)

    delay_s = 0.0 if kind == "refused" else 30.0
    proxy.inject(make_fault(is_firsts_lease, status=503, delay_s=delay_s))
    assert first.wait_ended(timeout_s=20) == 3
    second.wait_acting()


def test_a_stolen_lease_ends_the_acting_one(start_operator: Any, client: Any) -> None:
    operator = start_operator().wait_acting()
    client.patch("leases", "tpinference-operator", {"spec": {"holderIdentity": "thief"}})
    assert operator.wait_ended(timeout_s=20) == 3


def test_a_process_that_was_frozen_writes_nothing_when_it_thaws(
    start_operator: Any, proxy: Any, client: Any, make_tpi: Any
) -> None:
    first = start_operator("first", **SHORT_LEASE).wait_acting()
    second = start_operator("second", **SHORT_LEASE).wait_ready()
    os.kill(first.pid, signal.SIGSTOP)
    try:
        client.create("tpinferences", make_tpi())
        second.wait_acting()
        client.wait_condition("llm", "Ready", "True", describe=second.log_tail)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait_ended() == 3
    assert writes(proxy, "first") == []


def settle(operator: Any, client: Any, eventually: Any) -> None:
    """The last status write and its echo are through: two looks at the same versions."""
    seen: list[dict[str, str]] = []

    def is_same_after_three_looks() -> bool:
        wanted = reconciles(operator) + 3
        seen.append(client.snapshot())
        eventually("three looks", lambda: reconciles(operator) >= wanted, timeout_s=60)
        return bool(client.snapshot() == seen[-1])

    eventually("everything to settle", is_same_after_three_looks, timeout_s=60)


def reconciles(operator: Any) -> int:
    return int(operator.metric("tpinference_operator_reconcile_seconds_count"))


def is_unexpected(seen: Any) -> bool:
    return not (seen.is_watch or seen.is_lease or seen.is_discovery)


def writes(proxy: Any, client: str) -> list[str]:
    return [str(s) for s in proxy.since(0, client) if s.is_write and not s.is_lease]
