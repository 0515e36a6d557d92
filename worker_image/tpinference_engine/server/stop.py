"""Stop strings: where the text of a choice ends, whatever the tokens it came in.

The first stop string to be complete, character by character, wins; so the cut does not depend on
how the text was divided. It knows no tokens.
"""

from __future__ import annotations


def find_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string begins that is complete first; the longest of those that end there."""
    found = [(text.find(stop), stop) for stop in stops]
    ends = [(start + len(stop), start) for start, stop in found if start >= 0]
    return min(ends)[1] if ends else None


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that may still become a stop string."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class StopFinder:
    """Lets text through up to a stop string, and holds back what may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string ended it."""
        text = self._held + text
        cut = find_stop(text, self._stops)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        shown = len(text) - held_length(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What was held back: the request ended otherwise."""
        text, self._held = self._held, ""
        return text
