"""Every string that two parties must agree on: the API group, labels, ports, child names.

Knows no spec and no cluster; the labels each have a sentence, because people select on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

GROUP = "serving.tpinference.dev"
VERSION = "v1alpha1"
KIND = "TPInference"
PLURAL = "tpinferences"
API_VERSION = f"{GROUP}/{VERSION}"

RAY_API_VERSION = "ray.io/v1"
RAY_KIND = "RayCluster"

FIELD_MANAGER = "tpinference-operator"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"

NAME_LABEL = f"{GROUP}/name"
"""The TPInference that an object belongs to; on every child and every pod."""
REVISION_LABEL = f"{GROUP}/revision"
"""hash8 of the revision that a group was stamped from."""
EPOCH_LABEL = f"{GROUP}/epoch"
"""Incarnation of a group; grows with every group that is made for one TPInference."""
ORDINAL_LABEL = f"{GROUP}/ordinal"
"""Which replica a group is, from 0."""
ROLE_LABEL = f"{GROUP}/role"
"""head or worker."""
TRAFFIC_LABEL = f"{GROUP}/traffic"
"""on = the Service may send requests to this head; off = draining or not switched to yet."""

ROLE_HEAD = "head"
ROLE_WORKER = "worker"
TRAFFIC_ON = "on"
TRAFFIC_OFF = "off"

ENGINE_CONTAINER = "engine"
API_PORT = 8000
"""OpenAI routes only; the one port that a Service has."""
ADMIN_PORT = 8001
"""Probes, /engine/status, /drain, /metrics; in no Service."""

STATUS_ROUTE = "/engine/status"
DRAIN_ROUTE = "/drain"
READY_ROUTE = "/readyz"
LIVE_ROUTE = "/livez"

ENGINE_ID_ENV = "TPINFERENCE_ENGINE_ID"
EPOCH_ENV = "TPINFERENCE_EPOCH"

MAX_NAME_LENGTH = 40
"""KubeRay cuts RayCluster names at 53; `-<ordinal>-<hash8>` takes up to 12."""

WORKER_GROUP = "tp"


def hash8(*parts: Any) -> str:
    """Eight hex digits over JSON data; the same in every process and version."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def revision_name(owner: str, revision: str) -> str:
    return f"{owner}-{revision}"


def hash8_of(name: str) -> str:
    """Of a revision's name, what identifies it; empty when that is not such a name. Its label is
    for people who select on it: anybody may edit a label."""
    found = re.search(r"-([0-9a-f]{8})$", name)
    return found[1] if found else ""


def ray_cluster_name(owner: str, ordinal: int, incarnation: str) -> str:
    return f"{owner}-{ordinal}-{incarnation}"


def child_labels(owner: str) -> dict[str, str]:
    return {MANAGED_BY_LABEL: FIELD_MANAGER, NAME_LABEL: owner}


def group_labels(owner: str, *, ordinal: int, revision: str, epoch: int) -> dict[str, str]:
    return {
        **child_labels(owner),
        ORDINAL_LABEL: str(ordinal),
        REVISION_LABEL: revision,
        EPOCH_LABEL: str(epoch),
    }
