"""Smoothing of n-gram counts: Witten-Bell, additive (Laplace, Lidstone), Kneser-Ney."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor, nn

from regard.models.ngram_counts import NGramTable
from regard.nn.options import require_positive

DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)  # of counts 1, 2 and 3+, where they cannot be estimated

Smoothed = tuple[Float64[Tensor, " matches"], Float64[Tensor, " rows"]]  # α(w | h), γ(h)


class Smoothing(nn.Module):
    """P(w | h) = α(w | h) + γ(h) P(w | h'): h' is the history h without its oldest id.

    `forward` returns the discounted probability α(w | h) of each seen n-gram and the interpolation
    weight γ(h) of each row's history. An unseen history backs off to the shorter one; below the
    unigram the distribution is uniform.
    """

    uniform_backoff = False  # γ(h) weighs the uniform distribution instead of P(w | h')

    def fit(self, tables: Sequence[NGramTable], vocab_size: int) -> None:
        """Estimate discounts and replace counts by continuation counts, where needed."""

    def forward(
        self,
        length: int,
        count: Float64[Tensor, " matches"],
        row: Int[Tensor, " matches"],
        total: Float64[Tensor, " rows"],
    ) -> Smoothed:
        """α and γ of n-grams whose histories have `length` ids.

        `row` is the row of each n-gram, `total` the count of each row's history, at least 1.
        """
        raise NotImplementedError

    if TYPE_CHECKING:
        __call__ = forward


class WittenBell(Smoothing):
    """Interpolated Witten-Bell smoothing.

        α(w | h) = c(hw) / (c(h) + t(h)),      γ(h) = t(h) / (c(h) + t(h))

    c(h) = sum_w c(hw), and t(h) is the number of distinct ids that followed h. Witten & Bell
    1991, interpolated as in Chen & Goodman 1998.
    """

    def forward(self, length: int, count: Tensor, row: Tensor, total: Tensor) -> Smoothed:
        """α and γ of Witten-Bell."""
        t = torch.zeros_like(total).index_add_(0, row, count.sign())
        return count / (total + t)[row], t / (total + t)


class AddK(Smoothing):
    """Additive smoothing.

        P(w | h) = (c(hw) + k) / (c(h) + k V)

    Laplace 1814 with k = 1; Lidstone 1920. An unseen history backs off to the shorter one; the
    formula alone would give 1 / V.
    """

    uniform_backoff = True

    def __init__(self, vocab_size: int, k: float = 1.0) -> None:
        super().__init__()
        require_positive("smoothing 'add_k'", k=k)
        self.total_pseudo_count = k * vocab_size

    def forward(self, length: int, count: Tensor, row: Tensor, total: Tensor) -> Smoothed:
        """α and γ of additive smoothing."""
        smoothed_total = total + self.total_pseudo_count
        return count / smoothed_total[row], self.total_pseudo_count / smoothed_total


class KneserNey(Smoothing):
    """Modified, interpolated Kneser-Ney smoothing: absolute discounting of continuation counts.

        α(w | h) = (a(hw) - D(a(hw))) / a(h),      γ(h) = sum_w D(a(hw)) / a(h)
        D(1), D(2), D(3 or more) = 1 - 2 Y n2/n1,  2 - 3 Y n3/n2,  3 - 4 Y n4/n3
        Y = n1 / (n1 + 2 n2)

    a(hw) is the count at the highest order; at lower orders it is the continuation count, the
    number of distinct ids seen before hw, or the count if hw occurs only at the beginning of rows.
    a(h) = sum_w a(hw), and n_j is the number of n-grams of this order with a = j. Where the n_j
    cannot give valid discounts, as for characters, D is 1/2, 1 and 3/2. Kneser & Ney 1995,
    modified by Chen & Goodman 1999.
    """

    discounts: Float64[Tensor, "order 3"]

    def __init__(self, order: int) -> None:
        super().__init__()
        self.register_buffer(
            "discounts", torch.tensor([DEFAULT_DISCOUNTS] * order, dtype=torch.float64)
        )

    def fit(self, tables: Sequence[NGramTable], vocab_size: int) -> None:
        """Replace all but the highest-order counts by continuation counts; estimate discounts."""
        shorter = torch.zeros_like(tables[0].keys)  # index of each n-gram without its oldest id
        for table, longer in pairwise(tables):
            history, word = longer.keys // vocab_size, longer.keys % vocab_size
            shorter = table.find(shorter[history] * vocab_size + word)
            continuations = torch.bincount(shorter[longer.counts > 0], minlength=len(table.keys))
            table.counts = continuations.where(continuations > 0, table.counts)
        discounts = [_estimate_discounts(table.counts) for table in tables]
        self.discounts = torch.tensor(discounts, dtype=torch.float64, device=shorter.device)

    def forward(self, length: int, count: Tensor, row: Tensor, total: Tensor) -> Smoothed:
        """α and γ of Kneser-Ney."""
        discount = F.pad(self.discounts[length], (1, 0))[count.long().clamp_max(3)]
        total_discount = torch.zeros_like(total).index_add_(0, row, discount)
        return (count - discount) / total[row], total_discount / total


def _estimate_discounts(counts: Int[Tensor, " ngrams"]) -> tuple[float, float, float]:
    n1, n2, n3, n4 = torch.bincount(counts.clamp_max(5), minlength=6)[1:5].tolist()
    if min(n1, n2, n3) == 0:
        return DEFAULT_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    discounts = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return discounts if min(discounts) > 0 else DEFAULT_DISCOUNTS  # 0 leaves no mass to unseen ids


SMOOTHINGS: dict[str, Callable[..., Smoothing]] = {
    "witten_bell": WittenBell,
    "add_k": AddK,
    "kneser_ney": KneserNey,
}
