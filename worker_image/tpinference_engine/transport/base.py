"""How one step's message reaches all ranks and their acknowledgements come back.

Behind this interface because the product's transport, Ray's compiled graph, is in maintenance
upstream. A transport moves bytes; it does not know what is in them, and it never kills a rank.
"""

from __future__ import annotations

from typing import Any, Protocol

PARK = b"park"
"""In a step's place: the rank's graph thread waits, without spinning, until `unpark` is called. Not
empty, since an empty message does not arrive across raylets (Ray 2.60)."""


class StepTransport(Protocol):
    """Used by one thread. One call in flight at most, so messages can't overtake each other."""

    def submit(self, payload: bytes) -> None:
        """Sends one message to every rank. Raises GroupFailed."""

    def result(self, timeout_s: float) -> list[bytes]:
        """Every rank's answer to the message in flight, in rank order.

        Raises StepTimedOut, or what a rank raised. After any error the group has to be replaced.
        """

    def watched_refs(self) -> list[Any]:
        """Ray refs, in rank order, that become ready only when their rank has ended; or none."""

    def close(self) -> None:
        """Lets go of everything. Ranks that may hang must have been killed before. Idempotent."""
