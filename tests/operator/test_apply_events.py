"""events.py and child_events.py: what is told, and what is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tpinference_operator.api.status import Condition
from tpinference_operator.child_events import ChildEvents
from tpinference_operator.errors import ApiUnavailable
from tpinference_operator.events import EventPoster, Note, transitions
from tpinference_operator.kube import Kube, Request

EVENTS = "/api/v1/namespaces/ns/events"
KEY = ("ns", "llm")
OWNER = {"metadata": {"name": "llm", "namespace": "ns", "uid": "t"}}


def condition(kind: str, status: Any, reason: str = "Why", message: str = "m") -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time="2026-01-01T00:00:00Z",
    )


def test_a_flip_is_told_and_a_new_message_is_not() -> None:
    old = [condition("Ready", "False"), condition("Progressing", "True", message="old")]
    new = [condition("Ready", "True"), condition("Progressing", "True", message="new")]
    assert transitions(old, new) == [Note(False, "Why", "Ready is True: m")]


def test_at_the_start_only_what_is_not_as_expected_is_told() -> None:
    new = [
        condition("Ready", "False"),
        condition("Degraded", "False"),
        condition("Accepted", "False"),
        condition("Scheduled", "True"),
    ]
    assert [note.message for note in transitions([], new)] == ["Accepted is False: m"]


@pytest.mark.parametrize(("status", "warning"), [("True", True), ("False", False)])
def test_for_a_negative_condition_true_is_the_warning(status: str, warning: bool) -> None:
    old = [condition("Degraded", "Unknown")]
    (note,) = transitions(old, [condition("Degraded", status)])
    assert note.warning is warning


async def test_a_failed_post_stops_no_other(api: Any, kube: Kube) -> None:
    failures = iter([ApiUnavailable("down")])
    posted = asyncio.Event()

    def refuse(request: Request) -> ApiUnavailable | None:
        failed = next(failures, None)
        if failed is None:
            posted.set()
        return failed

    api.refuse = refuse
    poster = EventPoster(kube)
    poster.post(OWNER, [Note(True, "First", "a"), Note(False, "Second", "b" * 2000)])
    task = asyncio.create_task(poster.run())
    await asyncio.wait_for(posted.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    body = api.sent[-1].body
    assert (body["reason"], body["type"], len(body["message"])) == ("Second", "Normal", 1024)
    assert body["involvedObject"]["uid"] == "t"
    assert body["involvedObject"]["kind"] == "TPInference"


def event(name: str, uid: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name}, "involvedObject": {"uid": uid}}


async def test_events_are_listed_for_named_children_at_most_every_five_seconds(
    api: Any, kube: Kube
) -> None:
    now = [0.0]
    events = ChildEvents(kube, clock=lambda: now[0])
    api.put(f"{EVENTS}/e1", event("e1", "c1"))
    api.put(f"{EVENTS}/e2", event("e2", "other"))
    assert await events.refresh(KEY, ["c1"]) == 0.0
    assert [e["metadata"]["name"] for e in events.of(KEY)] == ["e1"]
    assert await events.refresh(KEY, ["c1"]) == 5.0
    assert len(api.sent) == 1
    now[0] = 5.0
    assert await events.refresh(KEY, ["c1"]) is None
    assert len(api.sent) == 2
    api.put(f"{EVENTS}/e3", event("e3", "c1"))
    now[0] = 10.0
    assert await events.refresh(KEY, ["c1"]) == 0.0
    assert {e["metadata"]["name"] for e in events.of(KEY)} == {"e1", "e3"}


async def test_a_listing_that_would_come_too_early_is_made_up_for(api: Any, kube: Kube) -> None:
    """A look that another event brings must not put the next listing off for as long again."""
    now = [0.0]
    events = ChildEvents(kube, clock=lambda: now[0])
    await events.refresh(KEY, ["c1"])
    now[0] = 4.0
    assert await events.refresh(KEY, ["c1", "c2"]) == 1.0
    assert [r.query["fieldSelector"][-2:] for r in api.sent] == ["c1", "c2"]


async def test_events_of_a_child_that_moves_again_are_forgotten(api: Any, kube: Kube) -> None:
    events = ChildEvents(kube)
    api.put(f"{EVENTS}/e1", event("e1", "c1"))
    await events.refresh(KEY, ["c1"])
    await events.refresh(KEY, [])
    assert (events.of(KEY), len(api.sent)) == ((), 1)
