"""Rules across fields, as CEL that the API server runs. Each message names the field.

Also the lists of flags and variables that the operator sets itself: `extraArgs` and `env` must not.
Parents have `default: {}` in the schema. The API server runs the rules over those bare defaults
too, so a rule asks `has()` even for a field that has a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OWNED_FLAGS = (
    "-tp",
    "--admin-port",
    "--canary-failure-threshold",
    "--canary-interval",
    "--canary-timeout",
    "--device",
    "--distributed-executor-backend",
    "--dtype",
    "--engine-id",
    "--epoch",
    "--host",
    "--max-model-len",
    "--max-num-seqs",
    "--port",
    "--ranks-per-node",
    "--ray-address",
    "--served-model-name",
    "--shutdown-timeout",
    "--startup-timeout",
    "--step-timeout",
    "--step-transport",
    "--tensor-parallel-size",
)
"""Flags of the engine that a field of the spec or the operator sets."""

OWNED_ENV = (
    "FQ_RAY_IP",
    "HOME",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_CGRAPH_buffer_size_bytes",
    "RAY_CGRAPH_get_timeout",
    "RAY_CGRAPH_submit_timeout",
    "RAY_CGRAPH_teardown_timeout",
    "RAY_CLOUD_INSTANCE_ID",
    "RAY_CLUSTER_NAME",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
    "RAY_IP",
    "RAY_NODE_TYPE_NAME",
    "RAY_PORT",
    "RAY_REDIS_ADDRESS",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_worker_niceness",
)
"""Variables that a field of the spec, the operator or KubeRay sets."""

OWNED_ENV_PREFIXES = ("KUBERAY_", "TPINFERENCE_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One CEL validation at `path`, dotted from the object's root; `[]` is a list's item."""

    path: str
    rule: str
    message: str

    def to_raw(self) -> dict[str, Any]:
        return {"rule": self.rule, "message": self.message}


def _cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


_FLAG = "a.split('=')[0].replace('_', '-')"

RULES = (
    Rule(
        path="",
        rule="self.metadata.name.size() <= 40 && "
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        message="metadata.name must have at most 40 characters, start with a letter, end with a "
        "letter or digit, and hold only lower-case letters, digits and '-'",
    ),
    Rule(
        path="spec.model.uri",
        rule="self.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*/?$') || "
        "self.matches('^file:///[^/]')",
        message="spec.model.uri must be pvc://<claim>/<path> or file:///<path>",
    ),
    Rule(
        path="spec.model.uri",
        rule="!self.matches('/[.][.]?(/|$)')",
        message="spec.model.uri must not have '.' or '..' as a part of its path",
    ),
    Rule(
        path="spec.engine",
        rule="!has(self.rayVersion) || int(self.rayVersion.split('.')[0]) > 2 || "
        "(int(self.rayVersion.split('.')[0]) == 2 && int(self.rayVersion.split('.')[1]) >= 52)",
        message="spec.engine.rayVersion must be 2.52.0 or newer: older Ray has no token "
        "authentication",
    ),
    Rule(
        path="spec.engine",
        rule="!has(self.extraArgs) || "
        f"self.extraArgs.all(a, !({_FLAG} in {_cel_list(OWNED_FLAGS)}))",
        message="spec.engine.extraArgs must not hold a flag that another field or the operator "
        f"sets: {' '.join(OWNED_FLAGS)}",
    ),
    Rule(
        path="spec.engine",
        rule="!has(self.env) || self.env.all(e, "
        + " && ".join(f"!e.name.startsWith('{prefix}')" for prefix in OWNED_ENV_PREFIXES)
        + f" && !(e.name in {_cel_list(OWNED_ENV)}))",
        message="spec.engine.env must not set a variable that another field, the operator or "
        f"KubeRay sets: {' '.join(OWNED_ENV)}, and all that start with "
        f"{' or '.join(OWNED_ENV_PREFIXES)}",
    ),
    Rule(
        path="spec.engine.env[]",
        rule="!(has(self.value) && has(self.valueFrom))",
        message="spec.engine.env must have value or valueFrom, not both",
    ),
    Rule(
        path="spec.engine.env[].valueFrom",
        rule="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), "
        "has(self.resourceFieldRef)].filter(x, x).size() == 1",
        message="spec.engine.env.valueFrom must have exactly one of secretKeyRef, "
        "configMapKeyRef, fieldRef, resourceFieldRef",
    ),
    Rule(
        path="spec.engine.compiledGraph",
        rule="!has(self.bufferSize) || "
        "(quantity(string(self.bufferSize)).compareTo(quantity('64Ki')) >= 0 && "
        "quantity(string(self.bufferSize)).compareTo(quantity('1Gi')) <= 0)",
        message="spec.engine.compiledGraph.bufferSize must be from 64Ki to 1Gi",
    ),
    Rule(
        path="spec.parallelism",
        rule="self.tensor <= self.gpusPerNode || self.tensor % self.gpusPerNode == 0",
        message="spec.parallelism.tensor must be at most spec.parallelism.gpusPerNode or "
        "divisible by it",
    ),
    Rule(
        path="spec.workers",
        rule="!has(self.gpuResourceName) || "
        "(!(self.gpuResourceName in self.resources.limits) && "
        "!(self.gpuResourceName in self.resources.requests))",
        message="spec.workers.resources must not name spec.workers.gpuResourceName: the operator "
        "adds one a rank",
    ),
    Rule(
        path="spec.workers",
        rule="!has(self.shmSize) || "
        "quantity(string(self.shmSize)).compareTo(quantity('256Mi')) >= 0",
        message="spec.workers.shmSize must be at least 256Mi",
    ),
    *(
        Rule(path=f"spec.{pod}.tolerations[]", rule=rule, message=f"spec.{pod}.tolerations{said}")
        for pod in ("head", "workers")
        for rule, said in (
            (
                "!(has(self.operator) && self.operator == 'Exists' && has(self.value) && "
                "self.value != '')",
                ": value must be absent with operator Exists",
            ),
            (
                "(has(self.key) && self.key != '') || "
                "(has(self.operator) && self.operator == 'Exists')",
                ": operator must be Exists without a key",
            ),
            (
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                ": effect must be NoExecute with tolerationSeconds",
            ),
        )
    ),
)
