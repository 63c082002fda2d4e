"""Few rows in which every two choices meet: a covering array of strength two, by greed.

A *value* is a pair (factor, label). Some pairs of values are refused; others follow from those:
where a needs what b forbids, no row can hold both. Nothing is random, so that the rows are the
same in every process.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Value = tuple[str, str]
Row = dict[str, str]


def pairs_of(row: Mapping[str, str]) -> set[frozenset[Value]]:
    """Every two values that meet in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[str]]) -> list[frozenset[Value]]:
    """Every two values of different factors."""
    return [
        frozenset(((one, a), (two, b)))
        for one, two in combinations(factors, 2)
        for a in factors[one]
        for b in factors[two]
    ]


class Covering:
    """`rows` in which each pair meets that can; `impossible` are the others."""

    def __init__(
        self,
        factors: Mapping[str, Sequence[str]],
        refused: Callable[[Value, Value], bool],
    ) -> None:
        self.factors = factors
        pairs = all_pairs(factors)
        self.refused = {pair for pair in pairs if refused(*pair)}
        involved = {name for pair in self.refused for name, _ in pair}
        self._entangled = [name for name in factors if name in involved]
        self.impossible = {pair for pair in pairs if not self._completes(dict(pair))}
        self.rows: list[Row] = []
        self._used: Counter[Value] = Counter()
        missing = {pair: None for pair in pairs if pair not in self.impossible}  # keeps its order
        while missing:
            row = self._row(dict(sorted(next(iter(missing)))), missing)
            self._used.update(row.items())
            self.rows.append(row)
            for pair in pairs_of(row):
                missing.pop(pair, None)

    def _row(self, row: Row, missing: Mapping[frozenset[Value], None]) -> Row:
        """Fill a row up, each time with the value that meets the most new pairs."""
        while len(row) < len(self.factors):
            candidates = [
                (sum(frozenset((value, held)) in missing for held in row.items()), value)
                for name, labels in self.factors.items()
                if name not in row
                for value in ((name, label) for label in labels)
            ]
            candidates.sort(key=lambda each: (-each[0], self._used[each[1]]))
            name, label = next(
                value for _, value in candidates if self._completes({**row, value[0]: value[1]})
            )
            row[name] = label
        return row

    def _completes(self, row: Row) -> bool:
        """Whether these values can stand in one row that holds nothing refused."""
        if any(pair in self.refused for pair in pairs_of(self._tangled(row))):
            return False
        name = next((name for name in self._entangled if name not in row), None)
        if name is None:
            return True
        return any(self._completes({**row, name: label}) for label in self.factors[name])

    def _tangled(self, row: Row) -> Row:
        return {name: label for name, label in row.items() if name in self._entangled}
