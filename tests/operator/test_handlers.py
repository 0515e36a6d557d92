"""handlers.py: kopf only watches and indexes, and its handlers only enqueue."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import kopf
import pytest
from kopf._cogs.structs.references import Resource

from tpinference_operator import cache, names
from tpinference_operator.cache import Cache
from tpinference_operator.controller import Key
from tpinference_operator.handlers import (
    CORE,
    OWNER,
    RAYCLUSTERS,
    WATCHED,
    LoginBackoff,
    Watched,
    build_registry,
    build_settings,
    index,
    on_event,
)

POD = next(kind for kind in CORE if kind.plural == cache.PODS)


@pytest.mark.parametrize("with_ray", [True, False])
def test_no_handler_that_writes_is_registered(with_ray: bool) -> None:
    registry = build_registry(with_ray=with_ray)
    writing = (registry._webhooks, registry._spawning, registry._changing)
    assert [list(part.get_all_handlers()) for part in writing] == [[], [], []]
    assert {type(h).__name__ for h in registry._activities.get_all_handlers()} == {
        "ActivityHandler"
    }


@pytest.mark.parametrize("with_ray", [True, False])
def test_every_handler_is_a_coroutine_and_so_runs_in_the_event_loop(with_ray: bool) -> None:
    registry = build_registry(with_ray=with_ray)
    parts: Any = (registry._indexing, registry._watching, registry._activities)
    handlers = [handler.fn for part in parts for handler in part.get_all_handlers()]
    assert len(handlers) >= 10
    assert all(map(inspect.iscoroutinefunction, handlers))


def test_raycluster_handlers_only_where_ray_is_served() -> None:
    def plurals(with_ray: bool) -> set[str]:
        registry = build_registry(with_ray=with_ray)
        params = [handler.param for handler in registry._watching.get_all_handlers()]
        return {param.plural for param in params if isinstance(param, Watched)}

    assert plurals(True) - plurals(False) == {cache.RAYCLUSTERS}


@pytest.mark.parametrize("kind", WATCHED, ids=lambda kind: kind.plural)
def test_the_server_filters_by_our_label(kind: Watched) -> None:
    resource = Resource(kind.group, kind.version, kind.plural, namespaced=True)
    selectors = build_settings().watching.label_selectors.collect(resource)
    assert selectors == ([] if kind is OWNER else [names.NAME_LABEL])


def test_the_label_of_pods_is_not_asked_of_other_groups_pods() -> None:
    metrics = Resource("metrics.k8s.io", "v1beta1", "pods", namespaced=True)
    assert build_settings().watching.label_selectors.collect(metrics) == []


def test_kopf_never_gives_up_and_never_writes() -> None:
    settings = build_settings()
    backoffs: Any = settings.networking.error_backoffs
    first, second = iter(backoffs), iter(backoffs)
    assert [next(first) for _ in range(100)] == [next(second) for _ in range(100)]
    assert (settings.posting.enabled, settings.scanning.disabled) == (False, True)
    assert settings.process.ultimate_exiting_timeout is None


@dataclass
class Memo:
    """What on_event needs of the wiring."""

    cache: Cache = field(default_factory=Cache)
    enqueued: list[Key] = field(default_factory=list)
    pods: list[str] = field(default_factory=list)

    @property
    def controller(self) -> Memo:
        return self

    @property
    def engines(self) -> Memo:
        return self

    def enqueue(self, key: Key) -> None:
        self.enqueued.append(key)

    def enqueue_owner(self, key: Key, generation: int) -> None:
        self.enqueued.append(key)

    def pod_seen(self, key: Key, pod: Any) -> None:
        self.pods.append(f"seen {pod['metadata']['uid']}")

    def pod_gone(self, uid: str) -> None:
        self.pods.append(f"gone {uid}")


def body(**labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "x",
            "namespace": "ns",
            "uid": "u",
            "resourceVersion": "5",
            "labels": {f"{names.GROUP}/{name}": value for name, value in labels.items()},
            "managedFields": [{}],
        }
    }


async def send(memo: Any, kind: Watched, what: dict[str, Any], event_type: str | None) -> None:
    event: kopf.RawEvent = {"type": event_type, "object": what}  # type: ignore[typeddict-item]
    handler: Any = on_event
    answer = await handler(event=event, body=what, memo=memo, param=kind, pods={}, tpinferences={})
    assert answer is None  # kopf would patch a value into the object's status


async def test_the_owner_and_its_children_enqueue_the_owner() -> None:
    memo = Memo()
    await send(memo, OWNER, body(), "ADDED")
    await send(memo, RAYCLUSTERS, body(name="llm"), "MODIFIED")
    assert memo.enqueued == [("ns", "x"), ("ns", "llm")]
    assert memo.pods == []


async def test_pods_are_told_to_the_engine_watch() -> None:
    memo = Memo()
    await send(memo, POD, body(name="llm"), None)
    await send(memo, POD, body(name="llm"), "DELETED")
    assert memo.pods == ["seen u", "gone u"]


async def test_an_object_without_our_label_is_nobodys() -> None:
    memo = Memo()
    await send(memo, POD, body(), "ADDED")
    assert (memo.enqueued, await index(body=body(), param=POD)) == ([], {})


async def test_the_index_keeps_a_slim_copy_by_owner() -> None:
    indexed = await index(body=body(name="llm"), param=POD)
    assert list(indexed) == [("ns", "llm")]
    assert "managedFields" not in indexed[("ns", "llm")]["metadata"]
    assert list(await index(body=body(), param=OWNER)) == [("ns", "x")]


def test_logins_slow_down_until_one_works() -> None:
    logins = LoginBackoff()
    assert [logins.next_delay_s() for _ in range(6)] == [0.0, 1.0, 2.0, 5.0, 10.0, 10.0]
    logins.succeeded()
    assert logins.next_delay_s() == 0.0
