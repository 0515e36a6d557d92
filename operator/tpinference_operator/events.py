"""Our own Kubernetes Events: one for a condition that flipped, one for a group that was deleted.

Posting never holds a reconcile up and its failure is only logged: an Event is a courtesy. Knows
conditions by their type and status, not what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tpinference_operator import names
from tpinference_operator.api.status import Condition
from tpinference_operator.errors import ApiError, NamespaceEnding
from tpinference_operator.kube import EVENT, Body, Kube

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
MAX_NOTE = 1024
TOLD = frozenset({"Accepted", "Available", "Degraded", "Ready", "Stalled"})
"""Conditions worth an Event; the others are steps on the way, and the status has them."""
NEGATIVE = frozenset({"Degraded", "Stalled"})
"""Conditions for which True is the bad news."""


@dataclass(frozen=True, slots=True)
class Note:
    """What an Event says."""

    warning: bool
    reason: str
    message: str


def transitions(old: Iterable[Condition], new: Iterable[Condition]) -> list[Note]:
    """A note for each condition whose status flipped. New ones start as what is the case before
    anything happened: nothing is ready, and nothing is wrong."""
    before = {condition.type: condition.status for condition in old}
    notes = []
    for condition in new:
        is_bad = condition.status == ("True" if condition.type in NEGATIVE else "False")
        at_first = "True" if condition.type == "Accepted" else "False"
        was = before.get(condition.type, at_first)
        if condition.type in TOLD and condition.status not in (was, "Unknown"):
            text = f"{condition.type} is {condition.status}: {condition.message}"
            notes.append(Note(is_bad, condition.reason, text.rstrip(": ")))
    return notes


def render_event(owner: Mapping[str, Any], note: Note, now: datetime) -> Body:
    metadata = owner["metadata"]
    time = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message[:MAX_NOTE],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


class EventPoster:
    """Posts Events one after the other in the background."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._waiting: asyncio.Queue[Body] = asyncio.Queue(MAX_WAITING)

    def post(self, owner: Mapping[str, Any], notes: Iterable[Note]) -> None:
        for note in notes:
            try:
                self._waiting.put_nowait(render_event(owner, note, datetime.now(UTC)))
            except asyncio.QueueFull:
                logger.warning("too many Events wait; dropped %s: %s", note.reason, note.message)

    async def run(self) -> None:
        while True:
            event = await self._waiting.get()
            try:
                await self._kube.create(EVENT, event["metadata"]["namespace"], event)
            except NamespaceEnding as error:
                logger.debug("an Event was not posted: %s", error)
            except ApiError as error:
                logger.warning("an Event was not posted: %s", error)
