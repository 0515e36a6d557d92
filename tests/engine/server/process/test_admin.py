"""What the admin port says while a process starts, serves and drains."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tpinference_engine.engine.messages import StepReport
from tpinference_engine.errors import StepTimedOut

StartProcess = Callable[..., Awaitable[Any]]
Send = Callable[[signal.Signals], None]


async def test_admin_port_answers_while_the_engine_starts(start: StartProcess) -> None:
    process = await start()
    await process.wait_for("/livez", lambda answer: answer.status_code == 200)
    ready = await process.admin.get("/readyz")
    assert (ready.status_code, ready.text) == (503, "the engine is starting")
    status = await process.admin.get("/engine/status")
    assert (status.status_code, status.json()["state"]) == (200, "starting")
    with pytest.raises(openai.APIConnectionError):
        await process.client.models.list()
    await process.wait_ready()
    assert (await process.client.models.list()).data[0].model_dump()["max_model_len"] == 256


async def test_nothing_is_served_before_a_token_has_passed_the_ranks(start: StartProcess) -> None:
    process = await start(canary_timeout_s=0.001)
    process.engine.canary_may_pass.clear()
    process.engine.may_start.set()
    async with process.engine.canary_sent:
        await process.engine.canary_sent.wait_for(lambda: process.engine.num_canaries == 1)
    assert process.engine.status().state == "ready"
    ready = await process.admin.get("/readyz")
    assert (ready.status_code, ready.text) == (503, "the engine is starting")
    assert (await process.admin.get("/engine/status")).json()["state"] == "starting"
    with pytest.raises(openai.APIConnectionError):
        await process.client.models.list()
    process.engine.canary_may_pass.set()
    await process.wait_for("/readyz", lambda answer: answer.status_code == 200)
    assert process.engine.num_canaries == 1, "the first is not bound by a canary's time"


async def test_status_has_the_fields_that_the_operator_reads(start: StartProcess) -> None:
    process = await start()
    await process.wait_ready()
    status = (await process.admin.get("/engine/status")).json()
    assert status == {
        "engineId": "e",
        "epoch": 0,
        "state": "ready",
        "reason": None,
        "message": None,
        "stages": [],
        "ranks": [],
        "lastFailure": None,
        "requests": {"running": 0, "waiting": 0},
        "model": {"servedNames": ["tiny"], "maxModelLen": 100},
        "cache": {"numBlocks": 8, "freeBlocks": 6},
        "stepTransport": None,
    }


async def test_drain_keeps_the_process(start: StartProcess, send: Send) -> None:
    process = await start()
    await process.wait_ready()
    stream = await process.stream()
    for _ in range(2):
        drained = await process.admin.post("/drain")
        assert (drained.status_code, drained.json()["state"]) == (202, "draining")
    assert (await process.admin.get("/readyz")).status_code == 503
    assert (await process.admin.get("/drain")).status_code == 405
    process.engine.may_answer.set()
    assert [chunk.choices[0].text async for chunk in stream] == ["b", ""]
    assert not process.task.done()
    send(signal.SIGTERM)
    assert await process.exit_code() == 0


async def test_canary_flips_readiness_and_back(start: StartProcess) -> None:
    process = await start(canary_interval_s=0.001, canary_failure_threshold=2)
    await process.wait_ready()
    process.engine.canary_error = StepTimedOut("no token")
    answer = await process.wait_for("/readyz", lambda answer: answer.status_code == 503)
    assert "canaries failed in a row" in answer.text
    assert (await process.admin.get("/livez")).status_code == 200
    ready = 'tpinference_ready{engine="0",model_name="tiny"} 0.0'
    assert ready in (await process.admin.get("/metrics")).text
    process.engine.canary_error = None
    await process.wait_for("/readyz", lambda answer: answer.status_code == 200)


async def test_core_without_a_sign_of_life_is_not_live(start: StartProcess) -> None:
    process = await start()
    await process.wait_ready()
    process.engine.tick_age_s = 10_000
    answer = await process.admin.get("/livez")
    assert (answer.status_code, "no sign of life" in answer.text) == (503, True)


async def test_metrics_count_what_was_served(start: StartProcess) -> None:
    process = await start()
    await process.wait_ready()
    process.engine.may_answer.set()
    await process.client.completions.create(model="tiny", prompt="abc")
    with pytest.raises(openai.NotFoundError):
        await process.client.completions.create(model="other", prompt="abc")
    answer = await process.admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name, label, value in (
        ("prompt_tokens_total", "", 3.0),
        ("generation_tokens_total", "", 2.0),
        ("request_success_total", 'finished_reason="length",', 1.0),
        ("time_to_first_token_seconds_count", "", 1.0),
        ("inter_token_latency_seconds_count", "", 1.0),
        ("e2e_request_latency_seconds_count", "", 1.0),
        ("request_prompt_tokens_sum", "", 3.0),
        ("request_generation_tokens_sum", "", 2.0),
        ("cache_blocks", "", 8.0),
        ("cache_blocks_free", "", 6.0),
        ("kv_cache_usage_perc", "", 0.25),
        ("num_preemptions_total", "", 3.0),
        ("prefix_cache_queries_total", "", 12.0),
        ("prefix_cache_hits_total", "", 8.0),
        ("ready", "", 1.0),
    ):
        line = f'tpinference_{name}{{engine="0",{label}model_name="tiny"}} {value}'
        assert line in answer.text.splitlines(), answer.text
    refused = 'request_failure_total{code="model_not_found",engine="0",model_name="tiny"} 1.0'
    assert refused in answer.text


async def test_metrics_tell_of_every_step_and_of_those_that_came_too_late(
    start: StartProcess,
) -> None:
    process = await start()
    await process.wait_ready()
    for skews_us, waited in (((2500, 1500), True), ((0, 4000), True), ((0, 0), False)):
        process.engine.on_step(
            StepReport(0.004, 8, skews_us, waited_for_step=waited, queued_s=(0.5, 0.25))
        )
    lines = (await process.admin.get("/metrics")).text.splitlines()
    labels = '{engine="0",model_name="tiny"}'
    for name, value in (
        ("iteration_tokens_total_sum", 24.0),
        ("step_seconds_count", 3.0),
        ("step_device_wait_seconds_count", 2.0),
        ("step_device_wait_seconds_sum", 0.0015),
        ("step_rank_skew_seconds_sum", 0.005),
        ("late_steps_total", 1.0),
        ("request_queue_time_seconds_count", 6.0),
        ("request_queue_time_seconds_sum", 2.25),
    ):
        assert f"tpinference_{name}{labels} {value}" in lines, lines


async def test_unknown_admin_route_is_404(start: StartProcess) -> None:
    process = await start()
    await process.wait_ready()
    assert (await process.admin.get("/v1/models")).status_code == 404
