"""What the operator's unit tests share: a small API server in memory, behind Kube's transport, and
a small world for the deciding half, where objects are changed by plans and by a played KubeRay."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from harness.merge import merge
from harness.plan_world import World

from tpinference_operator import names
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.errors import ApiUnavailable
from tpinference_operator.kube import APPLY_PATCH, Answer, Kube, Request

Body = dict[str, Any]


def _status(code: int, reason: str) -> Answer:
    return Answer(code, {"kind": "Status", "reason": reason, "message": reason}, 0.0)


@dataclass
class FakeApiServer:
    """Stores objects by path; honours resourceVersion, uid preconditions and existing names.

    `refuse` answers instead of it (an Answer) or fails (ApiUnavailable) for requests it likes;
    `sent` is every request that came.
    """

    objects: dict[str, Body] = field(default_factory=dict)
    sent: list[Request] = field(default_factory=list)
    refuse: Callable[[Request], Answer | ApiUnavailable | None] = lambda _: None
    lose_answers: bool = False
    version: int = 100

    async def send(self, request: Request, timeout_s: float) -> Answer:
        self.sent.append(request)
        refused = self.refuse(request)
        if isinstance(refused, ApiUnavailable):
            raise refused
        answer = refused or getattr(self, f"_{request.method.lower()}")(request)
        if self.lose_answers:
            raise ApiUnavailable("the answer was lost")
        return copy.deepcopy(answer)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(r.method, r.path) for r in self.sent if r.method != "GET"]

    def put(self, path: str, body: Body) -> Body:
        """Stores it as somebody else would."""
        return self._store(path, copy.deepcopy(body))

    def _store(self, path: str, body: Body) -> Body:
        self.version += 1
        metadata = body.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata["resourceVersion"] = str(self.version)
        self.objects[path] = body
        return body

    def _get(self, request: Request) -> Answer:
        if "fieldSelector" in request.query:
            uid = request.query["fieldSelector"].partition("=")[2]
            items = [o for o in self.objects.values() if _involved(o) == uid]
            return Answer(200, {"items": items})
        found = self.objects.get(request.path)
        return Answer(200, found) if found is not None else _status(404, "NotFound")

    def _post(self, request: Request) -> Answer:
        assert request.body is not None
        path = f"{request.path}/{request.body['metadata']['name']}"
        if path in self.objects:
            return _status(409, "AlreadyExists")
        return Answer(201, self._store(path, copy.deepcopy(request.body)))

    def _put(self, request: Request) -> Answer:
        path = request.path.removesuffix("/status")
        assert request.body is not None
        live = self.objects.get(path)
        if live is None:
            return _status(404, "NotFound")
        if request.body["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        return Answer(200, self._store(path, copy.deepcopy(request.body)))

    def _patch(self, request: Request) -> Answer:
        assert request.body is not None
        live = self.objects.get(request.path)
        if live is None and request.content_type == APPLY_PATCH:
            if "uid" in request.body["metadata"]:
                return _status(409, "Conflict")
            return Answer(201, self._store(request.path, copy.deepcopy(request.body)))
        if live is None:
            return _status(404, "NotFound")
        for field_name in ("uid", "resourceVersion"):
            is_now = live["metadata"][field_name]
            if request.body["metadata"].get(field_name, is_now) != is_now:
                return _status(409, "Conflict")
        return Answer(200, self._store(request.path, merge(live, request.body)))

    def _delete(self, request: Request) -> Answer:
        live = self.objects.get(request.path)
        if live is None:
            return _status(404, "NotFound")
        assert request.body is not None
        if request.body["preconditions"]["uid"] != live["metadata"]["uid"]:
            return _status(409, "Conflict")
        return Answer(200, self.objects.pop(request.path))


def _involved(body: Body) -> str:
    return str((body.get("involvedObject") or {}).get("uid", ""))


@pytest.fixture
def api() -> FakeApiServer:
    return FakeApiServer()


@pytest.fixture
def kube(api: FakeApiServer) -> Kube:
    return Kube(api, timeout_s=1.0)


@pytest.fixture
def refuse_with() -> Callable[[int, str], Answer]:
    """An answer of the API server that is an error."""
    return _status


MakeTpi = Callable[..., Body]


@pytest.fixture
def make_tpi() -> MakeTpi:
    """A TPInference as the API server stores it: two ranks in two pods, no GPU."""

    def make(name: str = "llm", **spec: Any) -> Body:
        small = {
            "model": {"uri": "pvc://models/tiny"},
            "engine": {"device": "CPU"},
            "parallelism": {"tensor": 2, "gpusPerNode": 1},
        }
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": name,
                "namespace": "ns",
                "uid": "owner-uid",
                "generation": 1,
                "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": merge(small, spec),
        }

    return make


@pytest.fixture
def make_spec(make_tpi: MakeTpi) -> Callable[..., TPInferenceSpec]:
    return lambda **spec: TPInferenceSpec.model_validate(make_tpi(**spec)["spec"])


@pytest.fixture
def make_world(make_tpi: MakeTpi) -> Callable[..., World]:
    def make(**spec: Any) -> World:
        return World(make_tpi(**spec))

    return make


@pytest.fixture
def make_running(make_world: Callable[..., World]) -> Callable[..., World]:
    """A world in which everything that the spec asks for is up."""

    def make(**spec: Any) -> World:
        world = make_world(**spec)
        world.settle()
        return world

    return make


@pytest.fixture
def starting(make_world: Callable[..., World]) -> World:
    """KubeRay has made the pods of one group; none runs yet."""
    world = make_world()
    world.plan_once()
    world.kuberay()
    world.now += timedelta(seconds=6)
    return world


@pytest.fixture
def project_version() -> str:
    return importlib.metadata.version("tpinference")
