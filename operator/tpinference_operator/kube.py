"""The only HTTP to the cluster besides kopf's watches: raw dicts over a fixed table of paths.

Every call has a time-out, every answer other than success is one of the errors in errors.py, and a
call that the table does not allow is never sent: the chart's Role is compared with this table.
Knows no TPInference logic.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.rest import RESTClientObject

from tpinference_operator import names
from tpinference_operator.errors import (
    AlreadyExists,
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiUnavailable,
    NamespaceEnding,
    NotFound,
)
from tpinference_operator.login import auth_headers

logger = logging.getLogger(__name__)

Body = dict[str, Any]

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

WRITE_VERBS = frozenset({"create", "update", "patch", "delete"})

NO_VERSION = "1"
"""A resourceVersion that no object has: with it, server-side apply creates or is refused. Versions
are revisions of the whole store, and its first belongs to the empty one."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One row of the path table: a namespaced kind and what kube.py may do with it."""

    group: str
    version: str
    plural: str
    verbs: frozenset[str]
    subresource: str = ""

    @property
    def name(self) -> str:
        """The resource as RBAC spells it."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, "namespaces", namespace, self.plural, name, self.subresource]
        return "/".join(part for part in parts if part)


def _row(group: str, version: str, plural: str, verbs: str, subresource: str = "") -> Resource:
    return Resource(group, version, plural, frozenset(verbs.split()), subresource)


TPINFERENCE_STATUS = _row(names.GROUP, names.VERSION, names.PLURAL, "update", "status")
RAYCLUSTER = _row("ray.io", "v1", "rayclusters", "get create patch delete")
CONTROLLER_REVISION = _row("apps", "v1", "controllerrevisions", "get create patch delete")
# An apply that makes the object needs "create" too; the API server asks for it by itself.
SERVICE = _row("", "v1", "services", "get create patch")
POD = _row("", "v1", "pods", "patch")
EVENT = _row("", "v1", "events", "list create")
LEASE = _row("coordination.k8s.io", "v1", "leases", "get create update")

TABLE = (TPINFERENCE_STATUS, RAYCLUSTER, CONTROLLER_REVISION, SERVICE, POD, EVENT, LEASE)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, ready to send."""

    verb: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Body | None = None
    content_type: str = JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `body` is empty where it was no JSON object."""

    status: int
    body: Body
    retry_after_s: float = 0.0


class Transport(Protocol):
    async def send(self, request: Request, timeout_s: float) -> Answer:
        """Raises ApiUnavailable when there is no answer in time."""
        ...


class HttpTransport(RESTClientObject):  # type: ignore[misc]
    """kubernetes.aio's session (TLS, proxy) without its models, retries and default time-out."""

    async def send(self, request: Request, timeout_s: float) -> Answer:
        query = f"?{urlencode(request.query)}" if request.query else ""
        try:
            response = await self._request(request, query, timeout_s)
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnavailable(
                f"{request.method} {request.path}: no answer: {error!r}", reason="NoAnswer"
            ) from error
        except asyncio.CancelledError as error:
            if was_cancelled():
                raise
            raise ApiUnavailable(
                f"{request.method} {request.path}: interrupted", reason="NoAnswer"
            ) from error
        retry_after = response.headers.get("Retry-After", "")
        return Answer(
            response.status, _parse(text), float(retry_after) if retry_after.isdigit() else 0.0
        )

    async def _request(
        self, request: Request, query: str, timeout_s: float
    ) -> aiohttp.ClientResponse:
        headers = await auth_headers(self.configuration)
        headers |= {"Content-Type": request.content_type, "Accept": JSON}
        return await self._session().request(
            request.method,
            f"{self.configuration.host}{request.path}{query}",
            data=canonical_json(request.body) if request.body is not None else None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            proxy=self.proxy,
            server_hostname=self.configuration.tls_server_name,
        )

    def _session(self) -> aiohttp.ClientSession:
        """Made on first use, in the loop that it is used in; `close` is the base class's."""
        session: aiohttp.ClientSession | None = getattr(self, "pool_manager", None)
        if session is None:
            session = self._create_pool_manager()
            self.pool_manager = session
        return session


def canonical_json(body: Body) -> bytes:
    """As Go writes JSON. The data of a ControllerRevision is immutable byte for byte, and any
    patch of it, also the garbage collector's own when it orphans, writes them as Go does."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


class Kube:
    """The calls that the table allows. `fence` raises when a write must not be sent."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout_s: float,
        fence: Callable[[], None] = lambda: None,
        on_request: Callable[[str, str, int, float], None] = lambda *_: None,
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._fence = fence
        self._on_request = on_request

    def fenced(self, fence: Callable[[], None]) -> Kube:
        """The same, with `fence` before every write."""
        return Kube(
            self._transport, timeout_s=self._timeout_s, fence=fence, on_request=self._on_request
        )

    async def get(
        self, resource: Resource, namespace: str, name: str, *, timeout_s: float | None = None
    ) -> Body:
        return await self._call(
            resource, Request("get", "GET", resource.path(namespace, name), {}), timeout_s
        )

    async def list_by_field(self, resource: Resource, namespace: str, selector: str) -> list[Body]:
        """At most 50 objects: an input of a decision, not a cache."""
        query = {"fieldSelector": selector, "limit": "50"}
        found = await self._call(resource, Request("list", "GET", resource.path(namespace), query))
        items: list[Body] = found.get("items") or []
        return items

    async def create(
        self, resource: Resource, namespace: str, body: Body, *, timeout_s: float | None = None
    ) -> Body:
        query = {"fieldManager": names.FIELD_MANAGER}
        request = Request("create", "POST", resource.path(namespace), query, body)
        return await self._call(resource, request, timeout_s)

    async def replace(
        self, resource: Resource, namespace: str, body: Body, *, timeout_s: float | None = None
    ) -> Body:
        """`body` carries the resourceVersion it was read at: a change in between is ApiConflict."""
        if not body["metadata"].get("resourceVersion"):
            raise ValueError(f"replace of {resource.name} without resourceVersion")
        path = resource.path(namespace, body["metadata"]["name"])
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._call(resource, Request("update", "PUT", path, query, body), timeout_s)

    async def apply(
        self, resource: Resource, namespace: str, body: Body, *, uid: str | None
    ) -> Body:
        """Server-side apply. With `uid`, of that very object, and its fields are taken by force.

        Without, the object is made; one that is there already, whoever's it is, is ApiConflict.
        """
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true" if uid else "false"}
        metadata = body["metadata"] | ({"uid": uid} if uid else {"resourceVersion": NO_VERSION})
        request = Request(
            "patch",
            "PATCH",
            resource.path(namespace, metadata["name"]),
            query,
            body | {"metadata": metadata},
            APPLY_PATCH,
        )
        return await self._call(resource, request)

    async def patch(
        self, resource: Resource, namespace: str, name: str, *, uid: str, patch: Body
    ) -> Body:
        """A merge patch of that very object: another one of its name is ApiConflict."""
        metadata = patch.get("metadata", {}) | {"uid": uid}
        request = Request(
            "patch",
            "PATCH",
            resource.path(namespace, name),
            {"fieldManager": names.FIELD_MANAGER},
            patch | {"metadata": metadata},
            MERGE_PATCH,
        )
        return await self._call(resource, request)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_period_s: int | None = None,
    ) -> None:
        """Deletes that very object and, in the background, what it owns."""
        options: Body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_period_s is not None:
            options["gracePeriodSeconds"] = grace_period_s
        path = resource.path(namespace, name)
        await self._call(resource, Request("delete", "DELETE", path, {}, options))

    async def discover(self, path: str) -> Body | None:
        """A discovery document; None if that group is not served."""
        request = Request("get", "GET", path, {})
        try:
            return await self._send(request, "discovery", None)
        except NotFound:
            return None

    async def _call(
        self, resource: Resource, request: Request, timeout_s: float | None = None
    ) -> Body:
        if request.verb not in resource.verbs:
            raise ValueError(f"{request.verb} {resource.name} is not in the table of calls")
        if request.verb in WRITE_VERBS:
            self._fence()
            level = logging.DEBUG if resource is LEASE else logging.INFO
            logger.log(level, "%s %s", request.method, request.path)
        return await self._send(request, resource.name, timeout_s)

    async def _send(self, request: Request, resource: str, timeout_s: float | None) -> Body:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        status = 0
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._transport.send(request, timeout_s)
            status = answer.status
        except TimeoutError as error:
            raise ApiUnavailable(
                f"{request.method} {request.path}: no answer in {timeout_s:g} s", reason="NoAnswer"
            ) from error
        finally:
            self._on_request(request.verb, resource, status, time.monotonic() - start)
        if answer.status >= 400:
            raise error_of(request, answer)
        return answer.body


def error_of(request: Request, answer: Answer) -> ApiError:
    """The error for an answer; the message is the API server's own."""
    reason = str(answer.body.get("reason") or "")
    said = answer.body.get("message") or f"status {answer.status}"
    message = f"{request.method} {request.path}: {said}"
    error_class = NamespaceEnding if _is_ending(answer) else _error_class(answer.status, reason)
    return error_class(
        message, status=answer.status, reason=reason, retry_after_s=answer.retry_after_s
    )


def _error_class(status: int, reason: str) -> type[ApiError]:
    if status in (401, 403):
        return ApiForbidden
    if status == 404:
        return NotFound
    if status == 409:
        return AlreadyExists if reason == "AlreadyExists" else ApiConflict
    # 410 asks for a fresh read, which the next reconcile is.
    if status in (410, 429) or status >= 500:
        return ApiUnavailable
    return ApiError


def _is_ending(answer: Answer) -> bool:
    causes = (answer.body.get("details") or {}).get("causes") or ()
    return answer.status == 403 and any(c.get("reason") == "NamespaceTerminating" for c in causes)


def was_cancelled() -> bool:
    """False inside `except CancelledError` when only a task below this one was cancelled: kopf
    cancels, when it restarts, what the HTTP client has started since."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _parse(text: bytes) -> Body:
    """The JSON object in an answer; a proxy's HTML becomes a message."""
    try:
        body = json.loads(text) if text else {}
    except ValueError:
        return {"message": text[:200].decode(errors="replace")}
    return body if isinstance(body, dict) else {}
