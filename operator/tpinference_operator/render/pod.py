"""What head and worker pod templates have in common. They pass PodSecurity `restricted`.

All of it is on the container, not the pod: KubeRay's init container copies container 0's
securityContext, environment and mounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpinference_operator import names
from tpinference_operator.api.v1alpha1 import HeadSpec, TPInferenceSpec
from tpinference_operator.model_uri import parse_model_uri
from tpinference_operator.render.engine_command import environment

GRACE_AFTER_DRAIN_S = 30
"""After requests have finished: closing the graph, ending ranks and raylet."""

_LOST_NODE_TOLERATION_S = 30
"""The default of 300 s would be an outage of that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPart:
    """What differs between the two templates."""

    role: str
    section: HeadSpec
    command: list[str]
    resources: dict[str, Any]


def render_pod_template(
    spec: TPInferenceSpec, name: str, *, image: str, part: PodPart
) -> dict[str, Any]:
    section = part.section
    return {
        "metadata": {
            "labels": {
                **names.child_labels(name),
                names.ROLE_LABEL: part.role,
                names.TRAFFIC_LABEL: names.TRAFFIC_ON,
            }
        },
        "spec": {
            # An in-place restart would leave a rank that never rejoins.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": spec.update_strategy.drain_seconds
            + GRACE_AFTER_DRAIN_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **({"nodeSelector": section.node_selector} if section.node_selector else {}),
            "tolerations": _tolerations(section),
            "containers": [_container(spec, image, part)],
            "volumes": _volumes(spec),
        },
    }


def _container(spec: TPInferenceSpec, image: str, part: PodPart) -> dict[str, Any]:
    return {
        "name": names.ENGINE_CONTAINER,
        "image": image,
        "imagePullPolicy": spec.engine.image_pull_policy.value,
        "command": part.command,
        "env": environment(spec),
        "resources": part.resources,
        "readinessProbe": _probe(names.READY_ROUTE, periodSeconds=3, failureThreshold=2),
        # Ends a supervisor that hangs. Never a slow start: that has its own clock in the engine.
        "livenessProbe": _probe(
            names.LIVE_ROUTE, initialDelaySeconds=60, periodSeconds=10, failureThreshold=12
        ),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": _mounts(spec),
    }


def _probe(path: str, **timing: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": names.ADMIN_PORT},
        "timeoutSeconds": 5,
        **timing,
    }


def _volumes(spec: TPInferenceSpec) -> list[dict[str, Any]]:
    claim = parse_model_uri(spec.model.uri).claim
    model = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.workers.shm_size}},
        *([model] if claim else []),
    ]


def _mounts(spec: TPInferenceSpec) -> list[dict[str, Any]]:
    source = parse_model_uri(spec.model.uri)
    model = {"name": "model", "mountPath": source.mount_path, "readOnly": True}
    return [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *([model] if source.claim else []),
    ]


def _tolerations(section: HeadSpec) -> list[dict[str, Any]]:
    own = [toleration.to_raw() for toleration in section.tolerations]
    taken = {toleration.get("key") for toleration in own}
    return own + [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_NODE_TOLERATION_S,
        }
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in taken
    ]
