"""cache.py: the newest known version of each object, from the indexes and our own writes."""

from __future__ import annotations

from typing import Any

import pytest

from tpinference_operator import cache as views
from tpinference_operator import names
from tpinference_operator.cache import Cache

KEY = ("ns", "llm")


def pod(version: int, uid: str = "u", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": uid, "resourceVersion": str(version)}, **more}


@pytest.fixture
def index() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {KEY: [pod(10)]}


@pytest.fixture
def cache(index: dict[tuple[str, str], list[dict[str, Any]]]) -> Cache:
    cache = Cache()
    cache.attach({views.PODS: index})
    return cache


def versions(cache: Cache) -> list[str]:
    return [body["metadata"]["resourceVersion"] for body in cache.children(views.PODS, KEY)]


def test_our_own_newer_write_counts_until_the_index_has_it(cache: Cache, index: Any) -> None:
    cache.wrote(views.PODS, KEY, pod(12))
    assert versions(cache) == ["12"]
    index[KEY] = [pod(11)]
    cache.seen(views.PODS, pod(11), gone=False)
    assert versions(cache) == ["12"]
    index[KEY] = [pod(13)]
    cache.seen(views.PODS, pod(13), gone=False)
    assert versions(cache) == ["13"]


def test_an_older_answer_never_hides_what_the_index_knows(cache: Cache) -> None:
    cache.wrote(views.PODS, KEY, pod(9))
    assert versions(cache) == ["10"]


def test_an_answer_that_comes_after_its_event_is_not_kept(cache: Cache, index: Any) -> None:
    index[KEY] = [pod(12)]
    cache.seen(views.PODS, pod(12), gone=False)
    cache.wrote(views.PODS, KEY, pod(11))
    index.pop(KEY)
    assert versions(cache) == []


def test_an_object_that_moved_to_another_owner_leaves_no_copy(cache: Cache, index: Any) -> None:
    cache.wrote(views.PODS, KEY, pod(12))
    index.pop(KEY)
    cache.seen(views.PODS, pod(13), gone=False)
    assert versions(cache) == []


def test_the_controller_says_more_than_a_label() -> None:
    labels = {names.NAME_LABEL: "wrong"}
    metadata = {"namespace": "ns", "labels": labels}
    assert views.owner_key({"metadata": metadata}) == ("ns", "wrong")
    owner = {"kind": "TPInference", "name": "llm", "controller": True}
    other = {"kind": "RayCluster", "name": "x", "controller": True}
    assert views.owner_key({"metadata": metadata | {"ownerReferences": [owner]}}) == KEY
    assert views.owner_key({"metadata": metadata | {"ownerReferences": [other]}}) == ("ns", "wrong")


def test_versions_are_compared_as_numbers(cache: Cache) -> None:
    cache.wrote(views.PODS, KEY, pod(9))
    cache.wrote(views.PODS, KEY, pod(100))
    assert versions(cache) == ["100"]


def test_a_gone_object_is_gone_whoever_wrote_it(cache: Cache, index: Any) -> None:
    cache.wrote(views.PODS, KEY, pod(12))
    index.pop(KEY)
    cache.seen(views.PODS, pod(12), gone=True)
    assert versions(cache) == []


def test_nothing_is_known_while_kopf_lists_anew(cache: Cache, index: Any) -> None:
    cache.wrote(views.PODS, KEY, pod(12))
    cache.detach()
    assert versions(cache) == []
    cache.attach({views.PODS: index})
    assert versions(cache) == ["10"]


def test_managed_fields_are_not_kept(cache: Cache) -> None:
    body = pod(12)
    body["metadata"]["managedFields"] = [{}]
    cache.wrote(views.PODS, KEY, body)
    (kept,) = cache.children(views.PODS, KEY)
    assert "managedFields" not in kept["metadata"]
