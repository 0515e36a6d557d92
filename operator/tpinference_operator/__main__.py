"""`python -m tpinference_operator`: puts the parts together and runs them until a signal.

Any core task that ends takes the process with it, with a non-zero exit code: a half-dead operator
looks alive and does nothing. A lost Lease ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException

from tpinference_operator import cache as views
from tpinference_operator.apply import Applier
from tpinference_operator.cache import Cache
from tpinference_operator.child_events import ChildEvents
from tpinference_operator.controller import Controller, Key
from tpinference_operator.discovery import Discovery, Served
from tpinference_operator.engine_client import Body, EngineClient, EngineWatch
from tpinference_operator.events import EventPoster
from tpinference_operator.handlers import LoginBackoff, Wiring
from tpinference_operator.kube import HttpTransport, Kube
from tpinference_operator.lease import Lease, LeaseLost
from tpinference_operator.login import load_configuration
from tpinference_operator.metrics import Health, Metrics, Server
from tpinference_operator.plan import Defaults
from tpinference_operator.reconcile import Reconciler, StatusWriter
from tpinference_operator.settings import InvalidSetting, Settings, read_process_settings
from tpinference_operator.watches import Watches

logger = logging.getLogger("tpinference_operator")

EXIT_FAILED = 1
EXIT_LEASE_LOST = 3


class CoreTaskEnded(Exception):
    """A task that lives as long as the process did not."""


def main() -> None:
    try:
        settings = read_process_settings(sys.argv[1:])
    except InvalidSetting as error:
        sys.exit(f"tpinference-operator: {error}")
    configure_logging(settings.log_level)
    sys.exit(asyncio.run(run(settings)))


def configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)


async def run(settings: Settings) -> int:
    """Returns the exit code."""
    stop = asyncio.Event()
    take_signals(stop)
    try:
        configuration = await load_configuration(follow_proxy_env=settings.follow_proxy_env)
    except (ConfigException, OSError) as error:
        logger.critical("no API server to talk to: %s", error)
        return EXIT_FAILED
    transport = HttpTransport(configuration)
    engine_client = EngineClient(timeout_s=settings.engine_timeout_seconds)
    try:
        await build(settings, configuration, transport, engine_client, stop).run()
    except Exception as error:
        for cause in error.exceptions if isinstance(error, ExceptionGroup) else (error,):
            logger.critical("ends: %r", cause, exc_info=cause)
        return EXIT_FAILED
    finally:
        await engine_client.close()
        await transport.close()
    logger.info("stopped")
    return 0


def take_signals(stop: asyncio.Event) -> None:
    """As process 1 nothing else would end us. kopf installs its own, so this is called again."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


@dataclass(frozen=True)
class Operator:
    """The core tasks and the order in which they stop."""

    lease: Lease
    controller: Controller
    engines: EngineWatch
    events: EventPoster
    discovery: Discovery
    watches: Watches
    wiring: Wiring
    server: Server
    stop: asyncio.Event

    async def run(self) -> None:
        runner = await self.server.start()
        try:
            await self._run_tasks()
        finally:
            await runner.cleanup()

    async def _run_tasks(self) -> None:
        # kopf comes last: when it stops, it cancels every task that is younger than itself.
        async with asyncio.TaskGroup() as tasks:
            lease = tasks.create_task(core("lease", exit_when_lost(self.lease.run())))
            work = tasks.create_task(
                core("controller", exit_when_lost(self.controller.run(self.lease)))
            )
            others = [
                tasks.create_task(core("engine status", self.engines.run())),
                tasks.create_task(core("events", self.events.run())),
                tasks.create_task(core("discovery", self.discovery.run())),
                tasks.create_task(core("watches", self.watches.run(self.wiring))),
            ]
            await self.stop.wait()
            logger.info("a signal came: stops")
            # The Lease goes last: nothing of ours may be written after a successor has it.
            for stage in ([work], others, [lease]):
                for task in stage:
                    task.cancel()
                await asyncio.wait(stage)


async def core(name: str, task: Awaitable[None]) -> None:
    """Turns a silent end into an error; also a cancellation that was meant for somebody else."""
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    raise CoreTaskEnded(f"the task {name!r} ended")


async def exit_when_lost(task: Awaitable[None]) -> None:
    try:
        await task
    except LeaseLost as error:
        logger.critical("ends at once: %s", error)
        exit_at_once()
    except BaseExceptionGroup as group:
        if group.subgroup(LeaseLost) is not None:
            logger.critical("ends at once: %s", group.exceptions)
            exit_at_once()
        raise


def exit_at_once() -> None:
    """Without clean-up: each further await could let another task write."""
    logging.shutdown()
    os._exit(EXIT_LEASE_LOST)


def build(
    settings: Settings,
    configuration: Configuration,
    transport: HttpTransport,
    engine_client: EngineClient,
    stop: asyncio.Event,
) -> Operator:
    """All parts, each given what it needs and nothing else."""
    metrics, health, cache = Metrics(), Health(), Cache()
    kube = Kube(transport, timeout_s=settings.api_timeout_seconds, on_request=metrics.on_request)
    lease = build_lease(settings, kube)
    fenced_kube = kube.fenced(lease.fence)
    events = EventPoster(fenced_kube)

    def on_served(served: Served) -> None:
        watches.served_changed(served)
        for key in cache.owner_keys():
            controller.enqueue(key)

    def on_engine(key: Key) -> None:
        controller.enqueue(key)

    discovery = Discovery(kube, interval_s=settings.discovery_seconds, on_change=on_served)
    watches = Watches(
        discovery=discovery, namespaces=settings.namespaces, health=health, metrics=metrics
    )
    engines = build_engine_watch(settings, engine_client, cache, on_engine)
    reconciler = Reconciler(
        cache=cache,
        applier=Applier(fenced_kube, cache, engine_client),
        engines=engines,
        discovery=discovery,
        child_events=ChildEvents(fenced_kube),
        statuses=StatusWriter(fenced_kube, cache, events, metrics),
        events=events,
        metrics=metrics,
        defaults=Defaults(
            image=settings.default_engine_image, ray_version=settings.default_ray_version
        ),
    )
    controller = build_controller(settings, reconciler, cache)
    metrics.lease_held.set_function(lambda: float(lease.is_held))
    metrics.queue_length.set_function(lambda: float(len(controller.queue)))

    wiring = Wiring(
        cache=cache,
        controller=controller,
        engines=engines,
        configuration=configuration,
        on_response=watches.on_response,
        on_started=partial(take_signals, stop),
        logins=LoginBackoff(),
    )
    server = Server(metrics, health, address=settings.bind_address, port=settings.port)
    return Operator(lease, controller, engines, events, discovery, watches, wiring, server, stop)


def build_lease(settings: Settings, kube: Kube) -> Lease:
    return Lease(
        kube,
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        identity=settings.identity,
        times=settings.lease_times,
    )


def build_engine_watch(
    settings: Settings, client: EngineClient, cache: Cache, on_change: Callable[[Key], None]
) -> EngineWatch:
    def find_pod(key: Key, uid: str) -> Body | None:
        pods = cache.children(views.PODS, key)
        return next((pod for pod in pods if pod["metadata"]["uid"] == uid), None)

    return EngineWatch(
        client,
        find_pod=find_pod,
        is_indexed=cache.is_indexed,
        on_change=on_change,
        interval_s=settings.engine_status_seconds,
    )


def build_controller(settings: Settings, reconciler: Reconciler, cache: Cache) -> Controller:
    return Controller(
        reconciler,
        known_keys=cache.owner_keys,
        wait_indexed=cache.wait_indexed,
        resync_s=settings.resync_seconds,
        num_workers=settings.workers,
    )


if __name__ == "__main__":
    main()
