"""What is said for an engine process that has ended: the failure it left, or that it left none.

The shapes are those of /engine/status; they are plain JSON here, since the supervisor outlives the
engine in a small process and imports nothing of it.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TERMINATION_LOG = Path("/dev/termination-log")
_TERMINATION_LOG_BYTES = 4096
"""What the kubelet reads of it."""

Failure = dict[str, Any]

logger = logging.getLogger(__name__)


def read_failure(path: Path) -> Failure | None:
    """What the engine left there; None if it left nothing that can be read."""
    try:
        failure = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.error("failure file %s is no JSON: %s", path, error)
        return None
    return failure if isinstance(failure, dict) else None


def crash_failure(how: str, exit_code: int | None, pod: str | None, node: str | None) -> Failure:
    """For an engine that ended without a word."""
    return {
        "reason": "EngineCrashed",
        "message": f"the engine process {how}",
        "time": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "rank": None,
        "pod": pod,
        "node": node,
        "exitCode": exit_code,
    }


def ended_status(engine_id: str, epoch: int, failure: Failure | None) -> dict[str, Any]:
    """The body of /engine/status once the engine's own process can't answer any more."""
    return {
        "engineId": engine_id,
        "epoch": epoch,
        "state": "failed" if failure else "stopped",
        "reason": failure["reason"] if failure else None,
        "message": failure["message"] if failure else None,
        "stages": [],
        "ranks": [],
        "lastFailure": failure,
        "requests": {"running": 0, "waiting": 0},
        "model": {"servedNames": [], "maxModelLen": None},
        "cache": {"numBlocks": 0, "freeBlocks": 0},
    }


def write_termination_log(path: Path, text: str) -> None:
    """Where the kubelet takes a container's last words from. Absent outside of a container."""
    try:
        path.write_bytes(text.encode()[:_TERMINATION_LOG_BYTES])
    except OSError as error:
        logger.warning("could not write %s: %s", path, error)
