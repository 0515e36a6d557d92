"""Waits for a TPInference as a person would, and asks it something over its Service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from embedded.errors import CommandFailed, NotReached
from embedded.kubectl import Kubectl
from embedded.wait import wait_for

READY_TIMEOUT_S = 420.0
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Serving:
    """One TPInference on a cluster."""

    kubectl: Kubectl
    name: str
    namespace: str = "default"

    def read(self) -> dict[str, Any]:
        return self.kubectl.get("tpinference", self.name, "-n", self.namespace)

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition, but only if it is about the spec as it is now; otherwise an empty dict."""
        seen = self.read()
        for condition in seen.get("status", {}).get("conditions", []):
            current = condition.get("observedGeneration") == seen["metadata"]["generation"]
            if condition["type"] == kind and current:
                return dict(condition)
        return {}

    def wait_until_ready(
        self, on_news: Callable[[str], None], timeout_s: float = READY_TIMEOUT_S
    ) -> None:
        """Returns once Ready is True; tells each change of conditions and start-up stages."""
        told: dict[str, str] = {}

        def is_ready() -> bool:
            for topic, news in describe(self.read()):
                if told.get(topic) != news:
                    told[topic] = news
                    on_news(news)
            return self.condition("Ready").get("status") == "True"

        wait_for(
            f"{self.name} to be Ready",
            is_ready,
            timeout_s=timeout_s,
            interval_s=0.5,
            describe=self.explain,
        )

    def wait_for_condition(
        self, kind: str, status: str, reason: str | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """The condition, once it has this status and reason."""
        what = f"{self.name} to be {kind}={status}" + (f" ({reason})" if reason else "")
        return wait_for(
            what,
            lambda: self.find_condition(kind, status, reason),
            timeout_s=timeout_s,
            describe=self.explain,
        )

    def find_condition(
        self, kind: str, status: str, reason: str | None = None
    ) -> dict[str, Any] | None:
        """The condition if it has this status and reason now."""
        seen = self.condition(kind)
        wanted = seen.get("status") == status and reason in (None, seen.get("reason"))
        return seen if wanted else None

    def explain(self) -> str:
        """All that a person would look at next: status, pods, events."""
        try:
            commands = (
                ["get", "tpinference", self.name, "-o", "jsonpath={.status}"],
                ["get", "pods", "-o", "wide"],
                ["get", "events", "--sort-by=.lastTimestamp"],
            )
            parts = [self.kubectl(*command, "-n", self.namespace)[-4000:] for command in commands]
        except CommandFailed as error:
            return str(error)
        return "\n".join(parts)

    def pods(self, role: str) -> list[dict[str, Any]]:
        """The pods of a role, head or worker, that are not going away."""
        selector = f"serving.tpinference.dev/name={self.name},serving.tpinference.dev/role={role}"
        listed = self.kubectl.get("pods", "-n", self.namespace, "-l", selector)
        items = listed.get("items", [])
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def service_url(self) -> str:
        """The Service's own address: this machine has a route to it."""
        spec = self.kubectl.get("service", self.name, "-n", self.namespace)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def engine_status(self) -> dict[str, Any]:
        """What the engine says of itself on the admin port of its head pod."""
        (head,) = self.pods("head")
        url = f"http://{head['status']['podIP']}:8001/engine/status"
        with urllib.request.urlopen(url, timeout=10) as response:
            status: dict[str, Any] = json.loads(response.read())
        return status

    def ask(self, question: str, max_tokens: int = 24) -> str:
        """One chat answer, greedy, over the Service."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = self.post("/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request over the Service."""
        request = urllib.request.Request(
            f"{self.service_url()}{route}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                answer: dict[str, Any] = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise NotReached(f"the engine answered {error.code}: {error.read()!r}") from error
        except OSError as error:
            raise NotReached(f"no answer from {request.full_url}: {error}") from error
        return answer


def describe(seen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a TPInference's status says now, as (topic, sentence)."""
    status = seen.get("status", {})
    for condition in status.get("conditions", []):
        text = f"{condition['type']}={condition['status']} {condition['reason']}"
        message = condition.get("message", "")
        yield condition["type"], f"{text}: {message}" if message else text
    for group in status.get("groups", []):
        for stage in group.get("startup", {}).get("stages", []):
            seconds = stage.get("seconds")
            took = " ..." if seconds is None else f": {seconds} s"
            yield f"{group['name']} {stage['name']}", f"{group['name']}: {stage['name']}{took}"
