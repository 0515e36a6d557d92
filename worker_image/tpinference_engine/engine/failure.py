"""Turns an error into the failure that status shows, and back into an error for a caller."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

from tpinference_engine import errors
from tpinference_engine.engine.status import Failure, FailureReason
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.exit_code import signal_name

_REASONS: tuple[FailureReason, ...] = get_args(FailureReason)


def failure_of(error: BaseException, places: tuple[RankPlace, ...] = ()) -> Failure:
    """The reason is the nearest class of the closed list; anything else is a crash."""
    names = {cls.__name__ for cls in type(error).__mro__}
    found: list[FailureReason] = [reason for reason in _REASONS if reason in names]
    rank = error.rank if isinstance(error, errors.GroupFailed) else None
    place = next((place for place in places if place.rank == rank), None)
    expected = isinstance(error, errors.TPInferenceError)
    return Failure(
        reason=found[0] if found else "EngineCrashed",
        message=str(error) if expected else f"{type(error).__name__}: {error}",
        time=datetime.now(UTC),
        rank=rank,
        pod=place.pod if place else None,
        node=place.node if place else None,
    )


def failure_of_exit(exit_code: int) -> Failure:
    """The engine core's process ended and had said nothing."""
    how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"exited {exit_code}"
    return Failure(
        reason="EngineCrashed",
        message=f"the engine core process {how}",
        time=datetime.now(UTC),
        exit_code=exit_code,
    )


def error_of(failure: Failure) -> errors.TPInferenceError:
    if failure.reason == "EngineCrashed":
        return errors.EngineStopped(failure.message)
    if failure.reason == "GroupFailed":
        return errors.GroupFailed(failure.message, rank=failure.rank)
    error_class: type[errors.TPInferenceError] = getattr(errors, failure.reason)
    return error_class(failure.message)
