"""What a revision is: the part of a spec that rolls, and the RayCluster rendered from it once.

A spec whose rolling part equals a stored one *is* that revision, whatever today's rendering would
be: a new operator, another default image or a field more must restart nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from tpinference_operator import names
from tpinference_operator.api.base import Effect
from tpinference_operator.api.schema import leaves
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.errors import CorruptRevision
from tpinference_operator.observed import SeenRevision


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """Immutable, and complete: a group is stamped from it without looking at the spec."""

    hash8: str
    spec: Mapping[str, Any]
    """The rolling part as it was, in the API's own shape."""
    ray_cluster: Mapping[str, Any]
    """Rendered, free of ordinal and epoch."""


def make_revision(spec: TPInferenceSpec, ray_cluster: Mapping[str, Any]) -> Revision:
    rolling = rolling_part(spec)
    return Revision(hash8=names.hash8(rolling, ray_cluster), spec=rolling, ray_cluster=ray_cluster)


def rolling_part(spec: TPInferenceSpec) -> dict[str, Any]:
    """The fields marked *rolls*, nested as in the API, defaults filled in."""
    raw = spec.to_raw()
    rolling: dict[str, Any] = {}
    for path in rolling_paths():
        _copy(raw, rolling, path)
    return rolling


def is_revision_of(revision: Revision, spec: TPInferenceSpec) -> bool:
    """Whether a spec asks for nothing else than this stored revision. A field that the stored one
    lacks counts as its default; one that today's models don't know is ignored."""
    try:
        stored = TPInferenceSpec.model_validate(revision.spec)
    except ValidationError:
        # Written by a version whose bounds were wider: it can't be what today's spec asks for.
        return False
    return rolling_part(stored) == rolling_part(spec)


def parse_revision(seen: SeenRevision) -> Revision:
    """Name and data can't be changed in the API server, so a revision is what these say."""
    data = seen.data
    spec, ray_cluster = data.get("spec"), data.get("rayCluster")
    hash8 = names.hash8_of(seen.meta.name)
    if not (hash8 and isinstance(spec, Mapping) and isinstance(ray_cluster, Mapping)):
        raise CorruptRevision(
            f"ControllerRevision {seen.meta.name!r} lacks data.spec or data.rayCluster, or its "
            "name does not end in -<8 hex digits>"
        )
    return Revision(hash8=hash8, spec=spec, ray_cluster=ray_cluster)


@cache
def rolling_paths() -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(path.split("."))
        for path, field in leaves(TPInferenceSpec)
        if Effect.ROLLS in field.metadata
    )


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: tuple[str, ...]) -> None:
    """Copies one leaf; an absent one stays absent."""
    for part in path[:-1]:
        if part not in source:
            return
        source = source[part]
        target = target.setdefault(part, {})
    if path[-1] in source:
        target[path[-1]] = source[path[-1]]
