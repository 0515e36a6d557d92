"""kube.py: what is sent, what may not be sent, and what each answer becomes."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from tpinference_operator import kube as module
from tpinference_operator.errors import (
    AlreadyExists,
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiUnavailable,
    NamespaceEnding,
    NotFound,
)
from tpinference_operator.kube import (
    EVENT,
    LEASE,
    POD,
    RAYCLUSTER,
    SERVICE,
    TABLE,
    TPINFERENCE_STATUS,
    Answer,
    HttpTransport,
    Kube,
    Request,
    canonical_json,
    error_of,
)


def test_paths_name_group_namespace_and_subresource() -> None:
    assert POD.path("ns", "p") == "/api/v1/namespaces/ns/pods/p"
    assert RAYCLUSTER.path("ns") == "/apis/ray.io/v1/namespaces/ns/rayclusters"
    assert TPINFERENCE_STATUS.path("ns", "x") == (
        "/apis/serving.tpinference.dev/v1alpha1/namespaces/ns/tpinferences/x/status"
    )


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (401, "Unauthorized", ApiForbidden),
        (403, "Forbidden", ApiForbidden),
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", ApiConflict),
        (410, "Expired", ApiUnavailable),
        (422, "Invalid", ApiError),
        (429, "TooManyRequests", ApiUnavailable),
        (500, "InternalError", ApiUnavailable),
        (503, "ServiceUnavailable", ApiUnavailable),
    ],
)
def test_every_error_status_has_its_error(status: int, reason: str, error: type[ApiError]) -> None:
    request = Request("get", "GET", "/x", {})
    raised = error_of(request, Answer(status, {"reason": reason, "message": "no such luck"}, 3.0))
    assert type(raised) is error
    assert raised.retry_after_s == 3.0
    assert (raised.status, raised.reason) == (status, reason)
    assert str(raised) == "GET /x: no such luck"


@pytest.mark.parametrize(
    ("causes", "error"),
    [
        ([{"reason": "NamespaceTerminating", "field": "metadata.namespace"}], NamespaceEnding),
        ([{"reason": "FieldValueInvalid"}], ApiForbidden),
        ([], ApiForbidden),
    ],
)
def test_a_namespace_that_ends_is_told_from_a_role_that_lacks_a_rule(
    causes: list[dict[str, str]], error: type[ApiError]
) -> None:
    body = {"reason": "Forbidden", "message": "no", "details": {"causes": causes}}
    assert type(error_of(Request("create", "POST", "/x", {}), Answer(403, body))) is error


async def test_a_call_outside_the_table_is_never_sent(api: Any, kube: Kube) -> None:
    with pytest.raises(ValueError, match="delete events is not in the table"):
        await kube.delete(EVENT, "ns", "e", uid="u")
    assert api.sent == []


async def test_a_delete_carries_the_uid_and_spares_a_namesake(api: Any, kube: Kube) -> None:
    api.put(
        "/apis/ray.io/v1/namespaces/ns/rayclusters/s", {"metadata": {"name": "s", "uid": "new"}}
    )
    with pytest.raises(ApiConflict):
        await kube.delete(RAYCLUSTER, "ns", "s", uid="old")
    assert "/apis/ray.io/v1/namespaces/ns/rayclusters/s" in api.objects
    await kube.delete(RAYCLUSTER, "ns", "s", uid="new")
    assert api.objects == {}
    assert api.sent[-1].body == {
        "preconditions": {"uid": "new"},
        "propagationPolicy": "Background",
    }


async def test_apply_forces_only_with_the_uid_of_what_is_ours(api: Any, kube: Kube) -> None:
    api.put("/api/v1/namespaces/ns/services/s", {"metadata": {"name": "s", "uid": "u"}})
    await kube.apply(SERVICE, "ns", {"metadata": {"name": "s"}}, uid="u")
    with pytest.raises(ApiConflict):
        await kube.apply(SERVICE, "ns", {"metadata": {"name": "s"}}, uid=None)
    forced, polite = api.sent
    assert (forced.query["force"], forced.body["metadata"]["uid"]) == ("true", "u")
    assert (polite.query["force"], "uid" in polite.body["metadata"]) == ("false", False)
    assert forced.query["fieldManager"] == "tpinference-operator"


async def test_a_patch_of_a_namesake_is_refused(api: Any, kube: Kube) -> None:
    api.put("/api/v1/namespaces/ns/pods/p", {"metadata": {"name": "p", "uid": "new"}})
    with pytest.raises(ApiConflict):
        await kube.patch(POD, "ns", "p", uid="old", patch={"metadata": {"labels": {"a": "b"}}})


async def test_a_replace_without_resource_version_is_a_mistake(kube: Kube) -> None:
    with pytest.raises(ValueError, match="without resourceVersion"):
        await kube.replace(LEASE, "ns", {"metadata": {"name": "l"}})


async def test_the_fence_stops_writes_but_not_reads(api: Any, kube: Kube) -> None:
    def fence() -> None:
        raise RuntimeError("not the holder")

    fenced = kube.fenced(fence)
    with pytest.raises(RuntimeError, match="not the holder"):
        await fenced.create(SERVICE, "ns", {"metadata": {"name": "s"}})
    with pytest.raises(NotFound):
        await fenced.get(SERVICE, "ns", "s")
    assert api.writes == []


async def test_a_silent_api_server_is_unavailable_in_time() -> None:
    class Silent:
        async def send(self, request: Request, timeout_s: float) -> Answer:
            await asyncio.Event().wait()
            raise RuntimeError

    seen: list[tuple[str, str, int]] = []
    kube = Kube(Silent(), timeout_s=0.01, on_request=lambda v, r, s, _: seen.append((v, r, s)))
    with pytest.raises(ApiUnavailable, match="no answer in 0.01 s"):
        await kube.get(SERVICE, "ns", "s")
    assert seen == [("get", "services", 0)]


async def test_discovery_of_an_unserved_group_is_none(kube: Kube) -> None:
    assert await kube.discover("/apis/ray.io/v1") is None


def test_json_is_written_as_go_writes_it() -> None:
    body = {"b": [1, "<&>"], "a": "\u00e9\u2028"}
    assert canonical_json(body) == (
        '{"a":"\u00e9\\u2028","b":[1,"\\u003c\\u0026\\u003e"]}'.encode()
    )


def test_the_table_lists_each_resource_once() -> None:
    assert len({(row.group, row.name) for row in TABLE}) == len(TABLE)


class TestHttp:
    """The real transport against a real HTTP server on loopback."""

    @pytest.fixture
    async def server(self) -> Any:
        async def answer(request: web.Request) -> web.Response:
            if request.path == "/html":
                return web.Response(status=502, text="<html>Bad Gateway</html>")
            if request.path == "/busy":
                return web.Response(status=429, headers={"Retry-After": "7"}, text="{}")
            return web.json_response(
                {
                    "method": request.method,
                    "query": dict(request.query),
                    "type": request.headers["Content-Type"],
                    "token": request.headers.get("Authorization"),
                    "body": await request.json() if request.can_read_body else None,
                }
            )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    @pytest.fixture
    async def transport(self, server: str) -> Any:
        configuration = Configuration(host=server)
        configuration.api_key["BearerToken"] = "Bearer secret"
        transport = HttpTransport(configuration)
        yield transport
        await transport.close()

    async def test_sends_body_type_query_and_token(self, transport: HttpTransport) -> None:
        request = Request(
            "patch", "PATCH", "/p", {"force": "true"}, {"a": None}, module.APPLY_PATCH
        )
        answer = await transport.send(request, 5.0)
        assert answer.body == {
            "method": "PATCH",
            "query": {"force": "true"},
            "type": "application/apply-patch+yaml",
            "token": "Bearer secret",
            "body": {"a": None},
        }

    async def test_a_delete_has_a_body(self, transport: HttpTransport) -> None:
        options = {"preconditions": {"uid": "u"}}
        answer = await transport.send(Request("delete", "DELETE", "/p", {}, options), 5.0)
        assert answer.body["body"] == options

    async def test_a_proxys_html_becomes_a_message(self, transport: HttpTransport) -> None:
        answer = await transport.send(Request("get", "GET", "/html", {}), 5.0)
        assert (answer.status, answer.body) == (502, {"message": "<html>Bad Gateway</html>"})

    async def test_retry_after_is_read(self, transport: HttpTransport) -> None:
        answer = await transport.send(Request("get", "GET", "/busy", {}), 5.0)
        assert (answer.status, answer.retry_after_s) == (429, 7.0)

    async def test_proxy_variables_are_not_followed(
        self, server: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        configuration = Configuration(host=server)
        configuration.client_session_kwargs = {"trust_env": False}
        transport = HttpTransport(configuration)
        try:
            assert (await transport.send(Request("get", "GET", "/p", {}), 5.0)).status == 200
        finally:
            await transport.close()

    async def test_nobody_listens(self) -> None:
        transport = HttpTransport(Configuration(host="http://127.0.0.1:1"))
        try:
            with pytest.raises(ApiUnavailable, match="GET /p: no answer"):
                await transport.send(Request("get", "GET", "/p", {}), 5.0)
        finally:
            await transport.close()

    async def test_a_cancelled_connection_task_is_no_cancellation_of_ours(
        self, transport: HttpTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def interrupted(*_: object, **__: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(aiohttp.ClientSession, "_request", interrupted)
        with pytest.raises(ApiUnavailable, match="interrupted"):
            await transport.send(Request("get", "GET", "/p", {}), 5.0)
