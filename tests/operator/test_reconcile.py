"""reconcile.py's one look, with everything behind it real but the API server and the engines."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from harness.plan_world import DEFAULTS

from tpinference_operator import cache as views
from tpinference_operator.api.status import Condition, TPInferenceStatus
from tpinference_operator.apply import Applier
from tpinference_operator.cache import Cache
from tpinference_operator.child_events import ChildEvents
from tpinference_operator.errors import ApiForbidden
from tpinference_operator.events import EventPoster
from tpinference_operator.kube import Answer, Kube, Request
from tpinference_operator.metrics import Metrics
from tpinference_operator.observed import KubeRay
from tpinference_operator.reconcile import Reconciler, StatusWriter

KEY = ("ns", "llm")
PATH = "/apis/serving.tpinference.dev/v1alpha1/namespaces/ns/tpinferences/llm"

Body = dict[str, Any]
Look = Callable[[], Any]


@pytest.fixture
def owner(api: Any, make_tpi: Callable[..., Body]) -> Body:
    """The object as it is stored; a test may change it between two looks."""
    body: Body = api.put(PATH, make_tpi())
    return body


@pytest.fixture
def look(api: Any, kube: Kube, owner: Body) -> Look:
    """One look at the object as it is stored now."""
    cache = Cache()
    engines: Any = SimpleNamespace(answers=lambda pods: {}, refresh=lambda uids, after_s: False)
    discovery: Any = SimpleNamespace(kuberay=KubeRay.SERVED)
    poster, metrics = EventPoster(kube), Metrics()
    reconciler = Reconciler(
        cache=cache,
        applier=Applier(kube, cache, engines),
        engines=engines,
        discovery=discovery,
        child_events=ChildEvents(kube),
        statuses=StatusWriter(kube, cache, poster, metrics),
        events=poster,
        metrics=metrics,
        defaults=DEFAULTS,
    )

    async def look_once() -> float | None:
        cache.detach()
        cache.attach({views.OWNERS: {KEY: [copy.deepcopy(api.objects[PATH])]}})
        return await reconciler(KEY)

    return look_once


def condition(api: Any, kind: str) -> Condition:
    status = TPInferenceStatus.model_validate(api.objects[PATH]["status"])
    return next(c for c in status.conditions if c.type == kind)


def refusal(*causes: str) -> Answer:
    details = {"causes": [{"reason": cause} for cause in causes]}
    return Answer(403, {"reason": "Forbidden", "message": "no", "details": details})


async def test_in_a_namespace_that_ends_nothing_is_tried_again(
    api: Any, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(request: Request) -> Answer | None:
        return refusal("NamespaceTerminating") if request.method == "POST" else None

    api.refuse = refuse
    with caplog.at_level(logging.WARNING):
        assert await look() is None
    assert caplog.records == []


async def test_a_role_that_lacks_a_rule_is_an_error(api: Any, look: Look) -> None:
    def refuse(request: Request) -> Answer | None:
        return refusal() if request.method == "POST" else None

    api.refuse = refuse
    with pytest.raises(ApiForbidden):
        await look()


async def test_a_spec_that_can_not_be_read_is_told_and_read_again_at_each_look(
    api: Any, look: Look, owner: Body
) -> None:
    """Nothing outside of the spec makes it so: its next event is soon enough."""
    tensor = owner["spec"]["parallelism"].pop("tensor")
    assert await look() is None
    told = condition(api, "Accepted")
    assert (told.status, told.reason) == ("False", "InvalidSpec")
    assert "spec.parallelism.tensor" in told.message
    api.objects[PATH]["spec"]["parallelism"]["tensor"] = tensor
    await look()
    assert condition(api, "Accepted").status == "True"
