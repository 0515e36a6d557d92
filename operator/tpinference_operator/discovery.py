"""Which CRDs the API server serves: ours, KubeRay's, and whether KubeRay's is new enough.

Read from the discovery documents, which every account may read. kopf never notices a CRD that
appears later, so `__main__` looks here again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tpinference_operator import names
from tpinference_operator.errors import ApiError
from tpinference_operator.kube import Body, Kube
from tpinference_operator.observed import KubeRay

logger = logging.getLogger(__name__)

OWN_PATH = f"/apis/{names.API_VERSION}"
RAY_PATH = "/apis/ray.io/v1"
RAY_SCHEMA_PATH = "/openapi/v3/apis/ray.io/v1"
RAY_PLURAL = "rayclusters"
NEEDED_FIELDS = ("authOptions", "upgradeStrategy")
"""Of RayClusterSpec; a CRD that lacks one is older than KubeRay 1.6."""


@dataclass(frozen=True, slots=True)
class Served:
    """What was served at one moment."""

    own: bool
    kuberay: KubeRay

    @property
    def has_ray(self) -> bool:
        return self.kuberay is not KubeRay.MISSING


async def discover(kube: Kube, before: Served | None) -> Served:
    """The schema is large: read when the group appeared, and again while it is too old."""
    own = await kube.discover(OWN_PATH)
    ray = await kube.discover(RAY_PATH)
    if not _has(ray, RAY_PLURAL):
        kuberay = KubeRay.MISSING
    elif before is not None and before.kuberay is KubeRay.SERVED:
        kuberay = KubeRay.SERVED
    else:
        kuberay = age_of(await kube.discover(RAY_SCHEMA_PATH))
    return Served(own=_has(own, names.PLURAL), kuberay=kuberay)


def age_of(schema: Body | None) -> KubeRay:
    """Whether the RayCluster in an OpenAPI document has every field that we set. One that is not
    in it yet (the document comes a moment after the CRD) counts as not served yet."""
    schemas = ((schema or {}).get("components") or {}).get("schemas") or {}
    clusters = [body for body in schemas.values() if _is_ray_cluster(body)]
    if not clusters:
        return KubeRay.MISSING
    is_new = any(all(f in _spec_fields(cluster) for f in NEEDED_FIELDS) for cluster in clusters)
    return KubeRay.SERVED if is_new else KubeRay.TOO_OLD


class Discovery:
    """Keeps looking; `on_change` gets what is served whenever that is not as before."""

    def __init__(
        self, kube: Kube, *, interval_s: float, on_change: Callable[[Served], None]
    ) -> None:
        self._kube = kube
        self._interval_s = interval_s
        self._on_change = on_change
        self.served: Served | None = None

    @property
    def kuberay(self) -> KubeRay:
        return self.served.kuberay if self.served is not None else KubeRay.MISSING

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """A look that fails changes nothing: what was served before counts."""
        try:
            served = await discover(self._kube, self.served)
        except ApiError as error:
            logger.warning("discovery: %s", error)
            return
        if served != self.served:
            logger.info("served now: our CRD %s, KubeRay %s", served.own, served.kuberay.value)
            self.served = served
            self._on_change(served)


def _has(document: Body | None, plural: str) -> bool:
    resources: Iterable[Body] = (document or {}).get("resources") or ()
    return any(resource.get("name") == plural for resource in resources)


def _is_ray_cluster(schema: Body) -> bool:
    kinds = schema.get("x-kubernetes-group-version-kind") or ()
    return any(kind.get("kind") == names.RAY_KIND for kind in kinds)


def _spec_fields(cluster: Body) -> Body:
    spec = (cluster.get("properties") or {}).get("spec") or {}
    fields: Body = spec.get("properties") or {}
    return fields
