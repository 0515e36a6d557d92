"""Runs kopf, and runs it anew whenever its indexes could be incomplete or out of date.

kopf sees no CRD that appears after its start, fails when one vanishes, and keeps objects that were
deleted while a watch was broken: all three end in the same way, with fresh indexes. Decisions
pause meanwhile. A kopf that ends for any other reason ends this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import kopf

from tpinference_operator import names
from tpinference_operator.discovery import Discovery, Served
from tpinference_operator.handlers import Wiring, build_registry, build_settings, watched_kinds
from tpinference_operator.metrics import Health, Metrics

logger = logging.getLogger(__name__)

HEALTH_CAUSE = "watches"
MIN_LIFE_S = 2.0
"""At most one restart in this time, whatever happens."""
NUM_LOOKS_AFTER_FAILURE = 5
STOP_S = 10.0
"""kopf gives its tasks 5 s, then cancels each once and waits. A watch that is cancelled in the
middle of a request swallows that, goes on, and kopf would wait for ever."""
CANCEL_INTERVAL_S = 1.0


class WatchesEnded(Exception):
    """kopf is over and nothing asked for it."""


class Watches:
    """`run` is a core task; the other methods are called when something happens."""

    def __init__(
        self,
        *,
        discovery: Discovery,
        namespaces: tuple[str, ...],
        health: Health,
        metrics: Metrics,
    ) -> None:
        self._discovery = discovery
        self._namespaces = namespaces
        self._health = health
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop.set()
        self._older_tasks: frozenset[asyncio.Task[Any]] | None = None
        """Those that were there before the kopf that runs now; None: none runs."""
        self._to_list: set[str] = set()
        self._listed: set[str] = set()

    def served_changed(self, served: Served) -> None:
        self._changed.set()
        self._restart(f"what is served changed: {served}")

    def on_response(self, method: str, path: str, is_watch: bool) -> None:
        """kopf got an answer. A second listing means that a watch had a gap: what was deleted in
        it would stay in the index for ever."""
        if method != "GET" or is_watch or path not in self._to_list:
            return
        if path in self._listed:
            self._restart(f"a watch had a gap: {path}")
        self._listed.add(path)
        self._tell_health()

    def _tell_health(self) -> None:
        """Ready is the process that could list everything; a Role that lacks a rule shows here."""
        missing = sorted(self._to_list - self._listed)
        if missing:
            self._health.wait(HEALTH_CAUSE, f"not listed yet: {', '.join(missing)}")
        else:
            self._health.clear(HEALTH_CAUSE)

    async def run(self, wiring: Wiring) -> None:
        while True:
            served = await self._wait_for_own_crd()
            started = time.monotonic()
            await self._run_kopf(wiring, served)
            self._health.wait(HEALTH_CAUSE, "the watches restart")
            await asyncio.sleep(max(0.0, MIN_LIFE_S - (time.monotonic() - started)))

    async def _wait_for_own_crd(self) -> Served:
        while True:
            self._changed.clear()
            served = self._discovery.served
            if served is not None and served.own:
                return served
            missing = f"the CRD {names.PLURAL}.{names.GROUP} is not served"
            why = missing if served is not None else "the API server has not answered yet"
            logger.warning("waits: %s", why)
            self._health.wait(HEALTH_CAUSE, why)
            await self._changed.wait()

    async def _run_kopf(self, wiring: Wiring, served: Served) -> None:
        self._stop = asyncio.Event()
        kinds = watched_kinds(with_ray=served.has_ray)
        self._to_list = {kind.path(ns) for kind in kinds for ns in self._namespaces or (None,)}
        self._listed.clear()
        self._tell_health()
        self._older_tasks = frozenset(asyncio.all_tasks())
        try:
            await kopf.operator(
                registry=build_registry(with_ray=served.has_ray),
                settings=build_settings(),
                memo=wiring,
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
            )
        except Exception as error:
            if not await self._is_explained(served):
                raise
            logger.info("the watches ended as expected: %r", error)
        else:
            if not await self._is_explained(served):
                raise WatchesEnded("kopf ended by itself; its log says why")
        finally:
            self._older_tasks = None
            self._stop.set()
            wiring.cache.detach()

    async def _is_explained(self, served: Served) -> bool:
        """Whether a restart was asked for, or a CRD went away faster than it was noticed."""
        for _ in range(NUM_LOOKS_AFTER_FAILURE):
            if self._stop.is_set() or self._discovery.served != served:
                return True
            await asyncio.sleep(1)
            await self._discovery.look()
        return False

    def _restart(self, why: str) -> None:
        if not self._stop.is_set():
            logger.info("the watches restart: %s", why)
            self._metrics.watch_restarts.inc()
            self._stop.set()
            asyncio.get_running_loop().call_later(STOP_S, self._cancel_again, self._older_tasks)

    def _cancel_again(self, older_tasks: frozenset[asyncio.Task[Any]] | None) -> None:
        """As kopf does: whatever is younger than itself counts as its own."""
        if older_tasks is None or self._older_tasks is not older_tasks:
            return
        left = asyncio.all_tasks() - older_tasks
        logger.info("the watches have not ended: cancels %d tasks once more", len(left))
        for task in left:
            task.cancel()
        asyncio.get_running_loop().call_later(CANCEL_INTERVAL_S, self._cancel_again, older_tasks)
