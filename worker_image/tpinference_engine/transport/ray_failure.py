"""What Ray raises, as the engine's own errors."""

from __future__ import annotations

import re

from ray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayChannelTimeoutError,
    RayTaskError,
)

from tpinference_engine.errors import GroupFailed, RankDied, StepTimedOut, TPInferenceError

_EXIT_DETAIL = re.compile(r"Worker exit type: (\S+) Worker exit detail: (.+?)\.(?:\s|$)", re.S)


def translate_ray_failure(error: Exception, rank: int | None, doing: str) -> TPInferenceError:
    """`error` was met when `rank` (None: nobody knows which) was asked for `doing`.

    An error of the engine's own says itself whose it is. One that names nobody is the loss of a
    peer, and who was asked is only the one that noticed it.
    """
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, TPInferenceError):
            return cause
        return GroupFailed(f"{_name(rank)} failed in {doing}: {_last_line(error)}", rank=rank)
    if isinstance(error, RayActorError):
        return RankDied(f"{_name(rank)} died in {doing}: {describe_death(error)}", rank=rank)
    if isinstance(error, RayChannelTimeoutError | GetTimeoutError):
        return StepTimedOut(f"{doing} did not end in time")
    return GroupFailed(f"{doing} failed: {type(error).__name__}: {_last_line(error)}")


def describe_death(error: BaseException) -> str:
    """The part of Ray's long message that says how the process ended."""
    found = _EXIT_DETAIL.search(str(error))
    return f"{found[2]} ({found[1]})" if found else _last_line(error)


def _name(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
