"""The OpenAI port: its routes, and nothing else. Bound once the engine is ready."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpinference_engine.errors import RequestRefused, TPInferenceError
from tpinference_engine.server.generation_route import GenerationRoute, Serving
from tpinference_engine.server.plan import ServedModel, plan_chat, plan_completion
from tpinference_engine.server.problems import problem_of
from tpinference_engine.server.protocol import ChatBody, CompletionBody


def openai_app(serving: Serving) -> Starlette:
    cards = {name: _model_card(serving.model, name) for name in serving.model.names}

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def show_model(request: Request) -> Response:
        return JSONResponse(_find_card(cards, request.path_params["name"]))

    chat = GenerationRoute(serving, ChatBody, plan_chat)
    completion = GenerationRoute(serving, CompletionBody, plan_completion)
    return Starlette(
        routes=[
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", show_model),
            Route("/version", _show_version),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: show_problem,
            TPInferenceError: show_problem,
            Exception: show_problem,
        },
    )


async def show_problem(_: Request, error: Exception) -> Response:
    return problem_of(error).response()


async def _show_version(_: Request) -> Response:
    return JSONResponse({"version": version("tpinference")})


def _model_card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tpinference",
        "root": model.names[0],
        "max_model_len": model.max_model_len,
    }


def _find_card(cards: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in cards:
        raise RequestRefused(
            f"the model {name!r} does not exist, served is {', '.join(cards)}",
            param="model",
            code="model_not_found",
        )
    return cards[name]
