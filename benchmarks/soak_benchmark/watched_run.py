"""One driver process on a network: the main process's view of it.

It obeys the driver's events (see `driver_report`), changes the network between phases, samples what
is held, notices who ends, and gives up on a driver that says nothing for too long.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak_benchmark.link import CLEAN, Profile
from soak_benchmark.network import Network
from soak_benchmark.resource_use import Sample, Watcher

Event = dict[str, Any]
Say = Callable[[str], None]

_TICK_S = 0.1
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Phase:
    profile: Profile
    num_steps: int
    round: int = 0


@dataclass(slots=True)
class Found:
    """All that is known of one run."""

    passed: list[Event] = field(default_factory=list)
    """Of each phase that came to its end."""
    failure: Event | None = None
    wrong: list[Event] = field(default_factory=list)
    """Examples of tokens that are not the expected ones."""
    num_steps: int = 0
    num_wrong: int = 0
    shutdown_s: float | None = None
    exit_code: int | None = None
    ended_s: Mapping[str, float] = field(default_factory=dict)
    """By role: how long after the last phase began a process was gone."""
    samples: Sequence[Sample] = ()

    @property
    def is_good(self) -> bool:
        return self.failure is None and not self.num_wrong and self.exit_code == 0


class WatchedRun:
    def __init__(
        self, network: Network, phases: Sequence[Phase], silence_s: float, say: Say
    ) -> None:
        self._network = network
        self._phases = phases
        self._silence_s = silence_s
        self._say = say
        self._began_s = time.monotonic()
        self._at = 0
        self._found = Found()
        self._watcher = Watcher(
            {"head": network.head.shared_memory, "ranks": network.ranks.shared_memory},
            lambda: time.monotonic() - self._began_s,
        )

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], pids: Mapping[str, int]
    ) -> Found:
        """`command` runs beside the head's raylet; `pids` are watched with the driver's own."""
        self._watcher.watch(pids)
        with subprocess.Popen(
            self._network.head.command(command),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        ) as driver:
            try:
                self._follow(driver)
                self._found.exit_code = _wait_for(driver)
            finally:
                driver.kill()
                # Ray takes its time to end a cluster that can't be reached.
                self._network.change(CLEAN)
        self._found.ended_s = self._watcher.ended_s
        self._found.samples = self._watcher.samples
        return self._found

    def _follow(self, driver: subprocess.Popen[str]) -> None:
        assert driver.stdout is not None, "a pipe was asked for"
        output, rest, heard_s = driver.stdout.fileno(), b"", time.monotonic()
        while True:
            ready, _, _ = select.select([output], (), (), _TICK_S)
            self._watcher.look_for_ends()
            if not ready:
                if time.monotonic() - heard_s > self._silence_s:
                    self._give_up(driver)
                    return
                continue
            heard_s, data = time.monotonic(), os.read(output, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line), driver)

    def _obey(self, event: Event, driver: subprocess.Popen[str]) -> None:
        match event["event"]:
            case "started":
                self._watcher.watch(event["pids"])
            case "phase":
                self._begin_phase(event["number"], driver)
            case "progress":
                self._sample(event)
            case "passed":
                self._sample(event)
                self._end_phase(event)
            case "wrong":
                self._found.wrong.append(event)
                self._say(f"wrong: {event}")
            case "failed":
                event["fates"] = self._network.change(self._phases[self._at].profile)
                self._found.failure = event
                self._found.num_steps = event["steps"]
                self._say(f"{event['kind']} after {event['after_s']:.2f} s: {event['message']}")
            case "ended":
                self._found.shutdown_s = event["shutdown_s"]

    def _begin_phase(self, number: int, driver: subprocess.Popen[str]) -> None:
        self._at = number
        self._network.change(self._phases[number].profile)
        assert driver.stdin is not None, "a pipe was asked for"
        self._began_s = time.monotonic()
        driver.stdin.write("go\n")
        driver.stdin.flush()

    def _end_phase(self, event: Event) -> None:
        phase = self._phases[self._at]
        event |= {"profile": phase.profile.name, "round": phase.round}
        event["fates"] = self._network.change(phase.profile)
        self._found.passed.append(event)

    def _sample(self, event: Event) -> None:
        phase = self._phases[self._at]
        sample = self._watcher.sample(phase.round)
        self._found.num_steps, self._found.num_wrong = event["total"], event["wrong"]
        held = ", ".join(
            f"{role} {held['memory MiB']:.0f} MiB"
            for role, held in sample.held.items()
            if "memory MiB" in held
        )
        self._say(
            f"round {phase.round + 1}, {phase.profile.name}: {event['total']} steps, "
            f"{event['wrong']} wrong tokens; {held}"
        )

    def _give_up(self, driver: subprocess.Popen[str]) -> None:
        # It prints where its threads are.
        driver.send_signal(signal.SIGABRT)
        self._found.failure = {
            "event": "failed",
            "kind": "Silence",
            "message": f"the driver said nothing for {self._silence_s:g} s",
            "steps": self._found.num_steps,
            "after_s": time.monotonic() - self._began_s,
        }
        self._say(self._found.failure["message"])


def _wait_for(driver: subprocess.Popen[str]) -> int | None:
    """Its exit code, or None if it does not end."""
    try:
        return driver.wait(_END_S)
    except subprocess.TimeoutExpired:
        return None
