"""How counts become probabilities: what was seen gives up a share, and who is given it."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.models.counts import Table

USUAL = (0.5, 1.0, 1.5)  # discounts of grams seen once, twice and more often, of no text at all

Parts = tuple[Float64[Tensor, " found"], Float64[Tensor, " rows"]]


class Smoothing(nn.Module):
    """P(w | h) = share(hw) + rest(h) P(w | h'): h' is h without its oldest id.

    `forward` gives the share of each gram found and the rest of each row's context. A context
    that was never seen says what the shorter one says, and below the unigram all ids are alike.
    """

    even = False  # whether the rest goes to all ids alike, not to the shorter context

    def fit(self, tables: Sequence[Table], vocab_size: int) -> None:
        """Make of the counts what this smoothing counts; most take them as they are."""

    def forward(
        self,
        order: int,
        count: Float64[Tensor, " found"],
        row: Int[Tensor, " found"],
        total: Float64[Tensor, " rows"],
    ) -> Parts:
        """`row` is whose context a gram was found after, `total` its counts' sum, at least 1."""
        raise NotImplementedError

    if TYPE_CHECKING:
        __call__ = forward


class WittenBell(Smoothing):
    """The more often a context was followed by something new, the less it is trusted.

        share(hw) = c(hw) / (c(h) + t(h)),      rest(h) = t(h) / (c(h) + t(h))

    c(h) = sum_w c(hw), and t(h) counts the different ids that followed h. Witten & Bell 1991,
    interpolated as in Chen & Goodman 1998.
    """

    def forward(self, order: int, count: Tensor, row: Tensor, total: Tensor) -> Parts:
        """What was seen, and one more for each different id."""
        t = torch.zeros_like(total).index_add_(0, row, count.sign())
        return count / (total + t)[row], t / (total + t)


class AddK(Smoothing):
    """Every id is taken to have followed every context k times more than it did.

        P(w | h) = (c(hw) + k) / (c(h) + k V)

    Laplace 1814 with k = 1; Lidstone 1920. The shorter context is asked only where h was
    never seen; the formula alone would then say 1 / V.
    """

    even = True

    def __init__(self, vocab_size: int, k: float = 1.0) -> None:
        super().__init__()
        if not 0 < k < float("inf"):
            raise ConfigError(f"smoothing 'add_k': k={k} must be above 0 and finite")
        self.added = k * vocab_size

    def forward(self, order: int, count: Tensor, row: Tensor, total: Tensor) -> Parts:
        """What was seen, and k V beside it."""
        return count / (total + self.added)[row], self.added / (total + self.added)


class KneserNey(Smoothing):
    """A shorter context matters only where the longer is new, so it counts new things only.

        share(hw) = (a(hw) - D(a(hw))) / a(h),      rest(h) = sum_w D(a(hw)) / a(h)
        D(1), D(2), D(3 or more) = 1 - 2 Y n2/n1,  2 - 3 Y n3/n2,  3 - 4 Y n4/n3
        Y = n1 / (n1 + 2 n2)

    a(hw) is the count in the longest grams; below, it is the number of different ids seen before
    hw, or the count where there never was one: rows begin with it. a(h) = sum_w a(hw), and n_j
    is how many grams of this length have a = j. Where these are too few to tell, as among the
    characters of a text, D is 1/2, 1 and 3/2. Kneser & Ney 1995, modified by Chen & Goodman 1999.
    """

    discounts: Float64[Tensor, "order 3"]

    def __init__(self, order: int) -> None:
        super().__init__()
        self.register_buffer("discounts", torch.tensor([USUAL] * order, dtype=torch.float64))

    def fit(self, tables: Sequence[Table], vocab_size: int) -> None:
        """Count in all but the last table what came before, and find the discounts of each."""
        shorter = torch.zeros_like(tables[0].keys)  # where each gram's end, one less, stands
        for table, longer in pairwise(tables):
            context, word = longer.keys // vocab_size, longer.keys % vocab_size
            shorter = table.find(shorter[context] * vocab_size + word)
            before = torch.bincount(shorter[longer.counts > 0], minlength=len(table.keys))
            table.counts = before.where(before > 0, table.counts)
        found = [_discounts(table.counts) for table in tables]
        self.discounts = torch.tensor(found, dtype=torch.float64, device=shorter.device)

    def forward(self, order: int, count: Tensor, row: Tensor, total: Tensor) -> Parts:
        """What was seen, less a discount; and the discounts."""
        discount = F.pad(self.discounts[order], (1, 0))[count.long().clamp_max(3)]
        rest = torch.zeros_like(total).index_add_(0, row, discount)
        return (count - discount) / total[row], rest / total


def _discounts(counts: Int[Tensor, " grams"]) -> tuple[float, float, float]:
    n1, n2, n3, n4 = torch.bincount(counts.clamp_max(5), minlength=6)[1:5].tolist()
    if min(n1, n2, n3) == 0:
        return USUAL
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return found if min(found) > 0 else USUAL  # else what is new after it could not be at all


SMOOTHINGS: dict[str, Callable[..., Smoothing]] = {
    "interpolated": WittenBell,
    "add_k": AddK,
    "kneser_ney": KneserNey,
}
