"""Everything the operator raises on purpose.

TPInferenceError
├── InvalidSpec        a stored object that today's models can't read; names each field
├── InvalidQuantity    a Kubernetes quantity that can't be read
├── CorruptRevision    a ControllerRevision whose data can't be read
└── ApiError           an answer of the API server other than success (see kube.py)
    ├── ApiUnavailable no answer, 429 or 5xx: try again later
    ├── ApiConflict    409 on a write with resourceVersion or a uid precondition
    ├── AlreadyExists  409 on a create: a namesake is there
    ├── NotFound       404
    └── ApiForbidden   401, 403: the Role or a policy refuses
        └── NamespaceEnding  403: nothing is created any more where all is being deleted
"""

from __future__ import annotations


class TPInferenceError(Exception):
    """Root of the operator's errors."""


class InvalidSpec(TPInferenceError):
    """A spec that can't be read; `problems` are `field: what` lines."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class InvalidQuantity(TPInferenceError):
    """Not a Kubernetes quantity."""


class CorruptRevision(TPInferenceError):
    """A ControllerRevision that was changed by hand or made by something else."""


class ApiError(TPInferenceError):
    """The API server answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        reason: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class ApiUnavailable(ApiError):
    """No answer, too many requests, or a fault of the server."""


class ApiConflict(ApiError):
    """The object changed since it was read."""


class AlreadyExists(ApiError):
    """An object of that name is there."""


class NotFound(ApiError):
    """No such object, or no such kind."""


class ApiForbidden(ApiError):
    """The operator's role or an admission policy does not allow it."""


class NamespaceEnding(ApiForbidden):
    """The namespace is being deleted: nothing is created in it any more."""
