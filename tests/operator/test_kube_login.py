"""login.py: both HTTP clients speak as the account of that moment, and through no proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client import Configuration

from tpinference_operator.login import auth_headers, load_configuration, open_session


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    """Answers with the token it got; 401 to `bad`."""

    async def answer(request: web.Request) -> web.Response:
        token = request.headers.get("Authorization", "")
        return web.json_response({"token": token}, status=401 if "bad" in token else 200)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_the_kubeconfig_is_read_and_proxies_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    configuration = await load_configuration(follow_proxy_env=False)
    assert configuration.host == "http://127.0.0.1:1"
    assert configuration.client_session_kwargs == {"trust_env": False}
    assert (await auth_headers(configuration))["Authorization"] == "Bearer secret"


async def test_a_rotated_token_is_used_by_the_next_request_and_only_success_is_told(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    configuration = Configuration(host=server)
    configuration.client_session_kwargs = {"trust_env": False}
    tokens = iter(["first", "bad", "third"])

    def rotate(loaded: Configuration) -> None:
        loaded.api_key["BearerToken"] = f"Bearer {next(tokens)}"

    configuration.refresh_api_key_hook = rotate
    told: list[tuple[str, str, bool]] = []
    async with open_session(configuration, lambda *response: told.append(response)) as session:
        seen = []
        for query in ("", "?watch=true", "?watch=true"):
            async with session.get(f"{server}/api/v1/pods{query}") as response:
                seen.append((response.status, (await response.json())["token"]))
    assert seen == [(200, "Bearer first"), (401, "Bearer bad"), (200, "Bearer third")]
    assert told == [("GET", "/api/v1/pods", False), ("GET", "/api/v1/pods", True)]
