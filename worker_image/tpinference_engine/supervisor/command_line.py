"""The command line and the environment of a supervised pod."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpinference_engine.command_line import Parser, parse_serve
from tpinference_engine.config import EngineConfig, ServerConfig
from tpinference_engine.errors import InvalidConfig
from tpinference_engine.supervisor.supervisor import SupervisorConfig

RAY_COMMAND = "KUBERAY_GEN_RAY_START_CMD"
ENGINE_LAST_WORDS_S = 20.0
"""After the engine's drain: more than the sum of all that it then waits for, and with Ray's own end
less than the pod's grace period."""
RANKS_STOP_S = 3600.0
"""On a worker, for ranks that the head is draining. The pod's grace period ends earlier."""


def parse_supervise(argv: Sequence[str], environ: Mapping[str, str]) -> SupervisorConfig:
    """Raises InvalidConfig, but not for the engine's own flags: the engine says it better."""
    args = _parser().parse_args(_before_dashes(argv))
    engine_argv = _after_dashes(argv)
    _check(args.role, engine_argv, environ)
    engine, server = _engine_settings(engine_argv, environ)
    on_head = args.role == "head"
    return SupervisorConfig(
        role=args.role,
        ray_command=environ[RAY_COMMAND],
        engine_command=(sys.executable, "-P", "-m", "tpinference_engine", *engine_argv)
        if on_head
        else (),
        engine_id=engine.engine_id if engine else environ.get("TPINFERENCE_ENGINE_ID", "engine"),
        epoch=engine.epoch if engine else 0,
        pod_name=environ.get("TPINFERENCE_POD_NAME"),
        node_name=environ.get("TPINFERENCE_NODE_NAME"),
        host=server.host,
        admin_port=server.admin_port if args.admin_port is None else args.admin_port,
        engine_stop_s=server.shutdown_timeout_s + ENGINE_LAST_WORDS_S if on_head else RANKS_STOP_S,
        failure_file=Path(tempfile.gettempdir()) / f"tpinference-failure-{os.getpid()}.json",
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tpinference-engine supervise",
        usage="%(prog)s --role head -- serve ... | --role worker",
        description="Run Ray as KubeRay's environment says, and on a head pod also the engine. "
        "Ends when told to or when Ray died, never because the engine failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--role", choices=("head", "worker"), required=True)
    parser.add_argument(
        "--admin-port", type=int, metavar="N", help="default: the engine's --admin-port, else 8001"
    )
    return parser


def _check(role: str, engine_argv: Sequence[str], environ: Mapping[str, str]) -> None:
    if not environ.get(RAY_COMMAND):
        raise InvalidConfig(f"{RAY_COMMAND} is not set, must be a command that runs Ray")
    if role == "head" and list(engine_argv[:1]) != ["serve"]:
        raise InvalidConfig(
            f"engine command is {list(engine_argv)!r}, must begin with 'serve' on --role head"
        )
    if role == "worker" and engine_argv:
        raise InvalidConfig(f"engine command is {list(engine_argv)!r}, --role worker allows none")


def _engine_settings(
    engine_argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[EngineConfig | None, ServerConfig]:
    try:
        return parse_serve(engine_argv[1:], environ)
    except (InvalidConfig, SystemExit):
        # The engine will meet the same error, or request for help, and its end is reported.
        return None, ServerConfig()


def _before_dashes(argv: Sequence[str]) -> list[str]:
    return list(argv[: argv.index("--")]) if "--" in argv else list(argv)


def _after_dashes(argv: Sequence[str]) -> list[str]:
    return list(argv[argv.index("--") + 1 :]) if "--" in argv else []
