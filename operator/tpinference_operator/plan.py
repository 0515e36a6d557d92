"""Decides, from what is observed, what to do. Pure; see `actions.py` for what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from tpinference_operator.actions import Plan
from tpinference_operator.observed import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the operator's settings add to a spec when a revision is rendered for the first time."""

    image: str
    ray_version: str


def plan(observed: Observed, defaults: Defaults) -> Plan:
    """Before: `observed` is one consistent view. After: carrying the plan out, in whole or cut
    anywhere, and planning again converges; with everything in place there is no action."""
    raise NotImplementedError
