"""What kopf is used for: watching and indexing. Handlers only enqueue keys and return None.

Of kopf's decorators only index, on.event, on.startup and on.login appear here: these write nothing.
Any other would put a finalizer, an annotation or a status of kopf's own on people's objects. All
are coroutines: kopf runs plain functions on threads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from tpinference_operator import cache, names
from tpinference_operator.controller import Controller, Key
from tpinference_operator.engine_client import EngineWatch
from tpinference_operator.login import OnResponse, open_session

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind that is watched, and the API group that must be served for it."""

    group: str
    version: str
    plural: str
    labelled: bool = True
    """Only objects with our name label are asked for."""

    @property
    def selector(self) -> tuple[str, str, str]:
        return (self.group, self.version, self.plural)

    def path(self, namespace: str | None) -> str:
        """Where kopf lists and watches it; None = in all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return (
            f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"
        )


OWNER = Watched(names.GROUP, names.VERSION, cache.OWNERS, labelled=False)
RAYCLUSTERS = Watched("ray.io", "v1", cache.RAYCLUSTERS)
CORE = (
    Watched("", "v1", cache.PODS),
    Watched("", "v1", cache.SERVICES),
    Watched("apps", "v1", cache.REVISIONS),
)
WATCHED = (OWNER, RAYCLUSTERS, *CORE)


@dataclass(frozen=True)
class Wiring:
    """Where events go; kopf hands it to the handlers as `memo`."""

    cache: cache.Cache
    controller: Controller
    engines: EngineWatch
    configuration: Configuration
    on_response: OnResponse
    on_started: Callable[[], None]
    logins: LoginBackoff


class LoginBackoff:
    """kopf logs in again after each 401, and would do so without a pause."""

    DELAYS_S = (0.0, 1.0, 2.0, 5.0, 10.0)

    def __init__(self) -> None:
        self._num_tries = 0

    def next_delay_s(self) -> float:
        delay_s = self.DELAYS_S[min(self._num_tries, len(self.DELAYS_S) - 1)]
        self._num_tries += 1
        return delay_s

    def succeeded(self) -> None:
        self._num_tries = 0


class Backoffs:
    """Delays between tries, without end: kopf iterates it anew for each request."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1, 2, 4, 8, 15), itertools.repeat(30.0))


def watched_kinds(*, with_ray: bool) -> tuple[Watched, ...]:
    return tuple(kind for kind in WATCHED if with_ray or kind is not RAYCLUSTERS)


def build_registry(*, with_ray: bool) -> kopf.OperatorRegistry:
    """`with_ray`: whether ray.io/v1 is served; kopf never sees a CRD that comes later."""
    registry = kopf.OperatorRegistry()
    kopf.on.startup(registry=registry)(on_startup)
    kopf.on.login(registry=registry)(on_login)
    for kind in watched_kinds(with_ray=with_ray):
        kopf.index(*kind.selector, id=kind.plural, param=kind, registry=registry)(index)
        kopf.on.event(*kind.selector, id=f"{kind.plural}-event", param=kind, registry=registry)(
            on_event
        )
    return registry


def build_settings() -> kopf.OperatorSettings:
    """Watch, and nothing else: no Events, no scanning of other CRDs, no giving up."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.queueing.exit_timeout = 1.0
    for kind in WATCHED:
        if kind.labelled:
            settings.watching.label_selectors[kind.selector] = names.NAME_LABEL
    return settings


async def on_startup(*, memo: Wiring, **_: Any) -> None:
    # kopf takes over SIGTERM between making this handler's task and its second turn.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    memo.on_started()


async def on_login(*, memo: Wiring, **_: Any) -> kopf.AiohttpSession:
    await asyncio.sleep(memo.logins.next_delay_s())

    def on_response(method: str, path: str, is_watch: bool) -> None:
        memo.logins.succeeded()
        memo.on_response(method, path, is_watch)

    session = open_session(memo.configuration, on_response)
    return kopf.AiohttpSession(server=memo.configuration.host, aiohttp_session=session)


async def index(*, body: Body, param: Any = None, **_: Any) -> dict[Key, Body]:
    key = key_of(body, param)
    return {key: cache.slim_body(body)} if key is not None else {}


async def on_event(
    *, event: kopf.RawEvent, body: Body, memo: Wiring, param: Any = None, **indexes: Any
) -> None:
    """By the time that kopf calls this for the first time, all its indexes are complete."""
    memo.cache.attach(
        {kind.plural: indexes[kind.plural] for kind in WATCHED if kind.plural in indexes}
    )
    kind: Watched = param
    key = key_of(body, kind)
    if key is None:
        return
    gone = event["type"] == "DELETED"
    memo.cache.seen(kind.plural, body, gone=gone)
    if kind.plural == cache.PODS:
        if gone:
            memo.engines.pod_gone(body["metadata"]["uid"])
        else:
            memo.engines.pod_seen(key, body)
    if kind is not OWNER:
        memo.controller.enqueue(key)
    elif gone:
        memo.controller.enqueue_gone(key)
    else:
        memo.controller.enqueue_owner(key, body["metadata"].get("generation", 0))


def key_of(body: Body, kind: Watched) -> Key | None:
    if kind is OWNER:
        return (body["metadata"]["namespace"], body["metadata"]["name"])
    return cache.owner_key(body)
