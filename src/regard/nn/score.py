"""How well a query and a key go together."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

Queries = Float[Tensor, "batch heads time head_dim"]
Keys = Float[Tensor, "batch heads seen head_dim"]
Scores = Float[Tensor, "batch heads time seen"]


class Score(nn.Module):
    """One number for each query and key.

    Where it is `scale * q . k`, `fused` is true and torch's fused kernel computes it.
    """

    fused = False
    scale = 1.0

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_at: Int[Tensor, "#batch time"],
        key_at: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The scores; positions are for those that look at them."""
        raise NotImplementedError


class Dot(Score):
    r"""score(q, k) = q . k      (Luong et al. 2015)

    Its variance grows with the width, which is why the Transformer divides it.
    """

    fused = True

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_at: Int[Tensor, "#batch time"],
        key_at: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """scale * q kᵀ"""
        return self.scale * q @ k.transpose(-1, -2)


class ScaledDot(Dot):
    r"""score(q, k) = q . k / sqrt(d)      (Vaswani et al. 2017)"""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5


class Shaw(Score):
    r"""score(q_i, k_j) = q_i . (k_j + a_{j-i}) / sqrt(d)      (Shaw et al. 2018)

    a is learned per layer, shared by its heads; distances beyond `reach` use the last vector.
    The paper's second table, added to the values, is left out: it found no gain from it.
    """

    def __init__(self, head_dim: int, reach: int = 16) -> None:
        super().__init__()
        self.scale, self.reach = head_dim**-0.5, reach
        self.relative = nn.Embedding(2 * reach + 1, head_dim)

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_at: Int[Tensor, "#batch time"],
        key_at: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The content term and the position term, both scaled."""
        distance = key_at.unsqueeze(-2) - query_at.unsqueeze(-1)  # (batch, time, seen)
        bucket = distance.clamp(-self.reach, self.reach) + self.reach
        by_distance = q @ self.relative.weight.T  # (batch, heads, time, distances)
        bucket = bucket.unsqueeze(1).expand(*by_distance.shape[:-1], -1)
        return self.scale * (q @ k.transpose(-1, -2) + by_distance.gather(-1, bucket))


SCORES: dict[str, Callable[..., Score]] = {"scaled_dot": ScaledDot, "dot": Dot, "shaw": Shaw}
