"""What is measured, and the HTTP server of /metrics, /livez and /readyz.

Alive = the event loop answers: a core task that ends takes the process with it. Ready = the indexes
are complete; leadership is not asked for, or a rolling update of the operator would never end.
"""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tpinference_operator.api.status import TPInferenceStatus
from tpinference_operator.controller import Key

PREFIX = "tpinference_operator"


class Metrics:
    """All of the operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.reconcile_seconds = Histogram(
            f"{PREFIX}_reconcile_seconds", "Time of one reconcile", registry=registry
        )
        self.reconcile_errors = Counter(
            f"{PREFIX}_reconcile_errors", "Failed reconciles", ["error"], registry=registry
        )
        self.requests = Counter(
            f"{PREFIX}_api_requests",
            "Requests to the API server, without kopf's; status 0 is no answer",
            ["verb", "resource", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            f"{PREFIX}_api_request_seconds", "Time of a request", ["verb"], registry=registry
        )
        self.lease_held = Gauge(
            f"{PREFIX}_lease_held", "1 = acts, 0 = stands by", registry=registry
        )
        self.queue_length = Gauge(
            f"{PREFIX}_queue_length", "TPInferences that wait for a worker", registry=registry
        )
        self.watch_restarts = Counter(
            f"{PREFIX}_watch_restarts", "Rebuilds of all indexes", registry=registry
        )
        self.groups = Gauge(
            "tpinference_groups",
            "Groups by state",
            ["namespace", "name", "state"],
            registry=registry,
        )
        self.group_restarts = Gauge(
            "tpinference_group_restarts",
            "Restarts of the groups that exist",
            ["namespace", "name"],
            registry=registry,
        )

    def on_request(self, verb: str, resource: str, status: int, seconds: float) -> None:
        self.requests.labels(verb, resource, str(status)).inc()
        self.request_seconds.labels(verb).observe(seconds)

    def on_status(self, key: Key, status: TPInferenceStatus) -> None:
        ready = sum(group.ready for group in status.groups)
        self.groups.labels(*key, "ready").set(ready)
        self.groups.labels(*key, "unready").set(len(status.groups) - ready)
        self.group_restarts.labels(*key).set(sum(group.restarts for group in status.groups))

    def forget(self, key: Key) -> None:
        for state in ("ready", "unready"):
            self.groups.remove_by_labels({"namespace": key[0], "name": key[1], "state": state})
        self.group_restarts.remove_by_labels({"namespace": key[0], "name": key[1]})


class Health:
    """What this process waits for before it is ready: one sentence a cause."""

    def __init__(self) -> None:
        self._waits: dict[str, str] = {"watches": "the watches have not started"}

    @property
    def is_ready(self) -> bool:
        return not self._waits

    def wait(self, cause: str, why: str) -> None:
        self._waits[cause] = why

    def clear(self, cause: str) -> None:
        self._waits.pop(cause, None)

    def describe(self) -> str:
        return "; ".join(self._waits.values()) or "ok"


class Server:
    """The routes; every answer closes its connection, so that none outlives a scrape."""

    def __init__(self, metrics: Metrics, health: Health, *, address: str, port: int) -> None:
        self._metrics = metrics
        self._health = health
        self._address = address
        self._port = port

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address, self._port).start()
        except BaseException:
            await runner.cleanup()
            raise
        return runner

    async def _livez(self, _: web.Request) -> web.Response:
        return _close(web.Response(text="ok\n"))

    async def _readyz(self, _: web.Request) -> web.Response:
        status = 200 if self._health.is_ready else 503
        return _close(web.Response(status=status, text=self._health.describe() + "\n"))

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return _close(web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST}))


def _close(response: web.Response) -> web.Response:
    response.force_close()
    return response
