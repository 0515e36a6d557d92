"""Runs one command to its end and fails with all that it printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from embedded.errors import CommandFailed

DEFAULT_TIMEOUT_S = 120.0


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> str:
    """What the command wrote to its standard output."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise CommandFailed(f"{words[0]!r} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(words)!r} took over {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise CommandFailed(f"{' '.join(words)!r} ended with {done.returncode}:\n{said}")
    return done.stdout


def flags(values: Mapping[str, object]) -> list[str]:
    """`--name=value` for each; the bare `--name` where the value is True."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items()]
