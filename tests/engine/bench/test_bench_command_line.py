"""`bench`'s flags: what they become, and what is refused with which words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.__main__ import main
from tpinference_engine.bench.command_line import parse_bench
from tpinference_engine.bench.settings import (
    LatencyBench,
    Report,
    ServeBench,
    ThroughputBench,
)
from tpinference_engine.errors import InvalidConfig


def parse(line: str) -> Any:
    return parse_bench(line.split(), {})


def test_latency_takes_the_yardsticks_flags_and_the_engines() -> None:
    bench = parse(
        "latency --model /m --input-len 128 --output-len 256 --batch-size 8 --num-iters-warmup 5 "
        "--num-iters 20 --json --output-json /tmp/o.json --device cpu --dtype float32 "
        "--tensor-parallel-size 2 --distributed-executor-backend mp --max-model-len 512"
    )
    assert isinstance(bench, LatencyBench)
    assert (bench.input_len, bench.output_len, bench.batch_size) == (128, 256, 8)
    assert (bench.num_iters_warmup, bench.num_iters) == (5, 20)
    assert bench.report == Report(as_json=True, file=Path("/tmp/o.json"))
    engine = bench.engine
    assert (engine.model, engine.device, engine.dtype) == (Path("/m"), "cpu", "float32")
    assert (engine.tensor_parallel_size, engine.distributed_executor_backend) == (2, "mp")
    assert engine.max_model_len == 512


def test_defaults_are_vllms() -> None:
    latency = parse("latency --model /m")
    assert latency == LatencyBench(engine=latency.engine)
    assert (latency.input_len, latency.output_len, latency.batch_size) == (32, 128, 8)
    assert (latency.num_iters_warmup, latency.num_iters) == (10, 30)
    throughput = parse("throughput --model /m")
    assert throughput == ThroughputBench(engine=throughput.engine)
    assert (throughput.random_input_len, throughput.random_output_len) == (1024, 128)
    assert parse("serve") == ServeBench()


def test_serve_takes_rates_and_percentiles() -> None:
    bench = parse(
        "serve --base-url https://h:1/ --model m --num-prompts 7 --random-input-len 3 "
        "--random-output-len 4 --request-rate 2.5 --max-concurrency 6 --seed 9 "
        "--percentile-metrics ttft,e2el --metric-percentiles 25,99.9"
    )
    assert bench == ServeBench(
        base_url="https://h:1/",
        model="m",
        num_prompts=7,
        random_input_len=3,
        random_output_len=4,
        request_rate=2.5,
        max_concurrency=6,
        seed=9,
        percentile_metrics=("ttft", "e2el"),
        metric_percentiles=(25.0, 99.9),
    )


def test_rate_may_be_infinite() -> None:
    assert math.isinf(parse("serve --request-rate inf").request_rate)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("", "BENCHMARK", id="no benchmark"),
        pytest.param("speed", "choose from 'latency', 'throughput', 'serve'", id="unknown one"),
        pytest.param("latency", "required: --model", id="no model"),
        pytest.param(
            "latency --model /m --input-len 0",
            "--input-len: is '0', must be a whole number, at least 1",
            id="no input",
        ),
        pytest.param(
            "latency --model /m --num-iters-warmup -1",
            "--num-iters-warmup: is '-1', must be a whole number, at least 0",
            id="negative warm-up",
        ),
        pytest.param(
            "latency --model /m --batch-size 9 --max-num-seqs 8",
            "batch_size is 9, must be at most max_num_seqs 8",
            id="batch over the slots",
        ),
        pytest.param(
            "latency --model /m --inp 3", "unrecognized arguments: --inp", id="abbreviated"
        ),
        pytest.param(
            "latency --model /m --port 80", "unrecognized arguments: --port", id="a server's flag"
        ),
        pytest.param("throughput --model /m --tp x", "--tp", id="wrong engine flag"),
        pytest.param(
            "throughput --model /m --num-prompts many",
            "--num-prompts: is 'many', must be a whole number, at least 1",
            id="no number",
        ),
        pytest.param(
            "serve --base-url localhost:8000",
            "base_url is 'localhost:8000', must begin with 'http://' or 'https://'",
            id="no scheme",
        ),
        pytest.param(
            "serve --request-rate 0",
            "request_rate is 0.0, must be greater than 0, or 'inf'",
            id="rate of 0",
        ),
        pytest.param(
            "serve --request-rate nan",
            "request_rate is nan, must be greater than 0, or 'inf'",
            id="rate that is no number",
        ),
        pytest.param(
            "serve --max-concurrency 0",
            "--max-concurrency: is '0', must be a whole number, at least 1",
            id="no concurrency",
        ),
        pytest.param(
            "serve --percentile-metrics ttft,tps",
            "has 'tps', must be names of ttft, tpot, itl, e2el with commas between",
            id="unknown metric",
        ),
        pytest.param(
            "serve --metric-percentiles 50,101",
            "metric_percentiles has 101.0, must be 0 to 100",
            id="percentile over 100",
        ),
        pytest.param(
            "serve --metric-percentiles most",
            "is 'most', must be numbers from 0 to 100 with commas between",
            id="percentile that is no number",
        ),
        pytest.param("serve --seed -1", "is '-1', must be a whole number, at least 0", id="seed"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_with_what_is_allowed(line: str, words: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        parse(line)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        pytest.param(["bench", "--help"], "what clients of a running server see", id="bench"),
        pytest.param(["bench", "latency", "--help"], "--num-iters-warmup N", id="latency"),
        pytest.param(["bench", "throughput", "--help"], "--random-output-len N", id="throughput"),
        pytest.param(["bench", "serve", "--help"], "--metric-percentiles PERCENTS", id="serve"),
    ],
)
def test_help_is_shown(argv: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "exit_code", "words"),
    [
        pytest.param(
            "latency --model /nowhere", 1, "model directory '/nowhere' does not exist", id="model"
        ),
        pytest.param(
            "latency --model /nowhere --output-json /nowhere/o.json",
            2,
            "output_json is '/nowhere/o.json', must be a file in a directory that is there",
            id="file in no directory",
        ),
        pytest.param(
            "latency --model /nowhere --output-json /",
            2,
            "output_json is '/', must be a file in a directory that is there",
            id="directory for a file",
        ),
        pytest.param(
            "serve --base-url http://127.0.0.1:9",
            1,
            "base_url is 'http://127.0.0.1:9', no server answers there",
            id="server",
        ),
    ],
)
def test_what_can_not_be_measured_ends_with_a_reason(
    line: str, exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *line.split()]) == exit_code
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""
