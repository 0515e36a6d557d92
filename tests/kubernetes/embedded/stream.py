"""One streaming chat answer, read event by event, as a client sees it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

DONE = "[DONE]"


@contextmanager
def open_stream(url: str, body: dict[str, Any], timeout_s: float) -> Iterator[Iterator[str]]:
    """The events' data. A connection that breaks off raises http.client.IncompleteRead."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", parts.path, json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{url} answered {response.status}: {response.read()!r}")
        yield _events(response)
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    while line := response.readline():
        text = line.decode().strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()


def finish_reasons(events: list[str]) -> list[str]:
    """Of all chunks; an event that tells an error has none."""
    choices = [json.loads(event).get("choices") for event in events if event != DONE]
    reasons = [choice[0].get("finish_reason") for choice in choices if choice]
    return [reason for reason in reasons if reason]
