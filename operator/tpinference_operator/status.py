"""Computes the status from what is observed and what the plan decided. Pure."""

from __future__ import annotations

from tpinference_operator.actions import Plan
from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.observed import Observed, Raw


def compute_status(observed: Observed, plan: Plan) -> TPInferenceStatus:
    """After: conditions all carry the object's generation; lastTransitionTime moves only where a
    status flipped; equal input gives an equal status, so `==` with the recorded one decides
    whether to write."""
    raise NotImplementedError


def status_of_invalid_spec(owner: Raw, error: InvalidSpec, *, now: str) -> TPInferenceStatus:
    """For an object that `observe` refused: keeps all that was recorded, Accepted is False."""
    raise NotImplementedError


def urgent(old: TPInferenceStatus, new: TPInferenceStatus) -> bool:
    """A condition's status or reason differs: write at once rather than coalesce."""
    raise NotImplementedError
