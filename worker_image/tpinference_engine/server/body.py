"""A request's body off the connection, bounded."""

from __future__ import annotations

from starlette.requests import Request

from tpinference_engine.errors import RequestRefused

MAX_BODY_BYTES = 16 * 2**20
"""Many times the longest context in text; more would only fill memory and block the event loop."""


async def read_json_body(request: Request) -> bytes:
    """Raises RequestRefused, or ClientDisconnect if the client left before the end."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestRefused(
            f"content-type is {media_type!r}, must be 'application/json'",
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    _check_size(int(declared) if declared.isdecimal() else 0)
    body = bytearray()
    async for part in request.stream():
        body += part
        _check_size(len(body))
    return bytes(body)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise RequestRefused(
            f"the body has more than {MAX_BODY_BYTES} bytes", code="request_too_large"
        )
