"""Bad rows or files, listed for a message with equal problems grouped."""

from collections import Counter

MAX_PROBLEMS = 10
"""A message lists this many problems, and counts the rest."""


class Problems:
    """Counts problems, and keeps the first place of each."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[str, str] = {}
        self._times: Counter[str] = Counter()

    def add(self, problem: str, place: str) -> None:
        """Notes a problem, a clause that follows the name of its place."""
        self.count += 1
        self._first.setdefault(problem, place)
        self._times[problem] += 1

    def listed(self, num_good: int) -> str:
        """Returns one clause for each problem, with its first place in front."""
        clauses = []
        for problem, place in self._first.items():
            times = self._times[problem]
            same = f"the same in all {times}" if times == self.count + num_good else f"the same in {times - 1} more"
            clauses.append(f"{place}: {problem}" + (f" ({same})" if times > 1 else ""))
        rest = len(clauses) - MAX_PROBLEMS
        return "; ".join(clauses[:MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
