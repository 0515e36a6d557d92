"""Ports, routes, environment and reasons that both packages write down, in agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from starlette.applications import Starlette
from starlette.routing import Route

from tpinference_engine.config import ServerConfig
from tpinference_engine.engine import async_engine, process
from tpinference_engine.engine.status import FailureReason
from tpinference_engine.server import admin_app as engine_port
from tpinference_engine.server import app, listener
from tpinference_engine.supervisor import admin_port as supervisor_port
from tpinference_engine.supervisor.command_line import ENGINE_LAST_WORDS_S, parse_supervise
from tpinference_engine.supervisor.failure import ended_status
from tpinference_operator import names
from tpinference_operator.api.reasons import ENGINE_REASONS
from tpinference_operator.api.rules import OWNED_ENV, OWNED_ENV_PREFIXES, RULES
from tpinference_operator.api.v1alpha1 import TPInferenceSpec
from tpinference_operator.observe import parse_engine
from tpinference_operator.render.engine_command import environment
from tpinference_operator.render.pod import GRACE_AFTER_DRAIN_S

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("cel_cases.yaml").read_text())


def test_reasons_of_the_engine_are_the_operators() -> None:
    assert {str(reason) for reason in ENGINE_REASONS} == set(get_args(FailureReason))


def test_ends_of_the_engine_add_up_to_less_than_it_is_given() -> None:
    """Each part may take all of its time: the abort of what is left after the drain, answers that
    are written, both ports, the core, its kill and its last words."""
    parts = [
        async_engine.ABORT_TIMEOUT_S,
        app.LAST_WORDS_S,
        2 * listener.LAST_WORDS_S,
        async_engine.SHUTDOWN_TIMEOUT_S,
        process.KILL_TIMEOUT_S,
        process.LAST_WORDS_TIMEOUT_S,
    ]
    assert sum(parts) < ENGINE_LAST_WORDS_S, parts


def test_ends_of_engine_and_ray_fit_the_pods_grace() -> None:
    environ = {"KUBERAY_GEN_RAY_START_CMD": "ray start --block"}
    argv = ["--role", "head", "--", "serve", "/m", "--shutdown-timeout", "33"]
    config = parse_supervise(argv, environ)
    assert config.engine_stop_s + config.ray_stop_s < 33 + GRACE_AFTER_DRAIN_S


def test_ports_are_the_engines_defaults() -> None:
    server = ServerConfig()
    assert (server.port, server.admin_port) == (names.API_PORT, names.ADMIN_PORT)


def paths(app: Starlette) -> set[str]:
    return {route.path for route in app.routes if isinstance(route, Route)}


def test_both_admin_ports_have_the_routes_that_are_probed_and_asked() -> None:
    """Neither is asked anything here, so what they would report is left out."""
    unused: Any = None
    engine = paths(engine_port.admin_app(unused, unused, unused))
    head = paths(supervisor_port.admin_app(lambda: None, dict))
    worker = paths(supervisor_port.admin_app(lambda: None, None))
    probed = {names.READY_ROUTE, names.LIVE_ROUTE}
    assert probed | {names.STATUS_ROUTE, names.DRAIN_ROUTE} <= engine
    assert probed | {names.STATUS_ROUTE} <= head
    assert probed <= worker


def test_the_supervisors_last_status_is_read() -> None:
    failure: Any = {
        "reason": "InvalidModel",
        "message": "config.json is missing",
        "time": "2026-01-01T00:00:00Z",
        "rank": None,
        "pod": None,
        "node": None,
        "exitCode": 1,
    }
    seen = parse_engine(ended_status("llm-0-abc", 3, failure))
    assert (seen.engine_id, seen.epoch, seen.state) == ("llm-0-abc", 3, "failed")
    assert (seen.reason, seen.message) == ("InvalidModel", "config.json is missing")
    assert seen.last_failure is not None and seen.last_failure.exit_code == 1


def test_environment_that_is_rendered_can_not_be_set_by_hand() -> None:
    spec = TPInferenceSpec.model_validate(
        {"model": {"uri": "file:///m"}, "parallelism": {"tensor": 1}}
    )
    rendered = {variable["name"] for variable in environment(spec)}
    rendered |= {names.ENGINE_ID_ENV, names.EPOCH_ENV}
    free = {
        name
        for name in rendered
        if name not in OWNED_ENV and not name.startswith(OWNED_ENV_PREFIXES)
    }
    assert free == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.message[:50])
def test_every_rule_has_one_accepted_and_one_rejected_object(rule: Any) -> None:
    matching = [case for case in CASES if rule.message.startswith(case["rule"])]
    assert len(matching) == 1
    assert matching[0].keys() == {"rule", "accept", "reject"}


def test_every_case_belongs_to_a_rule() -> None:
    messages = [rule.message for rule in RULES]
    orphans = [c["rule"] for c in CASES if not any(m.startswith(c["rule"]) for m in messages)]
    assert orphans == []
