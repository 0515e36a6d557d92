"""Asks engines how they are, on their pods' admin port; never through the API server.

What it learns is enrichment. It is asked again when the pod's readiness or address changes, when
a plan wants to know, and on a slow clock; an engine that does not answer delays nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp

from tpinference_operator import names
from tpinference_operator.controller import Key, WorkQueue
from tpinference_operator.kube import was_cancelled
from tpinference_operator.observe import parse_engine

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

NUM_FETCHERS = 8
MAX_ANSWER_BYTES = 1 << 20


class EngineClient:
    """HTTP to one admin port."""

    def __init__(self, *, timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s), trust_env=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def status(self, pod_ip: str) -> Body | None:
        """None when there is no usable answer."""
        try:
            async with self._session.get(admin_url(pod_ip, names.STATUS_ROUTE)) as response:
                if response.status != 200 or (response.content_length or 0) > MAX_ANSWER_BYTES:
                    return None
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("%s: no engine status: %r", pod_ip, error)
            return None
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return None
        return body if isinstance(body, dict) else None

    async def drain(self, pod_ip: str) -> bool:
        """Tells an engine to finish what it has. Whether it heard."""
        try:
            async with self._session.post(admin_url(pod_ip, names.DRAIN_ROUTE)) as response:
                return response.status < 300
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("%s: not told to drain: %r", pod_ip, error)
            return False
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return False


def admin_url(pod_ip: str, route: str) -> str:
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"http://{host}:{names.ADMIN_PORT}{route}"


class EngineWatch:
    """The last answer of each head pod, by pod UID; `on_change` gets the owner of a new one."""

    def __init__(
        self,
        client: EngineClient,
        *,
        find_pod: Callable[[Key, str], Body | None],
        is_indexed: Callable[[], bool],
        on_change: Callable[[Key], None],
        interval_s: float,
    ) -> None:
        self._client = client
        self._find_pod = find_pod
        self._is_indexed = is_indexed
        self._on_change = on_change
        self._interval_s = interval_s
        self._queue: WorkQueue[str] = WorkQueue()
        self._owners: dict[str, Key] = {}
        self._seen: dict[str, tuple[str, bool]] = {}
        self._answers: dict[str, Body] = {}
        self._wanted: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_FETCHERS):
                tasks.create_task(self._fetch_forever(), name=f"engine status {number}")

    def answers(self, pods: Iterable[Body]) -> dict[str, Body]:
        uids = (pod["metadata"]["uid"] for pod in pods)
        return {uid: self._answers[uid] for uid in uids if uid in self._answers}

    def pod_seen(self, key: Key, pod: Body) -> None:
        """An event of a pod: asks its engine if the pod's address or readiness is new."""
        if (pod["metadata"].get("labels") or {}).get(names.ROLE_LABEL) != names.ROLE_HEAD:
            return
        uid = pod["metadata"]["uid"]
        state = (pod_ip(pod), is_ready(pod))
        if state[0] and self._seen.get(uid) != state:
            self._seen[uid] = state
            self._owners[uid] = key
            self._queue.add(uid)

    def pod_gone(self, uid: str) -> None:
        for known in (self._owners, self._seen, self._answers):
            known.pop(uid, None)
        self._wanted.discard(uid)

    def refresh(self, uids: Iterable[str], after_s: float) -> bool:
        """Asks those again then, and wakes their owner with whatever came. False: none is known."""
        known = [uid for uid in uids if uid in self._owners]
        for uid in known:
            self._wanted.add(uid)
            self._queue.add_after(uid, after_s)
        return bool(known)

    async def _fetch_forever(self) -> None:
        while True:
            uid = await self._queue.take()
            try:
                await self._fetch(uid)
            finally:
                self._queue.done(uid)

    async def _fetch(self, uid: str) -> None:
        if not self._is_indexed():
            # The watches start anew: whether a pod is gone can't be told now.
            self._queue.add_after(uid, self._interval_s)
            return
        key = self._owners.get(uid)
        pod = self._find_pod(key, uid) if key is not None else None
        if key is None or pod is None or not pod_ip(pod):
            self.pod_gone(uid)
            return
        answer = await self._client.status(pod_ip(pod))
        if uid not in self._owners:
            return
        self._queue.add_after(uid, self._interval_s)
        changed = self._keep(uid, answer)
        if changed or uid in self._wanted:
            self._wanted.discard(uid)
            self._on_change(key)

    def _keep(self, uid: str, answer: Body | None) -> bool:
        """Stores the answer; whether it says anything new."""
        old = self._answers.pop(uid, None)
        if answer is None:
            return old is not None
        try:
            new_seen = parse_engine(answer)
        except (TypeError, AttributeError, KeyError) as error:
            logger.warning("an engine status that can't be read: %r", error)
            return old is not None
        self._answers[uid] = answer
        return old is None or parse_engine(old) != new_seen


def pod_ip(pod: Body) -> str:
    return str((pod.get("status") or {}).get("podIP") or "")


def is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
