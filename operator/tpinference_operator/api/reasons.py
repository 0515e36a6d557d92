"""The closed list of condition types and reasons, each with a sentence; docs/reference.md has it.

`status.py` may use no other. The engine's own reasons are passed on as they are.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Positive unless noted. Reconciling and Stalled exist only while True."""

    READY = "Ready"
    AVAILABLE = "Available"
    ACCEPTED = "Accepted"
    SCHEDULED = "Scheduled"
    RAY_CLUSTER_READY = "RayClusterReady"
    ENGINE_READY = "EngineReady"
    ROUTE_READY = "RouteReady"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


CONDITION_MEANING = {
    ConditionType.READY: "What the spec asks is in force: all replicas, of the current revision, "
    "each answering through the Service.",
    ConditionType.AVAILABLE: "At least one group, of any revision, answers through the Service.",
    ConditionType.ACCEPTED: "The spec can be acted on here.",
    ConditionType.SCHEDULED: "Every pod has a node.",
    ConditionType.RAY_CLUSTER_READY: "Every pod runs.",
    ConditionType.ENGINE_READY: "Every engine produced a token through all its ranks.",
    ConditionType.ROUTE_READY: "The Service is in place and has a head pod to send requests to.",
    ConditionType.PROGRESSING: "Groups are being made, replaced or removed.",
    ConditionType.DEGRADED: "Negative: something that was asked for does not work.",
    ConditionType.RECONCILING: "Only while True: the operator is at work or waits for the cluster.",
    ConditionType.STALLED: "Only while True: nothing will change until somebody changes something; "
    "after RestartBudgetExhausted, at the latest when the budget is free again.",
}


class Reason(StrEnum):
    """Every reason of every condition."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    KUBERAY_NOT_INSTALLED = "KubeRayNotInstalled"
    KUBERAY_TOO_OLD = "KubeRayTooOld"

    SCALED_TO_ZERO = "ScaledToZero"
    WAITING_FOR_PODS = "WaitingForPods"
    ALL_SCHEDULED = "AllScheduled"
    UNSCHEDULABLE = "Unschedulable"
    VOLUME_NOT_READY = "VolumeNotReady"
    QUOTA_EXCEEDED = "QuotaExceeded"
    PODS_REFUSED = "PodsRefused"

    WAITING_FOR_KUBERAY = "WaitingForKubeRay"
    RAY_CLUSTER_NOT_CREATED = "RayClusterNotCreated"
    RAY_CLUSTER_NOT_OBSERVED = "RayClusterNotObserved"
    RAY_CLUSTER_INVALID = "RayClusterInvalid"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_FAILED = "ContainerFailed"
    PODS_STARTING = "PodsStarting"
    ALL_PODS_RUNNING = "AllPodsRunning"
    HEAD_LOST = "HeadLost"
    RAY_CLUSTER_DELETED = "RayClusterDeleted"
    RAY_CLUSTER_EDITED = "RayClusterEdited"
    WORKERS_LOST = "WorkersLost"

    ENGINE_STARTING = "EngineStarting"
    ENGINE_NOT_READY = "EngineNotReady"
    ENGINE_READY = "EngineReady"
    DRAINING = "Draining"
    INVALID_CONFIG = "InvalidConfig"
    INVALID_MODEL = "InvalidModel"
    INSUFFICIENT_RESOURCES = "InsufficientResources"
    RANKS_NOT_PLACED = "RanksNotPlaced"
    GROUP_FAILED = "GroupFailed"
    ENGINE_CRASHED = "EngineCrashed"
    STARTUP_TIMED_OUT = "StartupTimedOut"

    ROUTE_READY = "RouteReady"
    SERVICE_MISSING = "ServiceMissing"
    NO_READY_GROUP = "NoReadyGroup"
    ADDRESS_PENDING = "AddressPending"

    CREATING = "Creating"
    UPDATING = "Updating"
    SCALING_DOWN = "ScalingDown"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"

    READY = "Ready"
    AVAILABLE = "Available"
    AS_EXPECTED = "AsExpected"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"


def known_reason(text: str) -> Reason | None:
    """A recorded or foreign reason, if it is one of the list."""
    try:
        return Reason(text)
    except ValueError:
        return None


REASON_MEANING = {
    Reason.ACCEPTED: "Nothing in the spec or around it prevents acting on it.",
    Reason.INVALID_SPEC: "A field can't be read, or one is absent that has no default here; the "
    "message names each. Fix the object; its groups go on running as they are.",
    Reason.NAME_CONFLICT: "An object of somebody else has a name that a child needs. It is never "
    "touched: remove it, or rename the TPInference.",
    Reason.KUBERAY_NOT_INSTALLED: "The API server serves no RayCluster. Install KubeRay; the "
    "operator goes on by itself.",
    Reason.KUBERAY_TOO_OLD: "KubeRay's RayCluster lacks fields that are needed; 1.6 has them.",
    Reason.SCALED_TO_ZERO: "spec.replicas is 0: nothing runs, as asked.",
    Reason.WAITING_FOR_PODS: "KubeRay has not made all pods yet.",
    Reason.ALL_SCHEDULED: "Every pod has a node.",
    Reason.UNSCHEDULABLE: "No node fits a pod; the scheduler's words follow.",
    Reason.VOLUME_NOT_READY: "A claim does not exist, is not bound, or can't be mounted.",
    Reason.QUOTA_EXCEEDED: "A ResourceQuota refuses pods. The RayCluster is removed and tried "
    "again every 30 s.",
    Reason.PODS_REFUSED: "The API server refuses pods: PodSecurity, another admission policy, or "
    "a field that no pod may have.",
    Reason.WAITING_FOR_KUBERAY: "KubeRay, which mostly answers within a second, has written no "
    "status for 6 s: it is busy, just being installed or updated, not running, or watches other "
    "namespaces.",
    Reason.RAY_CLUSTER_NOT_CREATED: "A RayCluster is about to be created.",
    Reason.RAY_CLUSTER_NOT_OBSERVED: "KubeRay has written no status for 30 s: it is not running, "
    "or watches other namespaces.",
    Reason.RAY_CLUSTER_INVALID: "KubeRay refuses the RayCluster; its words follow.",
    Reason.IMAGE_PULL_FAILED: "An image can't be pulled; the kubelet's words follow.",
    Reason.CONTAINER_FAILED: "A container could not be started or ended; the kubelet's words "
    "follow.",
    Reason.PODS_STARTING: "Pods have nodes, and not all containers run yet.",
    Reason.ALL_PODS_RUNNING: "Every pod of every group runs.",
    Reason.HEAD_LOST: "The head pod ended or was removed; the group is restarted.",
    Reason.RAY_CLUSTER_DELETED: "A RayCluster was deleted by somebody else; it is replaced.",
    Reason.RAY_CLUSTER_EDITED: "Somebody edited the spec of a RayCluster; it is replaced. Change "
    "the TPInference instead.",
    Reason.WORKERS_LOST: "Worker pods ended after the group had started; KubeRay replaces them.",
    Reason.ENGINE_STARTING: "The engine starts; the message has its stage.",
    Reason.ENGINE_NOT_READY: "The engine ran and is not ready now, or can't be asked.",
    Reason.ENGINE_READY: "Every engine's canary passed.",
    Reason.DRAINING: "A group finishes its requests before it is removed.",
    Reason.INVALID_CONFIG: "The engine refuses a setting. Pods are left standing.",
    Reason.INVALID_MODEL: "The engine can't serve the model directory. Pods are left standing.",
    Reason.INSUFFICIENT_RESOURCES: "The model or its cache does not fit. Pods are left standing.",
    Reason.RANKS_NOT_PLACED: "Ray did not get all ranks placed in time.",
    Reason.GROUP_FAILED: "A rank was lost or stuck and the engine gave up.",
    Reason.ENGINE_CRASHED: "The engine's process ended unexpectedly.",
    Reason.STARTUP_TIMED_OUT: "healthCheck.startupTimeoutSeconds passed before the first token.",
    Reason.ROUTE_READY: "The Service sends requests to at least one ready head pod.",
    Reason.SERVICE_MISSING: "The Service does not exist yet, or is being deleted.",
    Reason.NO_READY_GROUP: "No head pod is ready, so the Service has no endpoint.",
    Reason.ADDRESS_PENDING: "The load balancer has given no address yet.",
    Reason.CREATING: "Groups are being made.",
    Reason.UPDATING: "Groups are being replaced by ones of the update revision.",
    Reason.SCALING_DOWN: "Groups are being removed.",
    Reason.RESTARTING: "A lost group is being replaced, after its back-off.",
    Reason.COMPLETE: "All groups that should exist do, and answer.",
    Reason.READY: "Everything that the spec asks is in force.",
    Reason.AVAILABLE: "At least one group answers.",
    Reason.AS_EXPECTED: "Nothing is broken.",
    Reason.RESTART_BUDGET_EXHAUSTED: "A group was restarted 5 times within an hour; what is left "
    "of it stays for a look. It is restarted by itself once fewer than 5 restarts lie within the "
    "last hour, and at once when a field that rolls changes.",
}

ENGINE_REASONS = frozenset(
    {
        Reason.INVALID_CONFIG,
        Reason.INVALID_MODEL,
        Reason.INSUFFICIENT_RESOURCES,
        Reason.RANKS_NOT_PLACED,
        Reason.GROUP_FAILED,
        Reason.ENGINE_CRASHED,
        Reason.STARTUP_TIMED_OUT,
    }
)
"""What /engine/status may give as its reason."""

RESTARTABLE = frozenset(
    {
        Reason.RANKS_NOT_PLACED,
        Reason.GROUP_FAILED,
        Reason.ENGINE_CRASHED,
        Reason.STARTUP_TIMED_OUT,
    }
)
"""Engine failures that a fresh group may not have. All others would come back as they are."""

FAILING = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.NAME_CONFLICT,
        Reason.KUBERAY_NOT_INSTALLED,
        Reason.KUBERAY_TOO_OLD,
        Reason.UNSCHEDULABLE,
        Reason.VOLUME_NOT_READY,
        Reason.QUOTA_EXCEEDED,
        Reason.PODS_REFUSED,
        Reason.RAY_CLUSTER_NOT_OBSERVED,
        Reason.RAY_CLUSTER_INVALID,
        Reason.IMAGE_PULL_FAILED,
        Reason.CONTAINER_FAILED,
        Reason.HEAD_LOST,
        Reason.WORKERS_LOST,
        Reason.ENGINE_NOT_READY,
        Reason.RESTART_BUDGET_EXHAUSTED,
        *ENGINE_REASONS,
    }
)
"""Something is wrong, rather than not there yet: told before all else, and Degraded."""

FINAL = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.NAME_CONFLICT,
        Reason.RAY_CLUSTER_INVALID,
        Reason.RESTART_BUDGET_EXHAUSTED,
        *(ENGINE_REASONS - RESTARTABLE),
    }
)
"""Trying again does not help: Stalled."""
