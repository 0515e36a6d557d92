"""Whether a live object still has all that was rendered. What others add does not count: defaults
of the API server, what Kueue or a webhook puts in, and how Go writes the same value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpinference_operator.api.base import QUANTITY_PATTERN, parse_quantity


def first_difference(rendered: Any, live: Any, path: str) -> str:
    """The path of something rendered that is not in `live` as it was; empty if all is."""
    if isinstance(rendered, Mapping):
        if not isinstance(live, Mapping):
            return path
        return _first(
            first_difference(value, live[key], f"{path}.{key}")
            if key in live
            else _absent(value, f"{path}.{key}")
            for key, value in rendered.items()
        )
    if isinstance(rendered, list):
        return _difference_of_lists(rendered, live, path)
    return "" if _same(rendered, live) else path


def _difference_of_lists(rendered: Sequence[Any], live: Any, path: str) -> str:
    """Objects in a list may get others beside them, in any place; plain values (a command) not."""
    if not isinstance(live, list):
        return path
    if not any(isinstance(item, Mapping) for item in rendered):
        return "" if rendered == live or not rendered else path
    return _first(
        "" if any(not first_difference(item, other, path) for other in live) else path
        for item in rendered
    )


def _absent(value: Any, path: str) -> str:
    """Go leaves out what is empty."""
    return "" if _is_empty(value) else path


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(part) for part in value.values())
    return value is None or value == "" or value == []


def _same(rendered: Any, live: Any) -> bool:
    """`1024Mi` and `1Gi` are: whoever writes the object from Go gives quantities one form."""
    if rendered == live:
        return True
    texts = [t for t in (rendered, live) if isinstance(t, str) and re.search(QUANTITY_PATTERN, t)]
    return len(texts) == 2 and parse_quantity(texts[0]) == parse_quantity(texts[1])


def _first(differences: Iterable[str]) -> str:
    return next((path for path in differences if path), "")
