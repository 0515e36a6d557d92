"""The engine's settings: what is refused, and that the message says how to put it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpinference_engine.command_line import parse_serve, server_environment
from tpinference_engine.config import EngineConfig, ServerConfig
from tpinference_engine.errors import InvalidConfig


def parse(*flags: str, **environ: str) -> tuple[EngineConfig, ServerConfig]:
    return parse_serve(["/models/chat", *flags], environ)


def test_defaults_are_those_of_the_configs() -> None:
    engine, server = parse()
    wanted = EngineConfig(model=Path("/models/chat"), served_model_name=("chat",))
    assert (engine, server) == (wanted, ServerConfig())


def test_every_flag_reaches_its_setting() -> None:
    engine, server = parse(
        *("--served-model-name", "a", "b", "--dtype", "float32", "--max-model-len", "2048"),
        *(
            "--seed",
            "-5",
            "--device",
            "cpu",
            "--tensor-parallel-size",
            "4",
            "--ranks-per-node",
            "2",
        ),
        *("--distributed-executor-backend", "ray", "--step-transport", "actor-call"),
        *("--ray-address", "10.0.0.1:6379", "--engine-id", "chat-0", "--epoch", "9"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--block-size", "32"),
        *("--scheduling-policy", "priority", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "100", "--gpu-memory-utilization", "0.5"),
        *("--kv-cache-memory-bytes", "4096", "--step-timeout", "11", "--startup-timeout", "12"),
        *("--host", "::", "--port", "1", "--admin-port", "2", "--shutdown-timeout", "0"),
        *("--max-queued-requests", "3", "--canary-interval", "4", "--canary-timeout", "5"),
        *("--canary-failure-threshold", "6"),
    )
    assert engine == EngineConfig(
        model=Path("/models/chat"),
        served_model_name=("a", "b"),
        dtype="float32",
        max_model_len=2048,
        seed=-5,
        device="cpu",
        tensor_parallel_size=4,
        ranks_per_node=2,
        step_transport="actor-call",
        ray_address="10.0.0.1:6379",
        engine_id="chat-0",
        epoch=9,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        scheduling_policy="priority",
        enable_prefix_caching=False,
        block_size=32,
        num_gpu_blocks_override=100,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=4096,
        step_timeout_s=11,
        startup_timeout_s=12,
    )
    assert server == ServerConfig(
        host="::",
        port=1,
        admin_port=2,
        shutdown_timeout_s=0,
        max_queued_requests=3,
        canary_interval_s=4,
        canary_timeout_s=5,
        canary_failure_threshold=6,
    )


def test_environment_gives_what_a_revision_must_not_name() -> None:
    environ = {
        "TPINFERENCE_ENGINE_ID": "chat-0-abc",
        "TPINFERENCE_EPOCH": "3",
        "RAY_ADDRESS": "head:6379",
        "TPINFERENCE_FAILURE_FILE": "/tmp/f",
        "TPINFERENCE_POD_NAME": "pod",
        "TPINFERENCE_NODE_NAME": "node",
    }
    engine, server = parse(**environ)
    assert (engine.engine_id, engine.epoch, engine.ray_address) == ("chat-0-abc", 3, "head:6379")
    assert server == server_environment(environ)
    assert (server.failure_file, server.pod_name, server.node_name) == (
        Path("/tmp/f"),
        "pod",
        "node",
    )


def test_flags_win_over_the_environment() -> None:
    engine, _ = parse(
        *("--epoch", "0", "--engine-id", "flag", "--ray-address", "flag:1"),
        TPINFERENCE_EPOCH="3",
        TPINFERENCE_ENGINE_ID="environment",
        RAY_ADDRESS="environment:1",
    )
    assert (engine.epoch, engine.engine_id, engine.ray_address) == (0, "flag", "flag:1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--dtype", "int8"], "--dtype.*'int8'.*bfloat16", id="unknown dtype"),
        pytest.param(["--tensor-parallel-size", "two"], "'two', must be a whole", id="no number"),
        pytest.param(["--max-num-seqs", "0"], "--max-num-seqs.*'0'.*at least 1", id="too low"),
        pytest.param(
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "max_num_batched_tokens is 8, must be at least max_num_seqs 9",
            id="a step too small for its decodes",
        ),
        pytest.param(["--port", "70000"], "port is 70000, must be 0 to 65535", id="no port"),
        pytest.param(["--port", "8001"], "admin_port is 8001, must differ", id="one port twice"),
        pytest.param(
            ["--gpu-memory-utilization", "1.5"], "is 1.5, must be between 0 and 1", id="share"
        ),
        pytest.param(
            ["--step-timeout", "0"], "step_timeout_s is 0.0, must be greater", id="no time"
        ),
        pytest.param(["--step-timeout", "nan"], "step_timeout_s is nan", id="not a number"),
        pytest.param(
            ["--distributed-executor-backend", "uni", "-tp", "2"],
            "tensor_parallel_size is 2, distributed_executor_backend 'uni' allows 1",
            id="two ranks in one process",
        ),
        pytest.param(
            ["-tp", "3", "--ranks-per-node", "2"],
            "ranks_per_node is 2, must divide tensor_parallel_size 3",
            id="uneven nodes",
        ),
        pytest.param(
            ["--step-transport", "shared-memory"], "compiled-graph.*actor-call", id="no transport"
        ),
        pytest.param(["--no-such-flag"], "unrecognized arguments: --no-such-flag", id="unknown"),
        pytest.param(["--max-num", "3"], "unrecognized arguments: --max-num", id="abbreviated"),
    ],
)
def test_wrong_flag_is_refused_with_what_is_allowed(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        parse(*flags)


def test_wrong_epoch_of_the_environment_is_named() -> None:
    with pytest.raises(InvalidConfig, match="TPINFERENCE_EPOCH is 'x', must be a whole number"):
        parse(TPINFERENCE_EPOCH="x")


def test_more_ranks_a_node_than_there_are_is_no_error() -> None:
    assert parse("-tp", "2", "--ranks-per-node", "8")[0].ranks_per_node == 8


def test_step_limits_hold_a_slot_of_full_length() -> None:
    engine, _ = parse("--block-size", "16", "--max-num-seqs", "4")
    limits = engine.step_limits(max_model_len=33)
    assert (limits.max_num_seqs, limits.max_blocks_per_slot) == (4, 3)
