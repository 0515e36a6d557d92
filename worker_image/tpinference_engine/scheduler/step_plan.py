"""The rows of one step while they are chosen, and the message they become.

Choosing changes no request: what a step moves on is written by the scheduler when the step is
committed, so a row can still be taken back when its request is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tpinference_engine.scheduler.request_state import RequestState
from tpinference_engine.step import ForwardRow, NewSlot, SampleRow


class PlannedRow(NamedTuple):
    state: RequestState
    num_tokens: int
    end: int
    """Position after its last token."""
    wants_logits: bool
    """A chunk that does not reach the last token has nothing to choose."""


class PendingToken(NamedTuple):
    """A row of logits on the device, and the request that its token is for."""

    state: RequestState
    row: SampleRow


class StepPlan:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that still fit."""
        self.has_preempted = False
        self.new: list[RequestState] = []
        self._rows: dict[str, PlannedRow] = {}

    @property
    def rows(self) -> Sequence[PlannedRow]:
        return list(self._rows.values())

    def add(self, state: RequestState, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.budget, f"{num_tokens} tokens, {self.budget} fit"
        end = state.num_computed + num_tokens
        self._rows[state.request_id] = PlannedRow(state, num_tokens, end, end == state.end)
        self.budget -= num_tokens

    def take_back(self, state: RequestState) -> None:
        """A preempted request has no row; its tokens may be given to others."""
        self.has_preempted = True
        row = self._rows.pop(state.request_id, None)
        self.budget += row.num_tokens if row else 0


def new_slot(state: RequestState) -> NewSlot:
    params = state.request.params
    return NewSlot(
        slot=slot_of(state),
        generation=state.generation,
        prompt_length=state.prompt_length,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=state.seed,
    )


def forward_row(row: PlannedRow) -> ForwardRow:
    """Its tokens, or none where the only one is in flight and known to the device alone."""
    state = row.state
    return ForwardRow(
        slot=slot_of(state),
        generation=state.generation,
        start=state.num_computed,
        num_tokens=row.num_tokens,
        tokens=tuple(state.tokens[state.num_computed : row.end]),
        wants_logits=row.wants_logits,
    )


def pending_token(row: PlannedRow) -> PendingToken:
    state = row.state
    return PendingToken(state, SampleRow(slot_of(state), state.generation, row.end))


def slot_of(state: RequestState) -> int:
    assert state.slot is not None, f"request {state.request_id!r} has a row and no slot"
    return state.slot
