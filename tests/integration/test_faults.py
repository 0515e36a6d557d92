"""The API server refuses, delays, loses answers, forgets: it converges all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)


def is_write(seen: Any) -> bool:
    return bool(seen.is_write and not seen.is_lease)


def is_status(seen: Any) -> bool:
    return bool(seen.path.endswith("/status"))


def is_create_of_rayclusters(seen: Any) -> bool:
    return bool(seen.method == "POST" and seen.path.endswith("/rayclusters"))


def is_any(seen: Any) -> bool:
    return not seen.is_lease


FAULTS: dict[str, dict[str, Any]] = {
    "409 on status": {
        "matches": is_status,
        "status": 409,
        "reason": "Conflict",
        "times": 3,
    },
    "429": {
        "matches": is_write,
        "status": 429,
        "reason": "TooManyRequests",
        "headers": {"Retry-After": "1"},
        "times": 3,
    },
    "500": {"matches": is_write, "status": 500, "reason": "InternalError", "times": 3},
    "slow": {"matches": is_write, "delay_s": 1.0, "only_delay": True, "times": 4},
    "lost answers": {"matches": is_write, "lose_answer": True, "times": 4},
    "everything 503": {"matches": is_any, "times": 12},
    "everything 401": {
        "matches": is_any,
        "status": 401,
        "reason": "Unauthorized",
        "times": 4,
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_converges_under(
    fault: str, operator: Any, proxy: Any, client: Any, make_tpi: Any, make_fault: Any
) -> None:
    proxy.inject(make_fault(**FAULTS[fault]))
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    assert len(client.list("rayclusters")) == 1
    assert len(client.list("controllerrevisions")) == 1
    assert operator.is_running


def test_a_namespace_that_is_deleted_meanwhile_is_no_failure(
    start_operator: Any, proxy: Any, client: Any, make_tpi: Any, make_fault: Any, eventually: Any
) -> None:
    """A create that was decided on before comes too late."""
    elsewhere = {"lease_namespace": "default", "lease_name": client.namespace}
    operator = start_operator(**elsewhere).wait_acting()
    proxy.inject(make_fault(is_create_of_rayclusters, delay_s=3.0, only_delay=True))
    client.create("tpinferences", make_tpi())
    eventually(
        "the decision to be recorded",
        lambda: client.get("tpinferences", "llm").get("status", {}).get("groups"),
        timeout_s=60,
        describe=operator.log_tail,
    )
    client.remove_namespace()
    eventually(
        "the namespace to go",
        lambda: client.get("tpinferences", "llm") is None,
        timeout_s=60,
        describe=operator.log_tail,
    )
    tries = [seen.status for seen in proxy.since(0) if is_create_of_rayclusters(seen)]
    assert tries == [403]
    assert "nothing more to do" in operator.log_tail()
    assert operator.metric("tpinference_operator_reconcile_errors_total") == 0
    assert "again in" not in operator.log_tail()


def test_a_lasting_refusal_is_tried_ever_more_slowly(
    operator: Any, proxy: Any, client: Any, make_tpi: Any, make_fault: Any, eventually: Any
) -> None:
    proxy.inject(make_fault(is_create_of_rayclusters, status=500))
    client.create("tpinferences", make_tpi())

    def tries() -> list[Any]:
        return [seen for seen in proxy.since(0) if is_create_of_rayclusters(seen)]

    eventually("some tries", lambda: len(tries()) >= 4, timeout_s=60, describe=operator.log_tail)
    times = [seen.at for seen in tries()[:4]]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps == sorted(gaps), gaps
    assert gaps[-1] > 3 * gaps[0], gaps
    proxy.heal()
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_what_was_deleted_while_a_watch_was_broken_is_noticed(
    operator: Any, proxy: Any, client: Any, make_tpi: Any, make_fault: Any, eventually: Any
) -> None:
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    old = client.get("services", "llm")["metadata"]["uid"]

    def is_service_watch(seen: Any) -> bool:
        return bool(seen.is_watch and seen.path.endswith("/services"))

    proxy.inject(make_fault(is_service_watch))
    proxy.cut_watches()
    eventually(
        "the broken watch to be tried again",
        lambda: [s for s in proxy.since(0) if is_service_watch(s) and s.status == 503],
        timeout_s=60,
    )
    client.delete("services", "llm")
    proxy.heal()
    proxy.inject(make_fault(is_service_watch, reason="Expired", expire_watch=True, times=1))

    def is_back() -> bool:
        service = client.get("services", "llm")
        return service is not None and service["metadata"]["uid"] != old

    eventually("the Service to be back", is_back, timeout_s=60, describe=operator.log_tail)
    assert operator.metric("tpinference_operator_watch_restarts_total") >= 1
    assert operator.is_running


def test_cut_watches_are_taken_up_again_and_nothing_is_written(
    operator: Any, proxy: Any, client: Any, make_tpi: Any, eventually: Any
) -> None:
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    num_watches = count_watches(proxy)
    mark = proxy.mark()
    proxy.cut_watches()
    eventually("new watches", lambda: count_watches(proxy) >= num_watches + 5, timeout_s=60)
    assert [s for s in proxy.since(mark) if s.method == "PATCH" or is_delete(s)] == []
    client.patch("tpinferences", "llm", {"spec": {"replicas": 2}})
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)


def test_a_forbidden_watch_is_said_and_survived(
    start_operator: Callable[..., Any], proxy: Any, make_fault: Any, eventually: Any
) -> None:
    def is_pods(seen: Any) -> bool:
        return bool(seen.path.endswith("/pods"))

    proxy.inject(make_fault(is_pods, status=403, reason="Forbidden"))
    operator = start_operator()
    eventually(
        "the missing list to be named",
        lambda: "/pods" in operator.get("/readyz")[1],
        timeout_s=60,
        describe=operator.log_tail,
    )
    assert operator.get("/readyz")[0] == 503
    assert operator.get("/livez")[0] == 200
    proxy.heal()
    operator.wait_acting()


def count_watches(proxy: Any) -> int:
    return sum(seen.is_watch and seen.status == 200 for seen in proxy.since(0))


def is_delete(seen: Any) -> bool:
    return bool(seen.method == "DELETE")
