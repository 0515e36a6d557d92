"""The engine's command: `serve` runs an engine, `supervise` a pod, `bench` measures.

Each imports what it needs when it is chosen, as the supervisor has to stay small.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from tpinference_engine.errors import InvalidConfig

_DESCRIPTION = """\
Tensor-parallel LLM serving on Ray.

commands:
  serve      serve one model over the OpenAI API
  supervise  run Ray, and on a head pod the engine, as process 1 of a container
  bench      measure an engine: latency, throughput, or a server under load

'tpinference-engine COMMAND --help' shows a command's flags.
"""
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tpinference-engine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs = {"serve": _serve, "supervise": _supervise, "bench": _bench}
    parser.add_argument("--version", action="version", version=version("tpinference"))
    parser.add_argument("command", choices=tuple(runs), metavar="COMMAND")
    chosen = parser.parse_args(arguments[:1])
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return runs[chosen.command](arguments[1:], os.environ)
    except InvalidConfig as error:
        print(f"tpinference-engine {chosen.command}: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _serve(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from tpinference_engine.command_line import parse_serve, server_environment

    try:
        engine_config, server_config = parse_serve(argv, environ)
    except InvalidConfig as error:
        from tpinference_engine.engine.failure import failure_of
        from tpinference_engine.server.failure_file import write_failure

        write_failure(server_environment(environ), failure_of(error))
        raise
    from tpinference_engine.server.app import run

    return run(engine_config, server_config)


def _supervise(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from tpinference_engine.supervisor.command_line import parse_supervise
    from tpinference_engine.supervisor.supervisor import Supervisor, count_rank_processes

    config = parse_supervise(argv, environ)
    return Supervisor(config, environ, count_rank_processes).run()


def _bench(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from tpinference_engine.bench.command_line import parse_bench

    bench = parse_bench(argv, environ)
    from tpinference_engine.bench.run import run

    return run(bench)


if __name__ == "__main__":
    sys.exit(main())
