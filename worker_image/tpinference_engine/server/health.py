"""What the probes and /engine/status say: the engine's own status, and what only the server knows.

Read-only over both. It decides nothing but the answers.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tpinference_engine.engine.status import EngineStatus
from tpinference_engine.scheduler.stats import SchedulerStats
from tpinference_engine.server.canary import Canary
from tpinference_engine.server.gate import Gate
from tpinference_engine.server.metrics import Reading


class Living(Protocol):
    """The part of the engine that tells how it is."""

    def status(self) -> EngineStatus: ...

    @property
    def tick_age_s(self) -> float: ...

    @property
    def stats(self) -> SchedulerStats: ...


class Health:
    def __init__(
        self, engine: Living, gate: Gate, canary: Canary, *, max_tick_age_s: float
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._canary = canary
        self._max_tick_age_s = max_tick_age_s
        self._is_serving = False

    def set_serving(self) -> None:
        """A token has passed all ranks and the OpenAI port is open."""
        self._is_serving = True

    def status(self) -> EngineStatus:
        status = self._engine.status()
        if status.state != "ready":
            return status
        if self._gate.is_closed:
            return msgspec.structs.replace(status, state="draining")
        return status if self._is_serving else msgspec.structs.replace(status, state="starting")

    def why_not_live(self) -> str | None:
        """Generous: only a core that is stuck beyond any step's deadline is restarted for it.

        A failed engine ends this process, and a slow start is no fault.
        """
        age = self._engine.tick_age_s
        if self._engine.status().state not in ("ready", "draining") or age < self._max_tick_age_s:
            return None
        return f"the engine core gave no sign of life for {age:.0f} s"

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

    def readings(self) -> dict[str, Reading]:
        status, stats = self.status(), self._engine.stats
        used = status.cache.num_blocks - status.cache.free_blocks
        usage = used / max(status.cache.num_blocks, 1)
        ready = self.why_not_ready() is None
        transport = (("transport", status.step_transport or "none"),)
        return {
            "num_requests_running": Reading("Requests in the batch.", status.requests.running),
            "num_requests_waiting": Reading("Requests in the queue.", status.requests.waiting),
            "cache_blocks": Reading("Blocks of the cache.", status.cache.num_blocks),
            "cache_blocks_free": Reading("Blocks that no request holds.", status.cache.free_blocks),
            "kv_cache_usage_perc": Reading("Share of the cache in use, 0 to 1.", usage),
            "num_preemptions": Reading("Requests put back.", stats.num_preemptions, "counter"),
            "prefix_cache_queries": Reading(
                "Tokens looked up in the prefix cache.", stats.prefix_cache_queries, "counter"
            ),
            "prefix_cache_hits": Reading(
                "Tokens found in the prefix cache.", stats.prefix_cache_hits, "counter"
            ),
            "step_transport_info": Reading("How the next step travels.", 1, labels=transport),
            "ready": Reading("1 if new requests are served.", ready),
            "canary_failures": Reading("Canaries failed in a row.", self._canary.num_failures),
            "epoch": Reading("Incarnation of the rank group.", status.epoch),
        }


def _because(status: EngineStatus) -> str:
    return f": {status.message}" if status.message else ""
