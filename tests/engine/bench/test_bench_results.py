"""Results as text and as JSON."""

from __future__ import annotations

import pytest

from tpinference_engine.bench.client import Answer, ServerFailed
from tpinference_engine.bench.latency import LatencyResult
from tpinference_engine.bench.serve import make_result
from tpinference_engine.bench.settings import ServeBench
from tpinference_engine.bench.throughput import ThroughputResult


def test_latency_tells_average_and_percentiles() -> None:
    result = LatencyResult((1.0, 2.0, 3.0))
    assert result.text.splitlines() == [
        "Avg latency: 2.000000 seconds",
        "10% percentile latency: 1.200000 seconds",
        "25% percentile latency: 1.500000 seconds",
        "50% percentile latency: 2.000000 seconds",
        "75% percentile latency: 2.500000 seconds",
        "90% percentile latency: 2.800000 seconds",
        "99% percentile latency: 2.980000 seconds",
    ]
    assert result.json["avg_latency"] == 2.0
    assert result.json["latencies"] == [1.0, 2.0, 3.0]
    assert list(result.json["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput_counts_all_tokens_and_output_apart() -> None:
    result = ThroughputResult(
        elapsed_s=2.0, num_requests=4, num_input_tokens=40, num_output_tokens=20
    )
    assert result.text.startswith(
        "Throughput: 2.00 requests/s, 30.00 total tokens/s, 10.00 output tokens/s"
    )
    assert result.json == {
        "elapsed_time": 2.0,
        "num_requests": 4,
        "total_num_tokens": 60,
        "requests_per_second": 2.0,
        "tokens_per_second": 30.0,
        "output_tokens_per_second": 10.0,
    }


SLOW = Answer(sent_s=1.0, arrivals_s=(1.5, 1.6, 1.9), num_tokens=4)
SINGLE = Answer(sent_s=2.0, arrivals_s=(2.1,), num_tokens=1)


def test_an_answer_knows_its_times() -> None:
    assert SLOW.ttft_s == pytest.approx(0.5)
    assert SLOW.e2el_s == pytest.approx(0.9)
    assert SLOW.itl_s == pytest.approx((0.1, 0.3))
    assert SLOW.tpot_s == pytest.approx(0.4 / 3)  # Two tokens came together.
    assert SINGLE.tpot_s is None
    assert SINGLE.itl_s == ()


def test_serving_tells_what_clients_saw() -> None:
    bench = ServeBench(
        random_input_len=10,
        percentile_metrics=("ttft", "tpot", "itl", "e2el"),
        metric_percentiles=(99.0,),
    )
    result = make_result(bench, 2.0, [SLOW, "the server answered 429: busy", SINGLE])
    found = result.json
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 5)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 12.5
    assert found["mean_ttft_ms"] == pytest.approx(300.0)
    assert found["median_ttft_ms"] == pytest.approx(300.0)
    assert found["p99_ttft_ms"] == pytest.approx(496.0)
    assert found["mean_tpot_ms"] == pytest.approx(400 / 3)
    assert found["mean_itl_ms"] == pytest.approx(200.0)
    assert found["mean_e2el_ms"] == pytest.approx(500.0)
    text = result.text
    assert f"{'Successful requests:':<40} 2 " in text
    assert f"{'Mean TTFT (ms):':<40} 300.00" in text
    assert f"{'P99 ITL (ms):':<40} 298.00" in text
    assert text.endswith("failed: the server answered 429: busy")


def test_serving_of_nothing_is_a_failure() -> None:
    with pytest.raises(ServerFailed, match="all 2 requests failed, the first one: no"):
        make_result(ServeBench(), 1.0, ["no", "neither"])
