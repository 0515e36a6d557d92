"""The parts of the demo that decide something."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded.demo import EXAMPLE, claim_folder, read_example
from embedded.errors import ClusterError
from embedded.model_volume import render
from embedded.serving import describe
from embedded.stream import finish_reasons
from embedded.tools import TOOLS


def test_the_example_names_the_claim_and_the_model_in_it() -> None:
    example = read_example(EXAMPLE)
    assert (example.name, example.namespace) == ("smollm2", "default")
    assert (example.claim, example.subpath) == ("smollm2", "SmolLM2-135M-Instruct")


def test_the_claims_root_is_where_the_models_place_begins() -> None:
    assert claim_folder(Path("/cache/models/m"), "m") == Path("/cache/models")
    assert claim_folder(Path("/cache/models/m"), "models/m") == Path("/cache")
    assert claim_folder(Path("/cache/models/m"), "") == Path("/cache/models/m")


def test_a_model_that_the_example_does_not_look_for_is_refused() -> None:
    with pytest.raises(ClusterError, match="'other'"):
        claim_folder(Path("/cache/models/m"), "other")


def test_volume_and_claim_are_bound_to_each_other() -> None:
    volume, claim = render(Path("/models"), claim="c", namespace="n")
    assert volume["spec"]["claimRef"] == {"name": "c", "namespace": "n"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]


def test_news_of_a_status_has_conditions_and_stages() -> None:
    stages = [{"name": "rayJoined", "seconds": 12}, {"name": "weightsLoaded"}]
    status = {
        "conditions": [{"type": "Ready", "status": "False", "reason": "R", "message": "m"}],
        "groups": [{"name": "g", "startup": {"stages": stages}}],
    }
    assert [news for _, news in describe({"status": status})] == [
        "Ready=False R: m",
        "g: rayJoined: 12 s",
        "g: weightsLoaded ...",
    ]


def test_a_finish_reason_is_found_among_events() -> None:
    open_event = '{"choices": [{"finish_reason": null}]}'
    last_event = '{"choices": [{"finish_reason": "stop"}]}'
    assert finish_reasons([open_event, last_event, "[DONE]"]) == ["stop"]


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_pinned(name: str) -> None:
    source = TOOLS[name].module.source
    assert (source / "go.mod").is_file()
    assert (source / "go.sum").is_file()
