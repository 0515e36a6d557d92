"""What the probes and /engine/status say: the engine's own status, and what only the server knows.

Read-only over both. It decides nothing but the answers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tpinference_engine.engine.status import EngineStatus
from tpinference_engine.server.canary import Canary
from tpinference_engine.server.gate import Gate


class Health:
    def __init__(self, status: Callable[[], EngineStatus], gate: Gate, canary: Canary) -> None:
        self._status = status
        self._gate = gate
        self._canary = canary
        self._is_serving = False

    def set_serving(self) -> None:
        """The OpenAI port is open: the engine's own readiness comes a moment earlier."""
        self._is_serving = True

    def status(self) -> EngineStatus:
        status = self._status()
        if status.state != "ready":
            return status
        if self._gate.is_closed:
            return msgspec.structs.replace(status, state="draining")
        return status if self._is_serving else msgspec.structs.replace(status, state="starting")

    def why_not_ready(self) -> str | None:
        status = self.status()
        if status.state != "ready":
            return f"the engine is {status.state}" + _because(status)
        if not self._canary.is_fresh:
            return f"{self._canary.num_failures} canaries failed in a row"
        return None

    def why_not_healthy(self) -> str | None:
        """As vLLM's /health: the engine can still answer what it has taken in."""
        status = self.status()
        if status.state in ("ready", "draining"):
            return None
        return f"the engine is {status.state}" + _because(status)

    def gauges(self) -> dict[str, tuple[str, float]]:
        status = self.status()
        used = status.cache.num_blocks - status.cache.free_blocks
        return {
            "num_requests_running": ("Requests in the batch.", status.requests.running),
            "num_requests_waiting": ("Requests in the queue.", status.requests.waiting),
            "cache_blocks": ("Blocks of the cache.", status.cache.num_blocks),
            "cache_blocks_free": ("Blocks that no request holds.", status.cache.free_blocks),
            "kv_cache_usage_perc": (
                "Share of the cache in use, 0 to 1.",
                used / max(status.cache.num_blocks, 1),
            ),
            "ready": ("1 if new requests are served.", self.why_not_ready() is None),
            "canary_failures": ("Canaries that failed in a row.", self._canary.num_failures),
            "epoch": ("Incarnation of the rank group.", status.epoch),
        }


def _because(status: EngineStatus) -> str:
    return f": {status.message}" if status.message else ""
