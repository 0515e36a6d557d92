"""Errors to a status and OpenAI's error body. The only place that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from tpinference_engine.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineStopped,
    PromptTooLong,
    RequestRefused,
    TPInferenceError,
)

_STATUS_OF_CODE = {
    "model_not_found": HTTPStatus.NOT_FOUND,
    "request_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "unsupported_media_type": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
}
_BUSY_RETRY_S = 1
_STOPPED_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """Also the data of the event that ends a stream which had begun."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, dict(self.headers))


def problem_of(error: Exception) -> Problem:
    if isinstance(error, RequestRefused):
        return _refused(error)
    if isinstance(error, EngineBusy):
        retry = {"retry-after": str(_BUSY_RETRY_S)}
        return Problem(429, str(error), "rate_limit_error", code="engine_busy", headers=retry)
    if isinstance(error, EngineStopped):
        # Another engine may take the request, this connection leads to no other.
        headers = {"retry-after": str(_STOPPED_RETRY_S), "connection": "close"}
        return Problem(503, str(error), "server_error", code="engine_stopped", headers=headers)
    if isinstance(error, DeadlineExceeded):
        # As gRPC's DEADLINE_EXCEEDED. Clients try a 5xx again by themselves, unless told not to:
        # the time that this one had is over.
        headers = {"x-should-retry": "false"}
        return Problem(504, str(error), "timeout_error", code="deadline_exceeded", headers=headers)
    if isinstance(error, TPInferenceError):
        headers = {"retry-after": str(_STOPPED_RETRY_S)}
        return Problem(503, str(error), "server_error", code="engine_failed", headers=headers)
    if isinstance(error, HTTPException):
        return _http(error)
    return Problem(500, "internal error, see the engine's log", "server_error", code="internal")


def _refused(error: RequestRefused) -> Problem:
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else error.code
    status = _STATUS_OF_CODE.get(code or "", HTTPStatus.BAD_REQUEST)
    return Problem(status, str(error), "invalid_request_error", error.param, code)


def _http(error: HTTPException) -> Problem:
    """What the router refuses: a path or a method that is not there."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return Problem(
        error.status_code, error.detail, "invalid_request_error", code=code, headers=headers
    )
