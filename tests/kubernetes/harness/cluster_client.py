"""What a test does to the cluster and sees of it, as its administrator, in one namespace."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embedded.wait import wait_for

Body = dict[str, Any]

PATHS = {
    "tpinferences": "/apis/serving.tpinference.dev/v1alpha1",
    "rayclusters": "/apis/ray.io/v1",
    "controllerrevisions": "/apis/apps/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "services": "/api/v1",
    "pods": "/api/v1",
    "events": "/api/v1",
    "secrets": "/api/v1",
    "serviceaccounts": "/api/v1",
}
READY_TIMEOUT_S = 90.0


class Refused(Exception):
    """The API server said no."""

    def __init__(self, code: int, body: Body) -> None:
        super().__init__(f"{code}: {body.get('message')}")
        self.code = code
        self.body = body


def parse(text: bytes) -> Body:
    """A status as JSON; of a path that is not served, the API server speaks plain text."""
    try:
        body: Body = json.loads(text)
    except ValueError:
        return {"message": text.decode(errors="replace")}
    return body


@dataclass(frozen=True)
class ClusterClient:
    """Plain HTTP; bodies are dicts."""

    url: str
    token: str
    ca_file: Path
    namespace: str = "default"

    def close(self) -> None:
        """Nothing is kept open; here so that the fixture reads as the others do."""

    def make_namespace(self, name: str) -> ClusterClient:
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return replace(self, namespace=name)

    def remove_namespace(self) -> None:
        """Does not wait for it, and does not mind that it is gone."""
        try:
            self.request("DELETE", f"/api/v1/namespaces/{self.namespace}")
        except Refused as error:
            if error.code not in (404, 409):
                raise

    def request(
        self, method: str, path: str, body: Body | None = None, kind: str = "application/json"
    ) -> Body:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, method=method, headers=headers
        )
        context = ssl.create_default_context(cafile=str(self.ca_file))
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                found: Body = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, parse(error.read())) from error

    def is_gone(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except Refused as error:
            if error.code == 404:
                return True
            raise
        return False

    def path(self, plural: str, name: str = "") -> str:
        base = f"{PATHS[plural]}/namespaces/{self.namespace}/{plural}"
        return f"{base}/{name}" if name else base

    def create(self, plural: str, body: Body) -> Body:
        return self.request("POST", self.path(plural), body)

    def get(self, plural: str, name: str) -> Body | None:
        try:
            return self.request("GET", self.path(plural, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def list(self, plural: str) -> list[Body]:
        items: list[Body] = self.request("GET", self.path(plural))["items"]
        return items

    def patch(self, plural: str, name: str, patch: Body, subresource: str = "") -> Body:
        path = self.path(plural, name) + (f"/{subresource}" if subresource else "")
        return self.request("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, plural: str, name: str, propagation: str = "Background") -> None:
        self.request("DELETE", self.path(plural, name), {"propagationPolicy": propagation})

    def condition(self, name: str, kind: str) -> Body:
        """A condition of a TPInference; an empty dict when it has none."""
        body = self.get("tpinferences", name) or {}
        conditions = (body.get("status") or {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_condition(
        self,
        name: str,
        kind: str,
        status: str,
        *,
        reason: str | None = None,
        timeout_s: float = READY_TIMEOUT_S,
        describe: Callable[[], str] = str,
    ) -> Body:
        """Waits for it with the current generation, as `kubectl wait` does."""

        def tell() -> str:
            return f"{self.describe(name)}\n{describe()}"

        return wait_for(
            f"{name}: {kind}={status} {reason or ''}",
            lambda: self.find_condition(name, kind, status, reason),
            timeout_s=timeout_s,
            describe=tell,
        )

    def find_condition(
        self, name: str, kind: str, status: str, reason: str | None = None
    ) -> Body | None:
        """The condition if it is like this now, and about the current generation."""
        generation = (self.get("tpinferences", name) or {}).get("metadata", {}).get("generation")
        seen = self.condition(name, kind)
        good = (
            seen.get("status") == status
            and reason in (None, seen.get("reason"))
            and seen.get("observedGeneration") == generation
        )
        return seen if good else None

    def describe(self, name: str) -> str:
        """What there is, for a failed wait."""
        tpi = self.get("tpinferences", name) or {}
        lines = [json.dumps(tpi.get("status", {}), indent=1)]
        for plural in ("rayclusters", "pods", "services", "controllerrevisions"):
            lines += [f"{plural}: {body['metadata']['name']}" for body in self.list(plural)]
        return "\n".join(lines)

    def snapshot(self) -> dict[str, str]:
        """resourceVersion of everything that a TPInference comes to, and of itself."""
        plurals = ("tpinferences", "rayclusters", "pods", "services", "controllerrevisions")
        return {
            f"{plural}/{body['metadata']['name']}": body["metadata"]["resourceVersion"]
            for plural in plurals
            for body in self.list(plural)
        }
