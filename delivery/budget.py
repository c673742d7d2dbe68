"""How many commits a run may spend: all runs of a repository share the Hub's 128 or so an hour.

Eight runs in one repository stay below that. What marks the life of a run always goes; beats of training
steps and checkpoints share what is left, and beats come further apart the more of both there were.
"""

from dataclasses import dataclass, replace

HOUR_S = 3600.0
HOURLY = 15
RESERVED = 5  # for the end of a run: last checkpoint, adapter, figures, metrics, DONE
PACE_S = 600.0  # a commit that can wait leaves room for another one every so often
LONGEST_SPACING_S = 900.0  # whatever was spent, the budget holds nothing back for longer


@dataclass(frozen=True)
class Spent:
    """A commit: its number in order of creation, when it was claimed or landed, and whether it could wait."""

    number: int
    at: float
    can_wait: bool


class Budget:
    """The commits of one run; times are seconds of any clock that never goes back."""

    def __init__(self, floor_s: float):
        """`floor_s` is the least time between a beat and the commit before it; 0 switches the budget off."""
        self.floor_s = floor_s
        self._spent: list[Spent] = []

    def claim(self, number: int, now: float, can_wait: bool = False) -> None:
        """Count a commit that is about to be made."""
        kept_s = max(HOUR_S, self.floor_s)
        self._spent = [one for one in self._spent if now - one.at < kept_s]
        self._spent.append(Spent(number, now, can_wait))

    def landed(self, number: int, now: float) -> None:
        """Count a commit from now on: the Hub does not know when it was claimed."""
        self._spent = [replace(one, at=now) if one.number == number else one for one in self._spent]

    def give_back(self, number: int) -> None:
        """Forget a commit that failed."""
        self._spent = [one for one in self._spent if one.number != number]

    def has_room(self, now: float) -> bool:
        """Whether a commit that can wait may go: another one every PACE_S must still find room after it.

        A launcher kills what is silent, so no rush of milestones holds them back for ever.
        """
        if self.floor_s == 0:
            return True
        oldest = min((one.at for one in self._spent), default=now)
        waited_s = now - max((one.at for one in self._spent if one.can_wait), default=oldest)
        return waited_s >= LONGEST_SPACING_S or all(
            self._since(now + ahead * PACE_S - HOUR_S) + ahead < HOURLY - RESERVED
            for ahead in range(int(HOUR_S / PACE_S))
        )

    def beat_is_due(self, now: float) -> bool:
        """Whether a step's beat may be committed."""
        if self.floor_s == 0:
            return True
        newest = max((one.at for one in self._spent), default=float("-inf"))
        return now - newest >= self._spacing_s(now) and self.has_room(now)

    def _spacing_s(self, now: float) -> float:
        before = sum(one.can_wait and one.at > now - HOUR_S for one in self._spent)
        return max(self.floor_s, min(LONGEST_SPACING_S, self.floor_s * 2.0**before))

    def _since(self, then: float) -> int:
        return sum(one.at > then for one in self._spent)
