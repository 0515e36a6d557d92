"""What becomes of each packet on one direction of an emulated network. Pure: no socket, no clock.

Who moves the packets says what time it is. With the same seed the same packets meet the same fate.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Literal

FateKind = Literal["sent", "late", "lost", "cut"]
"""late = sent after packets that came later; lost = one packet was; cut = nothing gets through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How a link behaves. The default is a link that does nothing to a packet."""

    name: str
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more or less than the delay. It does not change the order."""
    loss: float = 0.0
    """Share of packets."""
    reorder: float = 0.0
    """Share of packets that come `reorder_s` later than they would, and let others overtake."""
    reorder_s: float = 0.0
    cut_every_s: float = 0.0
    """0 = never. The first cut is `cut_after_s` after the profile came into force."""
    cut_after_s: float = 0.0
    cut_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be between 0 and 1")
        if self.jitter_s > self.delay_s:
            raise ValueError(f"jitter_s is {self.jitter_s!r}, delay_s allows {self.delay_s!r}")


CLEAN = Profile(name="clean")
CUT = Profile(name="cut for good", cut_every_s=1.0, cut_s=1.0)
PROFILES = (
    CLEAN,
    Profile(name="delay", delay_s=0.0002, jitter_s=0.0001),
    Profile(name="loss", loss=0.001),
    Profile(name="reorder", delay_s=0.0002, reorder=0.05, reorder_s=0.001),
    Profile(name="partition", cut_every_s=20.0, cut_after_s=3.0, cut_s=1.0),
)
"""Times and shares are of each direction."""


@dataclass(frozen=True, slots=True)
class Fate:
    kind: FateKind
    delay_s: float = 0.0


def decide(profile: Profile, elapsed_s: float, random: Random) -> Fate:
    """Of one packet, `elapsed_s` after the profile came into force."""
    # Always as many draws, so that one packet's fate does not depend on another's profile.
    jitter, loss, reorder = random.uniform(-1.0, 1.0), random.random(), random.random()
    if is_cut(profile, elapsed_s):
        return Fate("cut")
    if loss < profile.loss:
        return Fate("lost")
    delay_s = profile.delay_s + jitter * profile.jitter_s
    if reorder < profile.reorder:
        return Fate("late", delay_s + profile.reorder_s)
    return Fate("sent", delay_s)


def is_cut(profile: Profile, elapsed_s: float) -> bool:
    since_first = elapsed_s - profile.cut_after_s
    if not profile.cut_every_s or since_first < 0.0:
        return False
    return since_first % profile.cut_every_s < profile.cut_s


class Link:
    """Packets in, and out again when they are due."""

    def __init__(self, seed: int | str) -> None:
        self._random = Random(seed)
        self._profile = CLEAN
        self._since_s = 0.0
        self._waiting: list[tuple[float, int, bytes]] = []
        self._number = 0
        self._last_due_s = 0.0
        self._counts: Counter[FateKind] = Counter()

    def change(self, profile: Profile, now_s: float) -> dict[FateKind, int]:
        """The fates under the profile before. What is on its way stays on it."""
        counts, self._counts = self._counts, Counter()
        self._profile, self._since_s = profile, now_s
        return dict(counts)

    def admit(self, packet: bytes, now_s: float) -> None:
        fate = decide(self._profile, now_s - self._since_s, self._random)
        self._counts[fate.kind] += 1
        if fate.kind in ("lost", "cut"):
            return
        due_s = now_s + fate.delay_s
        if fate.kind == "sent":
            # Jitter alone never lets a packet overtake another.
            due_s = self._last_due_s = max(due_s, self._last_due_s)
        heapq.heappush(self._waiting, (due_s, self._number, packet))
        self._number += 1

    @property
    def next_due_s(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def take_due(self, now_s: float) -> list[bytes]:
        due: list[bytes] = []
        while self._waiting and self._waiting[0][0] <= now_s:
            due.append(heapq.heappop(self._waiting)[2])
        return due
