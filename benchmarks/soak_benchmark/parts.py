"""The parts of a soak, each on places of its own, and what is good in each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from step_benchmark.raylets import RayletGroup

from soak_benchmark.echo_run import EchoTask
from soak_benchmark.link import CLEAN, CUT, Profile
from soak_benchmark.model_run import BATCH_SIZE, ModelTask
from soak_benchmark.network import Network, environment
from soak_benchmark.raylets import Raylets
from soak_benchmark.soak_report import (
    describe_failure,
    found_json,
    growth_of,
    render_found,
    render_phases,
)
from soak_benchmark.watched_run import Event, Found, Phase, WatchedRun

STEP_TIMEOUT_S = 60.0
"""Of the product's own runs: longer than any cut that heals."""
TWO_IN_FLIGHT_TIMEOUT_S = 20.0
"""Nothing that comes at all takes so long, and a hang costs it each time."""
CUT_LIMIT_S = 10.0
"""In which a driver has to name the loss of all ranks, and to have given them up."""
_REPORT_EVERY_S = 5.0
_SILENCE_S = 240.0
_STEPS_BEFORE_CUT = 200
_MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class PartResult:
    is_good: bool
    lines: Sequence[str]
    json: dict[str, Any]


def make_phases(profiles: Sequence[Profile], num_steps: int, rounds: int) -> tuple[Phase, ...]:
    """Every profile once a round, `num_steps` in all."""
    turns = [(number, profile) for number in range(rounds) for profile in profiles]
    share, more = divmod(num_steps, len(turns))
    return tuple(
        Phase(profile, share + (at < more), number) for at, (number, profile) in enumerate(turns)
    )


class Bench:
    def __init__(self, seed: int, num_ranks: int, say: Callable[[str], None]) -> None:
        self._seed = seed
        self._num_ranks = num_ranks
        self._say = say

    def run_echo(self, phases: Sequence[Phase]) -> PartResult:
        found = self._echo(phases, 1, STEP_TIMEOUT_S)
        grown = [growth for growth in growth_of(found, phases) if not growth.holds]
        return PartResult(
            found.is_good and not grown,
            list(render_found(found, phases)),
            found_json(found, phases),
        )

    def run_two_in_flight(self, phases: Sequence[Phase], max_failures: int) -> PartResult:
        """After a failure a new group, on a new Ray, takes the steps that are left."""
        left = list(phases)
        runs: list[Found] = []
        while left and len(runs) < max_failures:
            found = self._echo(left, 2, TWO_IN_FLIGHT_TIMEOUT_S)
            runs.append(found)
            left = steps_left(left, found.num_steps) if found.failure else []
        failures = [found.failure for found in runs if found.failure]
        kinds = Counter(describe_failure(failure) for failure in failures)
        lines = render_phases([event for found in runs for event in found.passed])
        lines.append(f"{sum(found.num_steps for found in runs)} steps, failures: {dict(kinds)}")
        for failure in failures:
            lines.append(
                f"after {failure['steps']} steps: {describe_failure(failure)}: "
                f"{failure['kind']}: {failure['message']}"
            )
        found_in_runs = [found_json(found, phases) for found in runs]
        return PartResult(True, lines, {"failures": dict(kinds), "runs": found_in_runs})

    def run_cut(self) -> PartResult:
        phases = [Phase(CLEAN, _STEPS_BEFORE_CUT), Phase(CUT, _MAX_STEPS)]
        found = self._echo(phases, 1, STEP_TIMEOUT_S)
        failure = found.failure or {"kind": "nothing", "message": "", "after_s": float("inf")}
        ended = {role: s for role, s in found.ended_s.items() if role.startswith("rank ")}
        lines = [
            f"named after {failure['after_s']:.2f} s: {failure['kind']}: {failure['message']}",
            f"shut down in {found.shutdown_s} s, exit code {found.exit_code}",
            *(f"{role} had ended {s:.2f} s after the cut" for role, s in ended.items()),
        ]
        is_good = (
            failure["after_s"] < CUT_LIMIT_S
            and found.exit_code == 0
            and len(ended) == self._num_ranks
        )
        return PartResult(is_good, lines, {**found_json(found, phases), "ended_s": ended})

    def run_model(self, model: Path, phases: Sequence[Phase]) -> PartResult:
        """A phase is a batch. The reference is the same engine on two raylets of this machine."""
        with self._stand() as (network, raylets):
            task = self._model_task(model, phases, raylets.address)
            run = WatchedRun(network, phases, _SILENCE_S, self._say)
            command = _command("model_run", asdict(task))
            found = run.run(command, raylets.environment(), raylets.pids)
        reference = self._run_model_beside(replace(task, ray_address=""))
        got = [event["tokens"] for event in found.passed]
        num_equal = sum(
            ours == theirs
            for batch, known in zip(got, reference, strict=False)
            for ours, theirs in zip(batch, known, strict=True)
        )
        num_sequences = BATCH_SIZE * len(phases)
        lines = list(render_found(found, phases))
        lines.append(f"{num_equal} of {num_sequences} sequences as without the relay")
        is_good = found.is_good and num_equal == num_sequences
        facts = {"sequences": num_sequences, "equal": num_equal}
        return PartResult(is_good, lines, {**found_json(found, phases), **facts})

    def _echo(self, phases: Sequence[Phase], in_flight: int, step_timeout_s: float) -> Found:
        with self._stand() as (network, raylets):
            task = EchoTask(
                ray_address=raylets.address,
                num_ranks=self._num_ranks,
                in_flight=in_flight,
                phases=[phase.num_steps for phase in phases],
                seed=self._seed,
                step_timeout_s=step_timeout_s,
                report_every_s=_REPORT_EVERY_S,
            )
            run = WatchedRun(network, phases, _SILENCE_S, self._say)
            command = _command("echo_run", asdict(task))
            return run.run(command, raylets.environment(), raylets.pids)

    @contextmanager
    def _stand(self) -> Iterator[tuple[Network, Raylets]]:
        with Network(self._seed) as network, Raylets(network, self._num_ranks) as raylets:
            yield network, raylets

    def _model_task(self, model: Path, phases: Sequence[Phase], address: str) -> ModelTask:
        return ModelTask(
            model=str(model),
            ray_address=address,
            num_ranks=self._num_ranks,
            num_batches=len(phases),
            output_len=phases[0].num_steps,
            seed=self._seed,
            step_timeout_s=STEP_TIMEOUT_S,
            report_every_s=_REPORT_EVERY_S,
        )

    def _run_model_beside(self, task: ModelTask) -> list[list[list[int]]]:
        raylets = RayletGroup("across", self._num_ranks, 0)
        try:
            task = replace(task, ray_address=raylets.address)
            done = subprocess.run(
                _command("model_run", asdict(task)),
                env=environment(),
                input="go\n" * task.num_batches,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        finally:
            raylets.close()
        events: list[Event] = [json.loads(line) for line in done.stdout.splitlines()]
        failed = [event for event in events if event["event"] == "failed"]
        if failed:
            raise RuntimeError(f"the engine failed without the relay: {failed[0]['message']}")
        for event in events:
            if event["event"] == "passed":
                self._say(f"without the relay: {event['steps']} steps in {event['seconds']:.1f} s")
        return [event["tokens"] for event in events if event["event"] == "passed"]


def steps_left(phases: Sequence[Phase], num_done: int) -> list[Phase]:
    """One step less at least: a step that fails each time would be tried for ever."""
    left: list[Phase] = []
    num_done += 1
    for phase in phases:
        num_here = min(num_done, phase.num_steps)
        num_done -= num_here
        if num_here < phase.num_steps:
            left.append(replace(phase, num_steps=phase.num_steps - num_here))
    return left


def _command(module: str, task: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"soak_benchmark.{module}", json.dumps(task)]
