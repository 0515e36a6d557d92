"""The RayCluster of a revision, free of ordinal and epoch, and its stamping into a group.

A RayCluster is created and deleted, never edited: KubeRay ignores edits of templates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpinference_operator import names
from tpinference_operator.api.base import quantity_ceil
from tpinference_operator.api.core import ResourceRequirements
from tpinference_operator.api.v1alpha1 import Device, TPInferenceSpec
from tpinference_operator.errors import InvalidSpec
from tpinference_operator.render.engine_command import head_command, worker_command
from tpinference_operator.render.pod import PodPart, render_pod_template

DEFAULT_IMAGE_FLAG = "--default-engine-image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the operator's settings add to a spec when a revision is rendered the first time."""

    image: str
    ray_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Of a TPInference, what its children carry."""

    name: str
    namespace: str
    uid: str

    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What makes one group out of a revision."""

    ordinal: int
    revision: str
    epoch: int


def render_raycluster(spec: TPInferenceSpec, name: str, defaults: Defaults) -> dict[str, Any]:
    """After: valid for KubeRay 1.6 but for metadata.name; the same for equal arguments. Raises
    InvalidSpec or InvalidQuantity: what is rendered is stored, so it must never be half of it."""
    image = spec.engine.image or defaults.image
    if not image:
        raise InvalidSpec(
            (
                "spec.engine.image is not set and the operator has no default: set the field, or "
                f"{DEFAULT_IMAGE_FLAG} (the chart's engine.image) of the operator",
            )
        )
    head = PodPart(
        role=names.ROLE_HEAD,
        section=spec.head,
        command=head_command(spec, name),
        resources=spec.head.resources.to_raw(),
    )
    worker = PodPart(
        role=names.ROLE_WORKER,
        section=spec.workers,
        command=worker_command(),
        resources=_worker_resources(spec),
    )
    return {
        "apiVersion": names.RAY_API_VERSION,
        "kind": names.RAY_KIND,
        "metadata": {
            "labels": names.child_labels(name),
            "annotations": {
                # A lost head is a restart of the whole group, and ours.
                "ray.io/disable-provisioned-head-restart": "true",
                # Our supervisor runs KubeRay's generated command as its child.
                "ray.io/overwrite-container-cmd": "true",
            },
        },
        "spec": {
            "rayVersion": spec.engine.ray_version or defaults.ray_version,
            # Ray's dashboard and job API run code for whoever reaches them.
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                # Workers must find a head that is not ready yet: its engine waits for them.
                "headService": {"spec": {"clusterIP": "None", "publishNotReadyAddresses": True}},
                "rayStartParams": _head_start_params(spec),
                "template": render_pod_template(spec, name, image=image, part=head),
            },
            "workerGroupSpecs": [
                {
                    "groupName": names.WORKER_GROUP,
                    "replicas": 1,
                    "minReplicas": 1,
                    "maxReplicas": 1,
                    "numOfHosts": spec.parallelism.nodes,
                    "rayStartParams": _worker_start_params(spec),
                    "template": render_pod_template(spec, name, image=image, part=worker),
                }
            ],
        },
    }


def group_name(owner: Owner, stamp: Stamp) -> str:
    """Never used twice: a namesake would be shown the pods of the one before it. The owner's UID
    is in the hash, so that holds for a TPInference that was deleted and made again too."""
    incarnation = names.hash8(owner.uid, stamp.revision, stamp.epoch)
    return names.ray_cluster_name(owner.name, stamp.ordinal, incarnation)


def stamp_raycluster(rendered: Mapping[str, Any], owner: Owner, stamp: Stamp) -> dict[str, Any]:
    """Before: `rendered` is as stored in a revision, whoever rendered it. After: one group's
    manifest, ready for create; `rendered` is unchanged."""
    name = group_name(owner, stamp)
    labels = names.group_labels(
        owner.name, ordinal=stamp.ordinal, revision=stamp.revision, epoch=stamp.epoch
    )
    manifest: dict[str, Any] = copy.deepcopy(dict(rendered))
    metadata = manifest["metadata"]
    metadata["name"] = name
    metadata["namespace"] = owner.namespace
    metadata["ownerReferences"] = [owner.reference()]
    metadata["labels"] = {**metadata["labels"], **labels}
    spec = manifest["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        template = group["template"]
        template["metadata"]["labels"] = {**template["metadata"]["labels"], **labels}
        container = template["spec"]["containers"][0]
        container["env"] = [
            {"name": names.ENGINE_ID_ENV, "value": name},
            {"name": names.EPOCH_ENV, "value": str(stamp.epoch)},
            *container["env"],
        ]
    return manifest


def _head_start_params(spec: TPInferenceSpec) -> dict[str, str]:
    """The head holds no rank, and nothing else that asks for a CPU may land on it."""
    return {"num-cpus": "0", "num-gpus": "0", "object-store-memory": _object_store(spec)}


def _worker_start_params(spec: TPInferenceSpec) -> dict[str, str]:
    """One slot a rank. On device CPU Ray's CPUs are the slots, so exactly as many as ranks."""
    ranks = spec.parallelism.ranks_per_pod
    store = {"object-store-memory": _object_store(spec)}
    if spec.engine.device is Device.CPU:
        return {"num-cpus": str(ranks), "num-gpus": "0", **store}
    cpus = max(ranks, _whole_cpus(spec.workers.resources))
    return {"num-cpus": str(cpus), "num-gpus": str(ranks), **store}


def _whole_cpus(resources: ResourceRequirements) -> int:
    """Ray takes whole CPUs only; a part of one counts as one."""
    text = resources.limits.get("cpu") or resources.requests.get("cpu") or "0"
    return quantity_ceil(text)


def _object_store(spec: TPInferenceSpec) -> str:
    """Half of /dev/shm, in bytes; the other half is for gloo, NCCL and torch. Ray would size it
    from memory and then not find the room."""
    return str(quantity_ceil(spec.workers.shm_size) // 2)


def _worker_resources(spec: TPInferenceSpec) -> dict[str, Any]:
    resources = spec.workers.resources.to_raw()
    if spec.engine.device is Device.CPU:
        return resources
    gpus = {spec.workers.gpu_resource_name: str(spec.parallelism.ranks_per_pod)}
    return {
        "requests": {**resources["requests"], **gpus},
        "limits": {**resources["limits"], **gpus},
    }
