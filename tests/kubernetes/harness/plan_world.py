"""A world in memory for the deciding half: plans change it, so do a played KubeRay and kubelets.

It knows no HTTP; the acting half has its own fake API server.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from harness.merge import merge

from tpinference_operator import names
from tpinference_operator.actions import (
    Action,
    AdoptChild,
    ApplyService,
    ChildKind,
    CreateChild,
    DeleteChild,
    DrainEngine,
    PatchPodLabel,
    Plan,
    RecordStatus,
)
from tpinference_operator.api.status import Condition, TPInferenceStatus
from tpinference_operator.observe import format_time, observe
from tpinference_operator.observed import Children, KubeRay, Observed
from tpinference_operator.plan import Defaults, plan
from tpinference_operator.render.raycluster import Owner
from tpinference_operator.status import compute_status

Body = dict[str, Any]

DEFAULTS = Defaults(image="example.test/engine:1", ray_version="2.60.0")
OWNER = Owner(name="llm", namespace="ns", uid="owner-uid")
"""The TPInference that the fixture make_tpi makes."""


@dataclass
class World:
    """Raw objects of one namespace, a clock, and who else acts in it: KubeRay, kubelets, engines.

    Nothing happens by itself: a test calls `plan_once`, `kuberay`, `kubelets` in its own order.
    """

    tpi: Body
    defaults: Defaults = DEFAULTS
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    served: KubeRay = KubeRay.SERVED
    objects: dict[str, dict[str, Body]] = field(default_factory=dict)
    engines: dict[str, Body] = field(default_factory=dict)
    events: list[Body] = field(default_factory=list)
    last_uid: int = 0

    def all(self, kind: str) -> list[Body]:
        return list(self.objects.setdefault(kind, {}).values())

    def add(self, kind: str, body: Body) -> Body:
        self.last_uid += 1
        body = copy.deepcopy(body)
        body["metadata"].setdefault("uid", f"uid-{self.last_uid}")
        body["metadata"]["creationTimestamp"] = format_time(self.now)
        self.objects.setdefault(kind, {})[body["metadata"]["name"]] = body
        return body

    def observed(self) -> Observed:
        children = Children(
            ray_clusters=tuple(self.all("RayCluster")),
            pods=tuple(self.all("Pod")),
            services=tuple(self.all("Service")),
            revisions=tuple(self.all("ControllerRevision")),
            events=tuple(self.events),
            engines=self.engines,
        )
        return observe(self.tpi, children, kuberay=self.served, now=self.now)

    def plan(self) -> Plan:
        return plan(self.observed(), self.defaults)

    def status(self) -> TPInferenceStatus:
        observed = self.observed()
        return compute_status(observed, plan(observed, self.defaults))

    def conditions(self) -> dict[str, Condition]:
        return {condition.type: condition for condition in self.status().conditions}

    def told(self, kind: str = "Ready") -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        condition = self.conditions()[kind]
        return condition.status, condition.reason, condition.message

    def plan_once(self, *, cut_after: int | None = None) -> list[str]:
        """Carries one plan out, or its first `cut_after` actions; says what was done. The status
        is written at the end unless it was cut."""
        observed = self.observed()
        decided = plan(observed, self.defaults)
        status = compute_status(observed, decided)
        for action in decided.actions[:cut_after]:
            if isinstance(action, RecordStatus):
                self.tpi["status"] = status.to_raw()
            self._carry_out(action)
        done = [self.describe(action) for action in decided.actions[:cut_after]]
        if cut_after is None or cut_after > len(decided.actions):
            self.tpi["status"] = status.to_raw()
        return done

    def run_until_killed(self, num_actions: int) -> bool:
        """Everybody acts in turn, and the operator dies after so many actions, also in the middle
        of a plan. False when it had nothing left to do before."""
        for _ in range(60):
            num_planned = len(self.plan().actions)
            if num_planned > num_actions:
                self.plan_once(cut_after=num_actions)
                return True
            num_actions -= len(self.plan_once())
            wake_s = self.plan().wake_after_s
            if not num_planned and not self.kuberay() + self.kubelets() and wake_s is None:
                return False
            self.now += timedelta(seconds=wake_s or 1)
        raise AssertionError("did not settle")

    def settle(self, max_rounds: int = 60) -> list[str]:
        """Everybody acts in turn until no plan wants anything; what plans did, in order."""
        done: list[str] = []
        for _ in range(max_rounds):
            did = self.plan_once()
            done += did
            changed = self.kuberay() + self.kubelets()
            wake_s = self.plan().wake_after_s
            if not did and not changed and wake_s is None:
                return done
            self.now += timedelta(seconds=wake_s or 1)
        raise AssertionError(f"did not settle: {done}")

    def kuberay(self) -> int:
        """Makes pods of RayClusters, collects what has no owner, latches Provisioned."""
        clusters = {c["metadata"]["uid"]: c for c in self.all("RayCluster")}
        changed = 0
        for pod in self.all("Pod"):
            if _controller(pod) not in clusters:
                del self.objects["Pod"][pod["metadata"]["name"]]
                changed += 1
        for cluster in clusters.values():
            if "deletionTimestamp" not in cluster["metadata"]:
                changed += self._make_pods(cluster)
        return changed

    def _make_pods(self, cluster: Body) -> int:
        conditions = cluster.setdefault("status", {}).setdefault("conditions", [])
        provisioned = {"type": "RayClusterProvisioned", "status": "True"}
        spec, made = cluster["spec"], 0
        worker_group = spec["workerGroupSpecs"][0]
        templates = [spec["headGroupSpec"]["template"]]
        templates += [worker_group["template"]] * worker_group["numOfHosts"]
        for index, template in enumerate(templates):
            name = f"{cluster['metadata']['name']}-{index}"
            lost_head = index == 0 and provisioned in conditions
            if name not in self.objects.setdefault("Pod", {}) and not lost_head:
                metadata = {**copy.deepcopy(template["metadata"]), "name": name}
                owner = {"uid": cluster["metadata"]["uid"], "controller": True}
                metadata["ownerReferences"] = [owner]
                self.add("Pod", {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}})
                made += 1
        mine = [p for p in self.all("Pod") if _controller(p) == cluster["metadata"]["uid"]]
        if provisioned not in conditions and all(_is_ready(p) for p in mine) and not made:
            conditions.append(provisioned)
            return 1
        return made

    def kubelets(self) -> int:
        """Every pending pod gets a node, runs and is ready."""
        pending = [p for p in self.all("Pod") if p["status"]["phase"] == "Pending"]
        for pod in pending:
            self.set_pod(pod["metadata"]["name"], ready=True)
        return len(pending)

    def set_pod(self, name: str, *, phase: str = "Running", ready: bool = False) -> Body:
        pod = self.objects["Pod"][name]
        pod["spec"]["nodeName"] = "n0"
        pod["status"] = {
            "phase": phase,
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "lastTransitionTime": format_time(self.now),
                },
            ],
        }
        return pod

    def lose_head(self, incarnation: str) -> None:
        self.remove("Pod", self.pod_of(incarnation)["metadata"]["name"])

    def fail_engine(self, incarnation: str, reason: str) -> None:
        pod = self.set_pod(self.pod_of(incarnation)["metadata"]["name"], ready=False)
        self.engines[pod["metadata"]["uid"]] = {
            "state": "failed",
            "reason": reason,
            "message": "what happened",
        }

    def refuse_pods(self, message: str) -> None:
        """KubeRay was refused its pods."""
        condition = {"type": "ReplicaFailure", "status": "True", "message": message}
        self.all("RayCluster")[0]["status"] = {"conditions": [condition]}

    def remove(self, kind: str, name: str) -> None:
        del self.objects[kind][name]

    def change(self, **spec: Any) -> None:
        self.tpi["spec"] = merge(self.tpi["spec"], spec)
        self.tpi["metadata"]["generation"] += 1

    def incarnations(self) -> list[str]:
        """RayClusters as ordinal/epoch."""
        return sorted(_incarnation(c) for c in self.all("RayCluster"))

    def pod_of(self, incarnation: str, role: str = "head") -> Body:
        return next(
            pod
            for pod in self.all("Pod")
            if _incarnation(pod) == incarnation
            and pod["metadata"]["labels"][names.ROLE_LABEL] == role
        )

    def _carry_out(self, action: Action) -> None:
        match action:
            case CreateChild():
                assert action.name not in self.objects.setdefault(action.kind.value, {})
                self.add(action.kind.value, dict(action.manifest))
            case AdoptChild():
                child = self.objects[action.kind.value][action.name]
                child["metadata"]["ownerReferences"] = [dict(action.owner_reference)]
            case DeleteChild():
                # Not there is success, as for the API server's answer.
                if action.name in self.objects[action.kind.value]:
                    child = self.objects[action.kind.value].pop(action.name)
                    assert child["metadata"]["uid"] == action.uid
            case ApplyService():
                name = action.manifest["metadata"]["name"]
                live = self.objects.setdefault("Service", {}).get(name, {})
                # The selector is one value to server-side apply, and ports are ours here.
                self.add("Service", {**merge(live, dict(action.manifest)), **_spec_of(action)})
            case PatchPodLabel():
                pod = self.objects["Pod"][action.pod]
                pod["metadata"]["labels"][action.label] = action.value
            case DrainEngine():
                epoch = self._pod_by_uid(action.pod_uid)["metadata"]["labels"][names.EPOCH_LABEL]
                self.engines[action.pod_uid] = {
                    "state": "draining",
                    "epoch": int(epoch),
                    "requests": {"running": 0, "waiting": 0},
                }

    def describe(self, action: Action) -> str:
        match action:
            case CreateChild(kind=ChildKind.RAY_CLUSTER):
                return f"create {_incarnation(dict(action.manifest))}"
            case CreateChild():
                return f"create {action.kind.value}"
            case AdoptChild():
                return f"adopt {action.kind.value}"
            case DeleteChild(kind=ChildKind.RAY_CLUSTER):
                return f"delete {action.name.split('-')[-2]}/{action.why.split(':')[0]}"
            case DeleteChild():
                return f"delete {action.kind.value}"
            case ApplyService():
                return "apply Service" if action.uid else "create Service"
            case PatchPodLabel():
                pod = self._pod_by_uid(action.uid)
                return f"traffic {action.value} {_incarnation(pod)}"
            case DrainEngine():
                return f"drain {_incarnation(self._pod_by_uid(action.pod_uid))}"
            case RecordStatus():
                return "record"

    def _pod_by_uid(self, uid: str) -> Body:
        return next(p for p in self.all("Pod") if p["metadata"]["uid"] == uid)


def _spec_of(action: ApplyService) -> Body:
    return {"spec": copy.deepcopy(dict(action.manifest["spec"]))}


def _controller(body: Body) -> str:
    return str(body["metadata"]["ownerReferences"][0]["uid"])


def _incarnation(body: Body) -> str:
    labels = body["metadata"]["labels"]
    return f"{labels[names.ORDINAL_LABEL]}/{labels[names.EPOCH_LABEL]}"


def _is_ready(pod: Body) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
