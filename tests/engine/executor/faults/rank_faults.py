"""Runners that go wrong on purpose, importable by rank processes, which no test module is."""

from __future__ import annotations

import gc
import os
import signal
import threading
from multiprocessing.connection import Connection
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


class _RankRunner(EchoRunner):
    """Knows its rank."""

    def initialize(self, setup: RankSetup) -> None:
        self.rank = setup.rank


class CutOffModelRunner(_RankRunner):
    """Rank 1 can't read its weights; rank 0 waits for it."""

    def load_model(self) -> int:
        if self.rank == 1:
            raise InvalidModel("model.safetensors is cut off")
        wait_for_good()
        return 0


class EndlessLoadRunner(EchoRunner):
    def load_model(self) -> int:
        wait_for_good()
        return 0


class FailingRankRunner(_RankRunner):
    """Rank 1 fails in a step; rank 0 waits for it."""

    def enqueue(self, step: StepInput) -> Any:
        if self.rank == 1:
            raise ZeroDivisionError("a bug")
        wait_for_good()


class LostPeerRunner(_RankRunner):
    """Rank 0 speaks of the loss of rank 1 before anybody else can have seen it."""

    def enqueue(self, step: StepInput) -> Any:
        if self.rank == 0:
            raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        os.kill(os.getpid(), signal.SIGKILL)


class PipeClosingRunner(_RankRunner):
    """Rank 1 can't be heard any more, but runs on."""

    def load_model(self) -> int:
        if self.rank == 1:
            for found in gc.get_objects():
                if isinstance(found, Connection):
                    found.close()
            wait_for_good()
        return 0


class BuggyRunner(EchoRunner):
    def enqueue(self, step: StepInput) -> Any:
        raise ZeroDivisionError("a bug")
