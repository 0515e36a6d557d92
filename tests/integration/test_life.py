"""From apply to Ready, and back to nothing."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.timeout(180)
def test_a_tpinference_becomes_ready_and_goes_without_a_trace(
    operator: Any, client: Any, make_tpi: Any, engines: Any, eventually: Any
) -> None:
    client.create("tpinferences", make_tpi())
    client.wait_condition("llm", "Ready", "True", describe=operator.log_tail)
    (cluster,) = client.list("rayclusters")
    roles = [p["metadata"]["labels"]["serving.tpinference.dev/role"] for p in client.list("pods")]
    assert sorted(roles) == ["head", "worker", "worker"]
    assert engines.asked
    client.delete("tpinferences", "llm")
    eventually(
        "all of it to go",
        lambda: client.snapshot() == {},
        timeout_s=60,
        describe=lambda: client.describe("llm"),
    )
