"""Runs the parts of the test suite in order and prints what passed, what was skipped and why.

    python tests/run.py all | PART...

A part that this machine can't run is skipped with its reason; with CI=true that is a failure. The
parts that need Kubernetes share what `make demo` uses (tests/kubernetes).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CAN_RUN = ""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    commands: tuple[tuple[str, ...], ...]
    obstacle: Callable[[], str]
    """Why this machine can't run the part, empty when it can."""


@dataclass(frozen=True, slots=True)
class Outcome:
    part: str
    verdict: str
    seconds: float
    detail: str = ""


def _nothing() -> str:
    return CAN_RUN


def _no_go() -> str:
    return CAN_RUN if shutil.which("go") else "Go is not installed (1.26 builds the control plane)"


def _no_go_or_root() -> str:
    return _no_go() or (CAN_RUN if os.geteuid() == 0 else "not root (a real node needs it)")


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("python", "-m", "pytest", "-q", "--durations=5", *arguments)


PARTS = (
    Part(
        "check",
        (
            ("ruff", "format", "--check", "."),
            ("ruff", "check", "."),
            ("mypy",),
            ("lint-imports",),
            ("python", "-m", "tpinference_operator.api.generate", "--check"),
        ),
        _nothing,
    ),
    Part(
        "unit",
        (
            # Half of their time is waiting for processes: two workers, whatever the machine.
            _pytest(
                "-n", "2", "--dist", "worksteal",
                "-m", "not ray and not model and not integration and not e2e and not gpu",
                "--ignore=tests/integration", "--ignore=tests/e2e",
            ),
        ),
        _nothing,
    ),
    Part("ray", (_pytest("-m", "(ray or model) and not gpu", "tests/engine"),), _nothing),
    Part("integration", (_pytest("tests/integration"),), _no_go),
    Part("e2e", (_pytest("tests/e2e"),), _no_go_or_root),
)  # fmt: skip


def run_part(part: Part, *, strict: bool) -> Outcome:
    obstacle = part.obstacle()
    if obstacle:
        return Outcome(part.name, "failed" if strict else "skipped", 0.0, obstacle)
    started = time.monotonic()
    failed = []
    for command in part.commands:
        print(f"\n== {part.name}: {' '.join(command)}", flush=True)
        program = BIN / command[0]
        if subprocess.run([program, *command[1:]], cwd=ROOT).returncode:
            failed.append(" ".join(command[:3]))
    seconds = time.monotonic() - started
    return Outcome(part.name, "failed" if failed else "passed", seconds, ", ".join(failed))


def print_summary(outcomes: list[Outcome]) -> None:
    print("\n== summary")
    for o in outcomes:
        print(f"{o.part:<12} {o.verdict:<8} {o.seconds:7.1f} s  {o.detail}")
    verdicts = [o.verdict for o in outcomes]
    counts = {v: verdicts.count(v) for v in ("passed", "failed", "skipped")}
    print(
        f"parts: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", nargs="+", choices=["all", *names])
    wanted = parser.parse_args().part
    strict = os.environ.get("CI") == "true"
    chosen = [p for p in PARTS if "all" in wanted or p.name in wanted]
    outcomes = [run_part(part, strict=strict) for part in chosen]
    print_summary(outcomes)
    return 1 if any(o.verdict == "failed" for o in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
