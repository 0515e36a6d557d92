"""Runners that go wrong on purpose, importable by rank processes, which no test module is."""

from __future__ import annotations

import threading
from typing import Any

from tpinference_engine.errors import InvalidModel
from tpinference_engine.runner.base import RankSetup
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import StepInput


def wait_for_good() -> None:
    """As in a collective that a peer never joins."""
    threading.Event().wait()


class HangingRunner(EchoRunner):
    """No rank answers a step."""

    def enqueue(self, step: StepInput) -> Any:
        wait_for_good()


class CutOffModelRunner(EchoRunner):
    """Rank 1 can't read its weights; rank 0 waits for it."""

    def initialize(self, setup: RankSetup) -> None:
        self.rank = setup.rank

    def load_model(self) -> int:
        if self.rank == 1:
            raise InvalidModel("model.safetensors is cut off")
        wait_for_good()
        return 0


class EndlessLoadRunner(EchoRunner):
    def load_model(self) -> int:
        wait_for_good()
        return 0


class BuggyRunner(EchoRunner):
    def enqueue(self, step: StepInput) -> Any:
        raise ZeroDivisionError("a bug")
