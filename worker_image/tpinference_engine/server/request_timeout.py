"""The time that a client gives its call, from the header `Request-Timeout-Ms`.

OpenAI's API has nothing for it. This header is what clients and gateways of other OpenAI servers
send: it is of the call and not of the model's input, so a proxy can set it, or lower it by what it
has used up itself, without the body. It counts until the last token, unlike a client's own timeout,
which mostly counts from one part of an answer to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpinference_engine.errors import RequestRefused

HEADER = "Request-Timeout-Ms"
MAX_MS = 10**10
"""A hundred days and more."""


def deadline_of(headers: Mapping[str, str], arrived: float) -> float | None:
    """By the clock that `arrived` is of; None if the client gave none."""
    text = headers.get(HEADER)
    if text is None:
        return None
    is_whole = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_MS))
    if not is_whole or int(text) > MAX_MS:
        raise RequestRefused(
            f"{HEADER} is {text!r}, must be a whole number of milliseconds, 0 to {MAX_MS}",
            param=HEADER,
            code="invalid_value",
        )
    return arrived + int(text) / 1000
