"""Everything the engine raises on purpose.

TPInferenceError
├── InvalidConfig         a flag or a limit; names the field, the value and what is allowed
├── InvalidModel          the model directory: missing or truncated files, an unknown architecture
├── InsufficientResources the model or the cache does not fit where it was put
├── RanksNotPlaced        Ray did not have the nodes or devices by the deadline
├── StartupTimedOut       a stage of start-up did not end in time
├── RequestRefused        what a client sent; has the OpenAI `param` and `code`
│   └── PromptTooLong
├── EngineBusy            admission is full; answered by 429 with Retry-After
├── EngineStopped         draining or ended; answered by 503
├── DeadlineExceeded      the time that a client gave its request is over; answered by 504
└── GroupFailed           a rank group can't go on; all ranks are replaced together
    ├── RankDied
    ├── StepTimedOut
    ├── GroupDiverged     two ranks acknowledged one step differently
    └── MessageCorrupt
"""

from __future__ import annotations

from collections.abc import Sequence


class TPInferenceError(Exception):
    """Root of the engine's errors."""


class InvalidConfig(TPInferenceError):
    """A setting that can't be used."""


class InvalidModel(TPInferenceError):
    """A model directory that can't be served."""


class InsufficientResources(TPInferenceError):
    """The model or its cache does not fit."""


class RanksNotPlaced(TPInferenceError):
    """Ray did not have what the ranks need by the deadline."""


class StartupTimedOut(TPInferenceError):
    """The engine was not ready by the deadline; names the stage that was running."""


class RequestRefused(TPInferenceError):
    """A request that is wrong in itself; trying again does not help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(RequestRefused):
    """Prompt and wanted output exceed what the model can hold."""


class EngineBusy(TPInferenceError):
    """Admission is bounded and full."""


class EngineStopped(TPInferenceError):
    """The engine takes no new requests."""


class DeadlineExceeded(TPInferenceError):
    """The request's own deadline passed before its end."""


class GroupFailed(TPInferenceError):
    """The rank group is lost; `rank` is the first that failed, where it is known."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankDied(GroupFailed):
    """A rank's process ended."""


class StepTimedOut(GroupFailed):
    """A step passed its deadline."""

    @classmethod
    def without(cls, ranks: Sequence[int], doing: str, timeout_s: float | None) -> StepTimedOut:
        """`ranks` have not answered. One is named if it is the only one: of several, all others may
        be waiting for one."""
        late = sorted(ranks)
        limit = "" if timeout_s is None else f" in {timeout_s:g} s"
        blamed = late[0] if len(late) == 1 else None
        return cls(f"{doing}: no answer of ranks {late}{limit}", rank=blamed)


class GroupDiverged(GroupFailed):
    """Ranks acknowledged the same step with different results."""


class MessageCorrupt(GroupFailed):
    """A step message that can't be read, or one of another epoch."""


def cause_for(raised: BaseException, caught: BaseException) -> BaseException | None:
    """For `raise raised from cause_for(raised, caught)` where both may be one error.

    Raised from itself it would be its own cause, and a walk along its causes would never end.
    """
    return caught.__cause__ if raised is caught else caught
