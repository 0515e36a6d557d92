"""A body's bytes to a checked model, or to a refusal that names the first field at fault."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationError

from tpinference_engine.errors import RequestRefused
from tpinference_engine.server.protocol import Body

_NO_VALUE = frozenset({"missing", "extra_forbidden"})
_MAX_SHOWN = 60

AnyBody = TypeVar("AnyBody", bound=Body)

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "json_invalid": "invalid_json",
}


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestRefused:
    # A union fails once for each member: the member that got farthest says best what is wrong.
    first = max(error.errors(include_url=False), key=lambda e: _depth(e["loc"]))
    code = _CODES.get(first["type"], "invalid_value")
    if first["type"] == "json_invalid":
        return RequestRefused(f"the body is no JSON: {first['msg']}", code=code)
    path = _path(first["loc"])
    if not path:
        return RequestRefused(f"the body is no JSON object: {first['msg']}", code=code)
    return RequestRefused(
        f"{path}{_value(first['type'], first['input'])} {_sentence(first['type'], first['msg'])}",
        param=path,
        code=code,
    )


def _depth(loc: tuple[int | str, ...]) -> int:
    return len(_path(loc).split("."))


def _path(loc: tuple[int | str, ...]) -> str:
    """Without the members of a union, which pydantic puts between the fields."""
    names = [str(part) for part in loc if isinstance(part, int) or part.isidentifier()]
    return ".".join(name for name in names if name not in {"str", "int", "float", "bool"})


def _value(kind: str, given: object) -> str:
    """Where it is the value that is wrong, and it is short enough to tell."""
    is_plain = isinstance(given, str | int | float | bool | None)
    shown = json.dumps(given) if is_plain else ""
    if kind in _NO_VALUE or not 0 < len(shown) <= _MAX_SHOWN:
        return ":"
    return f" is {shown},"


def _sentence(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown field"
    plain = message[:1].lower() + message[1:]
    return plain.replace("input should ", "must ", 1)
