"""Decides what the next step computes, and what its tokens mean to the requests.

Pure: no torch, no ray, no I/O and no clock. `schedule` and `update` alternate, one step each, under
the rules of the lag: call N returns the tokens of step N-1, so a request may have one token in
flight, whose value only the device knows. Results are matched by (step id, slot, generation) and
never counted down; a request that ended is never asked about again, its late tokens are dropped.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from tpinference_engine.errors import EngineBusy, GroupDiverged, RequestRefused
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.scheduler.admission import check_request
from tpinference_engine.scheduler.limits import SchedulerLimits
from tpinference_engine.scheduler.prefix_cache import KeyChain, root_key
from tpinference_engine.scheduler.request_blocks import RequestBlocks
from tpinference_engine.scheduler.request_state import RequestState
from tpinference_engine.scheduler.slot_table import SlotTable
from tpinference_engine.scheduler.stats import SchedulerStats
from tpinference_engine.scheduler.step_plan import (
    PendingToken,
    PlannedRow,
    StepPlan,
    forward_row,
    new_slot,
    pending_token,
    slot_of,
)
from tpinference_engine.step import NO_STEP, BlockAppend, StepInput, StepOutput, next_step_id

_by_order = attrgetter("order")


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        epoch: int = 0,
        seed: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._limits = limits
        self._epoch = epoch
        self._seeds = random.Random(seed)
        self._blocks = RequestBlocks(limits, shares_prefixes=enable_prefix_caching)
        self._slots = SlotTable(limits.max_num_seqs)
        self._states: dict[str, RequestState] = {}
        self._num_arrived = 0
        # Both sorted by `order`, together all of _states. Running = has a slot.
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._step_id = NO_STEP
        # Logits on the device, in their order; and those that the call in flight samples.
        self._pending: list[PendingToken] = []
        self._sampling: list[PendingToken] | None = None
        self._sampled_step_id = NO_STEP
        self._stats = SchedulerStats()
        self._begun: list[str] = []
        self._next_deadline = math.inf
        """No open request has an earlier one."""

    @property
    def limits(self) -> SchedulerLimits:
        return self._limits

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free

    @property
    def stats(self) -> SchedulerStats:
        return self._stats

    @property
    def begun(self) -> Sequence[str]:
        """Requests that the last `schedule` took from the queue for the first time."""
        return self._begun

    @property
    def has_work(self) -> bool:
        """The next `schedule` gives a step."""
        return bool(self._states or self._pending)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestRefused or EngineBusy and changes nothing then."""
        check_request(request, self._limits)
        if request.request_id in self._states:
            raise RequestRefused(f"request id {request.request_id!r} is in use already")
        if len(self._states) >= self._limits.max_num_requests:
            raise EngineBusy(
                f"{len(self._states)} requests are queued or running, "
                f"the limit is {self._limits.max_num_requests}"
            )
        seed = request.params.seed
        if seed is None:
            seed = self._seeds.getrandbits(64) - 2**63
        keys = KeyChain(root_key(salt=request.cache_salt), self._limits.block_size)
        state = RequestState(request, self._num_arrived, seed, keys)
        self._num_arrived += 1
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._states[state.request_id] = state
        insort(self._waiting, state, key=_by_order)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; None if it has ended already. What is in flight is dropped."""
        state = self._states.get(request_id)
        return None if state is None else self._end(state, FinishReason.ABORT)

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends the requests whose deadline has passed, wherever they are."""
        if now < self._next_deadline:
            return []
        timed = [s for s in self._states.values() if s.request.deadline is not None]
        outputs = [
            self._end(state, FinishReason.DEADLINE, error=_lateness(state))
            for state in timed
            if state.deadline <= now
        ]
        self._next_deadline = min((s.deadline for s in timed if s.deadline > now), default=math.inf)
        return outputs

    def drop_all(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """Ends every request, and forgets what the cache holds: a group that ended has none."""
        outputs = [self._end(state, reason, error=error) for state in list(self._states.values())]
        self._blocks.forget_prefixes()
        return outputs

    # Steps.

    def schedule(self) -> StepInput | None:
        """The next step, or None if there is nothing to run and no logits are pending."""
        self._check_answered()
        self._begun = []
        plan = StepPlan(self._limits.max_num_batched_tokens)
        unfinished = [state for state in self._running if not state.reaches_limit]
        # 1. Decodes: one token each. They are latency that a user sees.
        self._plan_rows(plan, [state for state in unfinished if state.num_uncomputed == 1])
        # 2. Prompts and replays that have begun: the next chunk.
        self._plan_rows(plan, [state for state in unfinished if state.num_uncomputed > 1])
        # 3. Waiting requests. Not after a preemption: they would take what was just freed, and a
        #    preempted one may not come back before its token in flight is known.
        if not plan.has_preempted:
            self._admit(plan)
        # 4. Nothing to run: pending logits are sampled by a call of their own, at once.
        return self._commit(plan) if plan.rows or self._pending else None

    def flush(self) -> StepInput | None:
        """Samples pending logits and runs nothing; None if there are none."""
        self._check_answered()
        return self._commit(StepPlan(0)) if self._pending else None

    def update(self, output: StepOutput) -> list[RequestOutput]:
        """Takes in the answer to the step that `schedule` or `flush` gave last."""
        sampling = self._check_answer(output)
        self._sampling = None
        outputs: list[RequestOutput] = []
        for (state, row), token in zip(sampling, output.tokens, strict=True):
            given = (token.slot, token.generation, token.position)
            if given != (row.slot, row.generation, row.position):
                raise GroupDiverged(
                    f"step {output.step_id} has a token for (slot, generation, position) {given}, "
                    f"expected {row!r}"
                )
            if state.finish_reason is None:
                outputs.append(self._accept(state, token.token))
        for pending in self._pending:
            pending.state.in_flight = 1
        return outputs

    # Choosing the rows of a step.

    def _plan_rows(self, plan: StepPlan, states: Sequence[RequestState]) -> None:
        for state in states:
            if plan.budget == 0:
                return
            num_tokens = min(state.num_uncomputed, plan.budget)
            was_preempted = state.slot is None
            if not was_preempted and self._make_room(state, num_tokens, plan):
                plan.add(state, num_tokens)

    def _make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Gives `state` the blocks for its next tokens, taking them from the latest if need be.

        False if it was itself the latest. The earliest always gets its blocks, so there is always
        progress: alone it fits, admission saw to that.
        """
        end = state.num_computed + num_tokens
        missing = self._blocks.num_missing(state, end)
        while missing > self._blocks.num_free:
            latest = self._running[-1]
            self._preempt(latest, plan)
            if latest is state:
                return False
        if missing:
            self._blocks.grow(state, end)
        return True

    def _preempt(self, state: RequestState, plan: StepPlan) -> None:
        """It goes back to waiting and will be recomputed from its tokens, with all of them."""
        plan.take_back(state)
        self._running.remove(state)
        self._leave_ranks(state)
        state.num_preemptions += 1
        self._stats = replace(self._stats, num_preemptions=self._stats.num_preemptions + 1)
        insort(self._waiting, state, key=_by_order)

    def _admit(self, plan: StepPlan) -> None:
        """In order: a request that does not fit yet is not overtaken, or it might never fit."""
        if not self._waiting:
            return
        promised = sum(self._blocks.num_promised(state) for state in self._running)
        while self._waiting and plan.budget and self._slots.num_free:
            # At least one block of a request is its own, so there is nothing to look up for now.
            if promised >= self._blocks.num_free:
                return
            state = self._waiting[0]
            prefix = self._blocks.find_prefix(state)
            if promised + self._blocks.num_to_begin(state, prefix) > self._blocks.num_free:
                return
            self._blocks.begin_with(state, prefix)
            self._count_lookup(state)
            num_tokens = min(state.num_uncomputed, plan.budget)
            self._blocks.grow(state, state.num_computed + num_tokens)
            promised += self._blocks.num_promised(state)
            self._waiting.pop(0)
            state.place(*self._slots.acquire())
            insort(self._running, state, key=_by_order)
            plan.new.append(state)
            plan.add(state, num_tokens)
            if state.num_preemptions == 0:
                self._begun.append(state.request_id)

    def _count_lookup(self, state: RequestState) -> None:
        if self._blocks.shares_prefixes and state.num_preemptions == 0:
            stats = self._stats
            self._stats = replace(
                stats,
                prefix_cache_queries=stats.prefix_cache_queries + len(state.tokens),
                prefix_cache_hits=stats.prefix_cache_hits + state.num_computed,
            )

    # Writing down what a step does.

    def _commit(self, plan: StepPlan) -> StepInput:
        rows = plan.rows
        self._sampling = self._pending
        self._sampled_step_id = self._step_id if self._pending else NO_STEP
        self._step_id = next_step_id(self._step_id)
        step = StepInput(
            step_id=self._step_id,
            epoch=self._epoch,
            bucket=self._limits.bucket_for(sum(row.num_tokens for row in rows)),
            sample=tuple(pending.row for pending in self._sampling),
            free=self._slots.take_untold(),
            new=tuple(new_slot(state) for state in plan.new),
            appends=self._take_appends(rows),
            forward=tuple(forward_row(row) for row in rows),
        )
        self._pending = [pending_token(row) for row in rows if row.wants_logits]
        for row in rows:
            row.state.num_computed = row.end
            self._blocks.publish(row.state)
        return step

    def _take_appends(self, rows: Sequence[PlannedRow]) -> tuple[BlockAppend, ...]:
        """The blocks that ranks have not heard of."""
        appends: list[BlockAppend] = []
        for state in (row.state for row in rows):
            blocks = self._blocks.take_untold(state)
            if blocks:
                appends.append(BlockAppend(slot_of(state), blocks))
        return tuple(appends)

    def _check_answered(self) -> None:
        assert self._sampling is None, f"step {self._step_id} has not been answered"

    # Taking in what a step gave.

    def _check_answer(self, output: StepOutput) -> list[PendingToken]:
        assert self._sampling is not None, f"step {output.step_id} was answered twice"
        expected = (self._step_id, self._epoch, self._sampled_step_id, len(self._sampling))
        given = (output.step_id, output.epoch, output.sampled_step_id, len(output.tokens))
        if given != expected:
            raise GroupDiverged(
                f"(step, epoch, sampled step, number of tokens) is {given}, expected {expected}"
            )
        return self._sampling

    def _accept(self, state: RequestState, token: int) -> RequestOutput:
        state.tokens.append(token)
        state.in_flight = 0
        reason = state.finish_reason_after(token, self._limits.eos_token_ids)
        if reason is not None:
            return self._end(state, reason, token_ids=(token,))
        self._blocks.publish(state)
        return RequestOutput(request_id=state.request_id, token_ids=(token,))

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
    ) -> RequestOutput:
        state.finish_reason = reason
        del self._states[state.request_id]
        queue = self._waiting if state.slot is None else self._running
        queue.remove(state)
        self._leave_ranks(state)
        return RequestOutput(
            request_id=state.request_id, token_ids=token_ids, finish_reason=reason, error=error
        )

    def _leave_ranks(self, state: RequestState) -> None:
        self._blocks.release(state)
        if state.slot is not None:
            self._slots.release(state.slot)
        state.displace()

    # For tests.

    def check_integrity(self) -> None:
        """Blocks and slots add up; raises AssertionError."""
        self._blocks.check_integrity()
        assert self._slots.num_free + len(self._running) == self._limits.max_num_seqs
        assert len(self._waiting) + len(self._running) == len(self._states)
        assert all(state.slot is not None for state in self._running)
        assert not any(self._blocks.num_owned(state) for state in self._waiting)


def _lateness(state: RequestState) -> str:
    return f"the request's deadline passed; it had {state.num_output_tokens} tokens of its answer"
