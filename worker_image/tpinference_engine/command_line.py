"""The command line and the environment, read once and here alone, into configs.

Flags have vLLM's names where vLLM has one. The operator renders this command line
(`render/engine_command.py` there); tests/contract feeds the one to the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

from tpinference_engine.config import (
    TRANSPORTS_OF_BACKEND,
    Backend,
    Device,
    Dtype,
    EngineConfig,
    SchedulingPolicy,
    ServerConfig,
)
from tpinference_engine.errors import InvalidConfig

_MODEL_HELP = "a Hugging Face model directory"


class Parser(argparse.ArgumentParser):
    """Raises what it refuses, so that whoever waits for the engine's failure can be told too."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(message)


class HelpFormatter(argparse.HelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if shown else str(action.help)


def parse_serve(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[EngineConfig, ServerConfig]:
    """Configs of `serve <argv>`. Raises InvalidConfig that says what is allowed."""
    args = serve_parser().parse_args(argv)
    config = engine_config(args, environ)
    if args.served_model_name:
        config = replace(config, served_model_name=tuple(args.served_model_name))
    return config, _server_config(args, environ)


def serve_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tpinference-engine serve",
        description="Serve one model over the OpenAI API on a tensor-parallel group of ranks.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument("model", type=Path, metavar="MODEL_DIR", help=_MODEL_HELP)
    model.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        default=None,
        help="names clients may use, the first one is in answers (default: the directory's name)",
    )
    _add_model_flags(model)
    _add_parallel_flags(parser.add_argument_group("ranks"))
    _add_step_flags(parser.add_argument_group("steps and cache"))
    life = parser.add_argument_group("HTTP and life")
    _add_start_flags(life)
    _add_server_flags(life)
    return parser


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """All that `serve` has for its engine, for a command that runs one and serves nobody."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="MODEL_DIR", required=True, help=_MODEL_HELP)
    _add_model_flags(model)
    ranks = parser.add_argument_group("ranks")
    _add_parallel_flags(ranks)
    _add_start_flags(ranks)
    _add_step_flags(parser.add_argument_group("steps and cache"))


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dtype", choices=get_args(Dtype), default="auto", help="auto = the checkpoint's own")
    add(
        "--max-model-len",
        metavar="N",
        type=whole(1),
        help="tokens of prompt and output (default: the model's)",
    )
    add(
        "--seed",
        metavar="N",
        type=whole(None),
        default=0,
        help="of the seeds that unseeded requests get",
    )


def _add_parallel_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=get_args(Device), default="cuda", help="where ranks compute")
    add("--tensor-parallel-size", "-tp", metavar="N", type=whole(1), default=1, help="ranks")
    add(
        "--ranks-per-node",
        metavar="N",
        type=whole(1),
        help="ranks a Ray node holds (default: what fits)",
    )
    add(
        "--distributed-executor-backend",
        choices=get_args(Backend),
        default="ray",
        help="ray = actors on any nodes; mp = processes of this machine; uni = one rank, here",
    )
    add(
        "--step-transport",
        choices=TRANSPORTS_OF_BACKEND["ray"],
        default="compiled-graph",
        help="how steps reach the ranks under ray",
    )
    add(
        "--ray-address",
        metavar="HOST:PORT",
        help="a running Ray cluster (default: RAY_ADDRESS, else a local Ray of the engine's own)",
    )
    add(
        "--engine-id",
        metavar="NAME",
        help="in actors' names (default: TPINFERENCE_ENGINE_ID, else 'engine')",
    )
    add(
        "--epoch",
        metavar="N",
        type=whole(0),
        help="incarnation of the group (default: TPINFERENCE_EPOCH, else 0)",
    )


def _add_step_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-num-seqs",
        metavar="N",
        type=whole(1),
        default=256,
        help="requests in one step at most",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=whole(1),
        default=2048,
        help="tokens of one step at most",
    )
    add(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        default="fcfs",
        help="who goes first: first come, or the lowest priority of the requests' own",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute a prefix that requests share once",
    )
    add("--block-size", metavar="N", type=whole(1), default=16, help="tokens of a cache block")
    add(
        "--num-gpu-blocks-override",
        metavar="N",
        type=whole(1),
        help="cache blocks (default: what fits)",
    )
    add(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=number,
        default=0.9,
        help="share of a GPU's memory that weights and cache may take",
    )
    add(
        "--kv-cache-memory-bytes",
        metavar="N",
        type=whole(1),
        help="cache of one rank (default: from --gpu-memory-utilization; on cpu 1 GiB)",
    )
    add(
        "--step-timeout",
        metavar="SECONDS",
        type=number,
        default=300.0,
        help="seconds until a step fails the group",
    )


def _add_start_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--startup-timeout",
        metavar="SECONDS",
        type=number,
        default=3600.0,
        help="seconds until a start has failed",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="0.0.0.0", help="address of both ports")
    add("--port", metavar="N", type=whole(0), default=8000, help="OpenAI routes")
    add(
        "--admin-port",
        metavar="N",
        type=whole(0),
        default=8001,
        help="probes, status, metrics, drain",
    )
    add(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=number,
        default=60.0,
        help="seconds that requests have to finish in after SIGTERM",
    )
    add(
        "--max-queued-requests",
        metavar="N",
        type=whole(1),
        default=1024,
        help="more are answered with 429",
    )
    add(
        "--canary-interval",
        metavar="SECONDS",
        type=number,
        default=15.0,
        help="seconds between canary tokens",
    )
    add(
        "--canary-timeout",
        metavar="SECONDS",
        type=number,
        default=30.0,
        help="seconds a canary token may take",
    )
    add(
        "--canary-failure-threshold",
        metavar="N",
        type=whole(1),
        default=3,
        help="in a row, then not ready",
    )


def engine_config(args: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """Of the flags that `serve` and `add_engine_flags` share. Raises InvalidConfig."""
    engine_id = args.engine_id or environ.get("TPINFERENCE_ENGINE_ID") or "engine"
    epoch = args.epoch if args.epoch is not None else _environment_epoch(environ)
    return EngineConfig(
        model=args.model,
        served_model_name=(args.model.resolve().name,),
        dtype=args.dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        ranks_per_node=args.ranks_per_node,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        scheduling_policy=args.scheduling_policy,
        enable_prefix_caching=args.enable_prefix_caching,
        block_size=args.block_size,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        distributed_executor_backend=args.distributed_executor_backend,
        step_transport=args.step_transport,
        step_timeout_s=args.step_timeout,
        startup_timeout_s=args.startup_timeout,
        ray_address=args.ray_address or environ.get("RAY_ADDRESS") or None,
        engine_id=engine_id,
        epoch=epoch,
        seed=args.seed,
    )


def _server_config(args: argparse.Namespace, environ: Mapping[str, str]) -> ServerConfig:
    return replace(
        server_environment(environ),
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        shutdown_timeout_s=args.shutdown_timeout,
        canary_interval_s=args.canary_interval,
        canary_timeout_s=args.canary_timeout,
        canary_failure_threshold=args.canary_failure_threshold,
        max_queued_requests=args.max_queued_requests,
    )


def server_environment(environ: Mapping[str, str]) -> ServerConfig:
    """What is known of the server before any flag is: enough to report a flag that is wrong."""
    failure_file = environ.get("TPINFERENCE_FAILURE_FILE")
    return ServerConfig(
        failure_file=Path(failure_file) if failure_file else None,
        pod_name=environ.get("TPINFERENCE_POD_NAME"),
        node_name=environ.get("TPINFERENCE_NODE_NAME"),
    )


def _environment_epoch(environ: Mapping[str, str]) -> int:
    text = environ.get("TPINFERENCE_EPOCH", "0")
    if not text.isdecimal():
        raise InvalidConfig(f"TPINFERENCE_EPOCH is {text!r}, must be a whole number, at least 0")
    return int(text)


def whole(minimum: int | None) -> Callable[[str], int]:
    """A flag's type that says what is allowed."""

    def parse(text: str) -> int:
        bound = "" if minimum is None else f", at least {minimum}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"is {text!r}, must be a whole number{bound}"
            ) from None
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number{bound}")
        return value

    return parse


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number") from None
