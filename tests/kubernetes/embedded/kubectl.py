"""kubectl against one cluster, as its administrator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embedded.command import DEFAULT_TIMEOUT_S, flags, run
from embedded.errors import CommandFailed
from embedded.tools import tool_path
from embedded.wait import wait_for

FIELD_MANAGER = "embedded-cluster"
# What kubectl says when the API server did not answer in time.
BUSY = "Unable to connect to the server"


@dataclass(frozen=True)
class Kubectl:
    """Call it with kubectl's arguments; it answers with kubectl's standard output."""

    kubeconfig: Path
    # The discovery cache is kept with the cluster, not in the home folder.
    cache: Path

    def __call__(
        self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> str:
        base = flags({"kubeconfig": self.kubeconfig, "cache-dir": self.cache})
        return run([tool_path("kubectl"), *base, *arguments], stdin=stdin, timeout_s=timeout_s)

    def apply(self, *documents: dict[str, Any]) -> None:
        """Server-side apply: CRDs are too large for the annotation of the client-side one."""
        listed = {"apiVersion": "v1", "kind": "List", "items": documents}
        self._apply("-f", "-", stdin=json.dumps(listed))

    def apply_folder(self, folder: Path) -> None:
        self._apply("-f", folder)

    def get(self, *arguments: str) -> dict[str, Any]:
        """The named object or list; an empty dict if it is not there. Reading may be repeated, so
        an API server that is only busy is asked again."""
        words = ("get", *arguments, "--ignore-not-found", "-o", "json")
        try:
            text = self(*words)
        except CommandFailed as error:
            if BUSY not in str(error):
                raise
            text = self(*words)
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def wait_for_crds(self, names: Sequence[str]) -> None:
        """`kubectl wait` can't do it: it fails on a CRD that has no conditions yet."""
        for name in names:
            wait_for(f"the CRD {name} to be served", partial(self._is_served, name), timeout_s=60.0)

    def _is_served(self, crd: str) -> bool:
        conditions = self.get("crd", crd).get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    def wait_for_rollout(self, name: str, namespace: str, timeout_s: float) -> None:
        """Returns once every pod of the Deployment is of its newest template and available."""

        def is_done() -> bool:
            seen = self.get("deployment", name, "-n", namespace)
            status, wanted = seen.get("status", {}), seen.get("spec", {}).get("replicas")
            current = status.get("observedGeneration") == seen.get("metadata", {}).get("generation")
            counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas")}
            counts.add(status.get("availableReplicas", 0))
            return current and counts == {wanted}

        wait_for(
            f"{name} to be available",
            is_done,
            timeout_s=timeout_s,
            interval_s=0.5,
            describe=lambda: self._explain_deployment(name, namespace),
        )

    def _explain_deployment(self, name: str, namespace: str) -> str:
        said = []
        for question in (
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", f"deployment/{name}", "--all-containers", "--tail=20"),
        ):
            try:
                said.append(self(*question, "-n", namespace)[-3000:])
            except CommandFailed as error:
                said.append(str(error))
        return "\n".join(said)

    def _apply(self, *arguments: str | Path, stdin: str | None = None) -> None:
        flags = ["--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}"]
        self("apply", *flags, *arguments, stdin=stdin)
