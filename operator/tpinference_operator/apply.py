"""Carries a plan out, one action after the other, and stops where the world is not as expected.

What is wanted was decided in plan.py; here it becomes requests. Cut anywhere, the next plan goes
on from what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tpinference_operator import cache as views
from tpinference_operator.actions import (
    Action,
    AdoptChild,
    ApplyService,
    ChildKind,
    CreateChild,
    DeleteChild,
    DrainEngine,
    PatchPodLabel,
    RecordStatus,
)
from tpinference_operator.controller import Key
from tpinference_operator.errors import AlreadyExists, ApiConflict, NotFound
from tpinference_operator.kube import (
    CONTROLLER_REVISION,
    POD,
    RAYCLUSTER,
    SERVICE,
    Body,
    Kube,
    Resource,
)
from tpinference_operator.render.service import has_foreign_ports

logger = logging.getLogger(__name__)

RESOURCES: dict[ChildKind, Resource] = {
    ChildKind.RAY_CLUSTER: RAYCLUSTER,
    ChildKind.REVISION: CONTROLLER_REVISION,
    ChildKind.SERVICE: SERVICE,
}


class PlanAgain(Exception):
    """The plan stood on a view that turned out to be old; a new look comes first."""


class Drains(Protocol):
    async def drain(self, pod_ip: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Applier:
    """Everything that actions are sent to. `record` writes the status and raises when refused."""

    kube: Kube
    cache: views.Cache
    engines: Drains

    async def carry_out(
        self, key: Key, actions: tuple[Action, ...], record: Callable[[], Awaitable[None]]
    ) -> None:
        """Raises PlanAgain, or the ApiError that stopped it."""
        for action in actions:
            match action:
                case CreateChild():
                    await self._create(key, action.kind, dict(action.manifest))
                case AdoptChild():
                    await self._adopt(key, action)
                case DeleteChild():
                    await self._delete(key, action)
                case ApplyService():
                    await self._apply_service(key, action)
                case PatchPodLabel():
                    await self._label_pod(key, action)
                case DrainEngine():
                    await self.engines.drain(action.pod_ip)
                case RecordStatus():
                    await record()

    async def _create(self, key: Key, kind: ChildKind, manifest: Body) -> None:
        resource = RESOURCES[kind]
        try:
            body = await self.kube.create(resource, key[0], manifest)
        except AlreadyExists as error:
            await self._show_namesake(key, kind, manifest["metadata"]["name"])
            raise PlanAgain(str(error)) from error
        self.cache.wrote(resource.plural, key, body)

    async def _show_namesake(self, key: Key, kind: ChildKind, name: str) -> None:
        """The next look sees what has taken the name, whatever labels it has."""
        resource = RESOURCES[kind]
        try:
            body = await self.kube.get(resource, key[0], name)
        except NotFound:
            return
        self.cache.show_namesake(resource.plural, key, body)

    async def _adopt(self, key: Key, action: AdoptChild) -> None:
        resource = RESOURCES[action.kind]
        child = self._find(key, resource.plural, action.uid)
        others = child["metadata"].get("ownerReferences") or []
        metadata = {
            "ownerReferences": [*others, dict(action.owner_reference)],
            "resourceVersion": child["metadata"]["resourceVersion"],
        }
        logger.info("%s/%s: adopts %s %s", *key, action.kind.value, action.name)
        body = await self.kube.patch(
            resource, key[0], action.name, uid=action.uid, patch={"metadata": metadata}
        )
        self.cache.wrote(resource.plural, key, body)

    async def _delete(self, key: Key, action: DeleteChild) -> None:
        resource = RESOURCES[action.kind]
        logger.info("%s/%s: deletes %s %s: %s", *key, action.kind.value, action.name, action.why)
        try:
            await self.kube.delete(resource, key[0], action.name, uid=action.uid)
        except (NotFound, ApiConflict) as error:
            # The object that was meant is gone; a namesake stays untouched.
            logger.info("%s/%s: %s", *key, error)
        self.cache.deleted(resource.plural, key, action.uid)

    async def _apply_service(self, key: Key, action: ApplyService) -> None:
        manifest = dict(action.manifest)
        name = manifest["metadata"]["name"]
        try:
            body = await self.kube.apply(SERVICE, key[0], manifest, uid=action.uid)
        except ApiConflict as error:
            if action.uid is not None:
                raise
            await self._show_namesake(key, ChildKind.SERVICE, name)
            raise PlanAgain(str(error)) from error
        if has_foreign_ports(body, manifest):
            uid, ports = body["metadata"]["uid"], {"spec": {"ports": manifest["spec"]["ports"]}}
            body = await self.kube.patch(SERVICE, key[0], name, uid=uid, patch=ports)
        self.cache.wrote(SERVICE.plural, key, body)

    async def _label_pod(self, key: Key, action: PatchPodLabel) -> None:
        patch = {"metadata": {"labels": {action.label: action.value}}}
        try:
            body = await self.kube.patch(POD, key[0], action.pod, uid=action.uid, patch=patch)
        except NotFound as error:
            raise PlanAgain(str(error)) from error
        self.cache.wrote(POD.plural, key, body)

    def _find(self, key: Key, plural: str, uid: str) -> Body:
        for body in self.cache.children(plural, key):
            if body["metadata"]["uid"] == uid:
                return body
        raise PlanAgain(f"{plural} {uid} is not there any more")
