"""What the watches know, as one reconcile reads it: kopf's indexes and our own fresh writes.

An index lags behind the writes that this process made itself. Answers to those writes are kept
here until the index has caught up, so that a reconcile never decides twice on the same old view.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from tpinference_operator import names
from tpinference_operator.controller import Key

Body = dict[str, Any]

OWNERS = "tpinferences"
RAYCLUSTERS = "rayclusters"
PODS = "pods"
SERVICES = "services"
REVISIONS = "controllerrevisions"

PLURALS = (OWNERS, RAYCLUSTERS, PODS, SERVICES, REVISIONS)


class Index(Protocol):
    """The part of kopf's read-only index that is used here."""

    def __contains__(self, key: object) -> bool: ...
    def __getitem__(self, key: Key) -> Iterable[Body]: ...
    def __iter__(self) -> Iterator[Key]: ...


class Cache:
    """Complete once kopf has listed everything; then `attach`ed until kopf is restarted."""

    def __init__(self) -> None:
        self._indexes: Mapping[str, Index] = {}
        self._attached = asyncio.Event()
        self._written: dict[str, dict[str, tuple[Key, Body]]] = {plural: {} for plural in PLURALS}
        self._namesakes: dict[str, dict[Key, tuple[Body, bool]]] = {
            plural: {} for plural in PLURALS
        }

    def attach(self, indexes: Mapping[str, Index]) -> None:
        if not self._attached.is_set():
            self._indexes = indexes
            self._attached.set()

    def detach(self) -> None:
        """While kopf lists everything anew, no decision stands on half an index."""
        self._attached.clear()
        self._indexes = {}
        for written in self._written.values():
            written.clear()
        for namesakes in self._namesakes.values():
            namesakes.clear()

    def is_indexed(self) -> bool:
        return self._attached.is_set()

    async def wait_indexed(self) -> None:
        await self._attached.wait()

    def owner_keys(self) -> Iterable[Key]:
        index = self._indexes.get(OWNERS)
        return list(index) if index is not None else []

    def owner(self, key: Key) -> Body | None:
        return next(iter(self.children(OWNERS, key)), None)

    def children(self, plural: str, key: Key) -> list[Body]:
        """The newest known version of each object of that owner."""
        found = self._listed(plural, key)
        for uid, (owner, body) in self._written[plural].items():
            if owner == key and is_newer(body, found.get(uid)):
                found[uid] = body
        namesake, _ = self._namesakes[plural].get(key, (None, False))
        if namesake is not None:
            found.setdefault(namesake["metadata"]["uid"], namesake)
        return list(found.values())

    def show_namesake(self, plural: str, key: Key, body: Body) -> None:
        """An object that has a name we want. It may lack our labels, so no watch tells about it:
        the next look and what it decides see it, and the look after that asks again."""
        self._namesakes[plural][key] = (slim_body(body), False)

    def begin_look(self, key: Key) -> None:
        """A look begins: it sees the namesakes that were shown since the last one began."""
        for namesakes in self._namesakes.values():
            body, was_seen = namesakes.pop(key, (None, True))
            if body is not None and not was_seen:
                namesakes[key] = (body, True)

    def wrote(self, plural: str, key: Key, body: Body) -> None:
        """The API server's answer to a write of ours."""
        uid = body["metadata"]["uid"]
        if is_newer(body, self._listed(plural, key).get(uid)):
            self._written[plural][uid] = (key, slim_body(body))

    def deleted(self, plural: str, key: Key, uid: str) -> None:
        """Our delete went through: it is going, though the index does not say so yet."""
        for body in self.children(plural, key):
            if body["metadata"]["uid"] == uid and "deletionTimestamp" not in body["metadata"]:
                going = {**body["metadata"], "deletionTimestamp": now_text()}
                self._written[plural][uid] = (key, {**body, "metadata": going})

    def seen(self, plural: str, body: Mapping[str, Any], *, gone: bool) -> None:
        """An event came, whoever the object belongs to now: our own copy goes when the index is
        as new."""
        uid = body["metadata"]["uid"]
        _, mine = self._written[plural].get(uid, (None, None))
        if mine is not None and (gone or version_of(body) >= version_of(mine)):
            del self._written[plural][uid]

    def _listed(self, plural: str, key: Key) -> dict[str, Body]:
        index = self._indexes.get(plural)
        listed = index[key] if index is not None and key in index else ()
        return {body["metadata"]["uid"]: body for body in listed}


def is_newer(body: Body, known: Body | None) -> bool:
    """Whether `body` adds to what the index knows. An equal version does: a mark of our own."""
    return known is None or version_of(body) >= version_of(known)


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def version_of(body: Mapping[str, Any]) -> int:
    """resourceVersions of one kind are ordered numbers (documented since Kubernetes 1.34)."""
    version = str(body["metadata"].get("resourceVersion") or "0")
    return int(version) if version.isdecimal() else 0


def slim_body(body: Mapping[str, Any]) -> Body:
    """Without managedFields: half of an object's size, and nothing here reads them."""
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    return {**body, "metadata": metadata}


def owner_key(body: Mapping[str, Any]) -> Key | None:
    """Of which TPInference an object is: its controller, or what our label says of an orphan and
    of the pods, whose controller is the RayCluster."""
    metadata = body["metadata"]
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == names.KIND:
            return (metadata["namespace"], reference["name"])
    owner = (metadata.get("labels") or {}).get(names.NAME_LABEL)
    return (metadata["namespace"], owner) if owner else None
