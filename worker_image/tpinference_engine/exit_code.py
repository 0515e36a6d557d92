"""How a process ended, in words."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Real-time signals and those of another system have no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
