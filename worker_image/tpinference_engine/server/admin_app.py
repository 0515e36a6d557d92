"""The admin port: probes, metrics, status, drain. In no Service; open from the first second."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tpinference_engine.server.health import Health
from tpinference_engine.server.metrics import Metrics
from tpinference_engine.server.problems import problem_of


def admin_app(health: Health, metrics: Metrics, drain: Callable[[], None]) -> Starlette:
    async def show_live(_: Request) -> Response:
        return _verdict(health.why_not_live())

    async def show_ready(_: Request) -> Response:
        return _verdict(health.why_not_ready())

    async def show_health(_: Request) -> Response:
        return _verdict(health.why_not_healthy())

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_status(_: Request) -> Response:
        return _status_response(health, 200)

    async def begin_drain(_: Request) -> Response:
        """Admits no more; what runs goes on. The process stays until it is told to end."""
        drain()
        return _status_response(health, 202)

    return Starlette(
        routes=[
            Route("/livez", show_live),
            Route("/readyz", show_ready),
            Route("/health", show_health),
            Route("/metrics", show_metrics),
            Route("/engine/status", show_status),
            Route("/drain", begin_drain, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _show_problem, Exception: _show_problem},
    )


async def _show_problem(_: Request, error: Exception) -> Response:
    return problem_of(error).response()


def _verdict(why_not: str | None) -> Response:
    return PlainTextResponse(why_not or "ok", 503 if why_not else 200)


def _status_response(health: Health, status_code: int) -> Response:
    body = msgspec.json.encode(health.status())
    return Response(body, status_code, media_type="application/json")
