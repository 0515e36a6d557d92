"""reconcile.py's StatusWriter: written on change only, and not more often than it must be."""

from __future__ import annotations

from typing import Any

import pytest

from tpinference_operator import cache as views
from tpinference_operator.api.status import Condition, TPInferenceStatus
from tpinference_operator.cache import Cache
from tpinference_operator.errors import ApiConflict
from tpinference_operator.events import EventPoster
from tpinference_operator.kube import Kube
from tpinference_operator.metrics import Metrics
from tpinference_operator.reconcile import StatusWriter

KEY = ("ns", "llm")
PATH = "/apis/serving.tpinference.dev/v1alpha1/namespaces/ns/tpinferences/llm"


def status(ready: Any, message: str) -> TPInferenceStatus:
    condition = Condition(
        type="Ready",
        status=ready,
        reason="Why",
        message=message,
        observed_generation=1,
        last_transition_time="2026-01-01T00:00:00Z",
    )
    return TPInferenceStatus(observed_generation=1, conditions=[condition])


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def owner(api: Any) -> dict[str, Any]:
    body = {
        "apiVersion": "serving.tpinference.dev/v1alpha1",
        "kind": "TPInference",
        "metadata": {"name": "llm", "namespace": "ns", "uid": "t", "generation": 1},
        "spec": {},
    }
    return dict(api.put(PATH, body))


@pytest.fixture
def writer(kube: Kube, cache: Cache) -> StatusWriter:
    return StatusWriter(kube, cache, EventPoster(kube), Metrics())


async def test_the_first_status_is_written_and_the_same_is_not_written_again(
    api: Any, writer: StatusWriter, cache: Cache, owner: dict[str, Any]
) -> None:
    await writer.write(KEY, owner, status("False", "a"))
    newest = cache.owner(KEY)
    assert newest is not None and newest["status"]["conditions"][0]["message"] == "a"
    await writer.write(KEY, newest, status("False", "a"))
    assert await writer.write_soon(KEY, newest, status("False", "a")) is None
    assert api.writes == [("PUT", f"{PATH}/status")]


async def test_a_new_message_waits_for_two_seconds_and_a_flip_does_not(
    api: Any, writer: StatusWriter, cache: Cache, owner: dict[str, Any]
) -> None:
    await writer.write(KEY, owner, status("False", "a"))
    newest = cache.children(views.OWNERS, KEY)[0]
    later_s = await writer.write_soon(KEY, newest, status("False", "b"))
    assert later_s is not None and 1.0 < later_s <= 2.0
    assert len(api.writes) == 1
    assert await writer.write_soon(KEY, newest, status("True", "c")) is None
    assert len(api.writes) == 2


async def test_a_status_that_stands_on_an_old_version_is_refused(
    api: Any, writer: StatusWriter, owner: dict[str, Any]
) -> None:
    stale = {**owner, "metadata": dict(owner["metadata"])}
    api.put(PATH, owner)
    with pytest.raises(ApiConflict):
        await writer.write(KEY, stale, status("True", "a"))
