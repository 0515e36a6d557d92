"""Processes that this one has started."""

from __future__ import annotations

import os
from pathlib import Path

ENGINE_CORE = "engine.core_process"
"""In the command line of an engine core."""


def children_that_run(module: str) -> list[int]:
    found: list[int] = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((command.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and module.encode() in command.read_bytes():
                found.append(int(command.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended meanwhile.
    return found
