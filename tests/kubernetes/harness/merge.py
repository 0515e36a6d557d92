"""Merges one body into another, as a merge patch does but for its nulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Objects key by key; anything else is replaced. Neither is changed."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged
