"""Few rows in which every two choices meet: a covering array of strength two, by greed.

A *value* is a pair (factor, label). Some pairs of values are refused; others follow from those:
where a needs what b forbids, no row can hold both. Nothing is random, so that the rows are the
same in every process. Inside, a value is a bit and a set of values an integer.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
        values = [(name, label) for name, labels in factors.items() for label in labels]
        self._bit = {value: 1 << number for number, value in enumerate(values)}
        pairs = all_pairs(factors)
        self.refused = {pair for pair in pairs if refused(*pair)}
        self._refusing = {bit: p for bit, p in self._partners(self.refused).items() if p}
        involved = {name for pair in self.refused for name, _ in pair}
        self._entangled = [  # the values of every factor that has a refused pair
            [self._bit[name, label] for label in factors[name]]
            for name in factors
            if name in involved
        ]
        self._all_entangled = sum(map(sum, self._entangled))
        self._completes = cache(self._can_complete)
        self.impossible = {pair for pair in pairs if not self._fits(self._set(pair))}
        self.rows: list[Row] = []
        self._used: Counter[Value] = Counter()
        missing = {pair: None for pair in pairs if pair not in self.impossible}  # keeps its order
        partners = self._partners(missing)
        while missing:
            row = self._row(dict(sorted(next(iter(missing)))), partners)
            self._used.update(row.items())
            self.rows.append(row)
            held = self._set(row.items())
            for value in row.items():
                partners[self._bit[value]] &= ~held
            for pair in pairs_of(row):
                missing.pop(pair, None)

    def _set(self, values) -> int:
        return sum(self._bit[value] for value in values)

    def _partners(self, pairs) -> dict[int, int]:
        """For each value those that it forms one of these pairs with."""
        partners = dict.fromkeys(self._bit.values(), 0)
        for a, b in pairs:
            partners[self._bit[a]] |= self._bit[b]
            partners[self._bit[b]] |= self._bit[a]
        return partners

    def _row(self, row: Row, missing: Mapping[int, int]) -> Row:
        """Fill a row up, each time with the value that meets the most new pairs."""
        while len(row) < len(self.factors):
            held = self._set(row.items())
            candidates = [
                ((missing[self._bit[value]] & held).bit_count(), value)
                for name, labels in self.factors.items()
                if name not in row
                for value in ((name, label) for label in labels)
            ]
            candidates.sort(key=lambda each: (-each[0], self._used[each[1]]))
            name, label = next(
                value for _, value in candidates if self._fits(held | self._bit[value])
            )
            row[name] = label
        return row

    def _fits(self, held: int) -> bool:
        """Whether these values can stand in one row that holds nothing refused."""
        return self._completes(held & self._all_entangled)

    def _can_complete(self, held: int) -> bool:
        forbidden = 0
        for bit, refusing in self._refusing.items():
            if bit & held:
                forbidden |= refusing
        if held & forbidden:
            return False
        allowed = [
            [bit for bit in bits if not bit & forbidden]
            for bits in self._entangled
            if not any(bit & held for bit in bits)
        ]
        if not allowed:
            return True
        fewest = min(allowed, key=len)  # none, if the row cannot be completed
        return any(self._completes(held | bit) for bit in fewest)
