"""A benchmark from its settings to its printed result; logs go to standard error."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Protocol

import uvloop

from tpinference_engine.bench.command_line import Bench
from tpinference_engine.bench.latency import measure_latency
from tpinference_engine.bench.serve import measure_serving
from tpinference_engine.bench.settings import LatencyBench, Report, ServeBench
from tpinference_engine.bench.throughput import measure_throughput
from tpinference_engine.errors import InvalidConfig, TPInferenceError

_INTERRUPTED = 130
"""As a shell has it for SIGINT."""


class Result(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def json(self) -> dict[str, Any]: ...


def run(bench: Bench) -> int:
    """The process's exit code. Raises InvalidConfig for settings that the model does not allow."""
    _check_file(bench.report)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_measure(bench))
    except InvalidConfig:
        raise
    except KeyboardInterrupt:
        return _INTERRUPTED
    except TPInferenceError as error:
        print(f"tpinference-engine bench: error: {error}", file=sys.stderr)
        return 1
    _give_out(bench.report, result)
    return 0


async def _measure(bench: Bench) -> Result:
    if isinstance(bench, ServeBench):
        return await measure_serving(bench)
    if isinstance(bench, LatencyBench):
        return await measure_latency(bench)
    return await measure_throughput(bench)


def _check_file(report: Report) -> None:
    """Before the work, which would be lost."""
    file = report.file
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InvalidConfig(
            f"output_json is {str(file)!r}, must be a file in a directory that is there"
        )


def _give_out(report: Report, result: Result) -> None:
    text = json.dumps(result.json, indent=2)
    if report.file is not None:
        report.file.write_text(text + "\n")
    print(text if report.as_json else result.text)
