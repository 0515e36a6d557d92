"""Tells a person what is going on and how long each step took. Knows nothing of the steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Says that a step begins, and how long it took once it has ended well."""
    started = time.monotonic()
    say(f"· {title} ...")
    try:
        yield
    except BaseException:
        say(f"✗ {title}: failed after {format_seconds(time.monotonic() - started)}")
        raise
    say(f"✓ {title}: {format_seconds(time.monotonic() - started)}")


def format_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
