"""`bench` with a real engine: the core's own process, a small random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tpinference_engine.__main__ import main

pytestmark = pytest.mark.model

ENGINE = (
    "--device cpu --dtype float32 --max-num-seqs 4 --kv-cache-memory-bytes 1000000 "
    "--max-model-len 64"
)


@pytest.fixture(params=["uni", pytest.param("ray", marks=pytest.mark.ray)])
def engine_flags(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> list[str]:
    model = tiny_model("llama-9-heads-3-kv")
    backend = f"--model {model} --distributed-executor-backend {request.param}"
    return f"{backend} {ENGINE}".split()


def test_latency_of_a_real_engine(
    engine_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latency.json"
    shape = "--input-len 5 --output-len 40 --batch-size 4 --num-iters-warmup 1 --num-iters 3"
    argv = ["bench", "latency", *shape.split(), *engine_flags, "--json", "--output-json", str(file)]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(file.read_text())
    assert len(printed["latencies"]) == 3
    assert all(seconds > 0 for seconds in printed["latencies"])
    assert printed["avg_latency"] == pytest.approx(sum(printed["latencies"]) / 3)


def test_throughput_of_a_real_engine(
    engine_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """More requests than slots; none ends before its length, though ends of sequence come up."""
    shape = "--num-prompts 12 --random-input-len 5 --random-output-len 30"
    assert main(["bench", "throughput", *shape.split(), *engine_flags]) == 0
    shown = capsys.readouterr().out
    assert "Total num prompt tokens:  60\n" in shown
    assert "Total num output tokens:  360\n" in shown


def test_lengths_over_the_models_are_refused(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model {tiny_model('llama-9-heads-3-kv')} {ENGINE}".split()
    shape = "--input-len 50 --output-len 15 --batch-size 4"
    assert main(["bench", "latency", *shape.split(), *flags]) == 2
    words = "input_len is 50 and output_len is 15, must be at most 64 together, the model's length"
    assert words in capsys.readouterr().err
