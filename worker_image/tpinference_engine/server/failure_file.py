"""Leaves the reason of the engine's end where the supervisor looks for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tpinference_engine.config import ServerConfig
from tpinference_engine.engine.status import Failure


def write_failure(config: ServerConfig, failure: Failure) -> None:
    """Whole or not at all. Without a file in the config nobody waits for one."""
    if config.failure_file is None:
        return
    if failure.rank is None and failure.pod is None:
        # No rank is to blame: what failed is here.
        failure = msgspec.structs.replace(failure, pod=config.pod_name, node=config.node_name)
    replace_file(config.failure_file, msgspec.json.encode(failure))


def replace_file(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
