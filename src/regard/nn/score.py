"""How well a query and a key go together."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.nn.functional import split_heads
from regard.nn.loss import soft_cap
from regard.nn.options import positive
from regard.nn.position.absolute import Sinusoidal

Queries = Float[Tensor, "batch heads time head_dim"]
Keys = Float[Tensor, "batch heads seen head_dim"]
Scores = Float[Tensor, "batch heads time seen"]


class Score(nn.Module):
    """One number for each query and key.

    Where it is `scale * q . k`, `fused` is true and torch's fused kernel computes it.
    """

    fused = False
    scale = 1.0

    def prepare(self, k: Keys) -> Keys:
        """What of the keys can be worked out before any query is known; `forward` takes this."""
        return k

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The scores; positions are for those that look at them."""
        raise NotImplementedError


class Dot(Score):
    r"""score(q, k) = q . k      (Luong et al. 2015)

    Its variance grows with the width, which is why the Transformer divides it. `cap` bends the
    scores so that none is beyond ±cap: cap tanh(s / cap) (Gemma 2), which no fused kernel does.
    """

    def __init__(self, scale: float = 1.0, cap: float | None = None) -> None:
        super().__init__()
        positive("dot score", cap=cap)
        self.scale, self.cap, self.fused = scale, cap, cap is None

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """scale * q kᵀ"""
        return soft_cap(self.scale * q @ k.transpose(-1, -2), self.cap)


class ScaledDot(Dot):
    r"""score(q, k) = q . k / sqrt(d)      (Vaswani et al. 2017)

    `width` is a d other than that of the heads (Gemma 2's largest model).
    """

    def __init__(self, head_dim: int, width: int | None = None, cap: float | None = None) -> None:
        positive("score 'scaled_dot'", width=width)
        super().__init__((head_dim if width is None else width) ** -0.5, cap)


class Content(Score):
    r"""score(q, k) = cos(q, k) = q . k / (|q| |k|)      (Graves et al. 2014)

    Only the direction counts. It lies between -1 and 1, so no key outweighs another more than
    e^2 = 7.4 times.
    """

    def prepare(self, k: Keys) -> Keys:
        """k / |k|"""
        return F.normalize(k, dim=-1)

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The cosine of the angle between both."""
        return F.normalize(q, dim=-1) @ k.transpose(-1, -2)


class Additive(Score):
    r"""score(q, k) = v . tanh(W [q; k])      (Bahdanau et al. 2015)

    W is stored in two halves, `query` and `key`, so that the keys go through theirs once. v and
    W are learned per layer, shared by its heads.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(head_dim, head_dim, bias=False)
        self.key = nn.Linear(head_dim, head_dim, bias=False)
        self.weigh = nn.Linear(head_dim, 1, bias=False)  # v

    def prepare(self, k: Keys) -> Keys:
        """W_k k"""
        keys: Tensor = self.key(k)
        return keys

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """v . tanh(W_q q + W_k k)"""
        both = self.query(q).unsqueeze(-2) + k.unsqueeze(-3)  # (batch, heads, time, seen, head_dim)
        scores: Tensor = self.weigh(both.tanh()).squeeze(-1)
        return scores


class General(Score):
    r"""score(q, k) = q . W k      (Luong et al. 2015)

    W is learned per layer, shared by its heads.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(head_dim, head_dim, bias=False)  # W

    def prepare(self, k: Keys) -> Keys:
        """W k"""
        keys: Tensor = self.key(k)
        return keys

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """q (W k)ᵀ"""
        return q @ k.transpose(-1, -2)


class Location(Score):
    r"""score(q, k_i) = (W q)_i: where to look, whatever is there      (Luong et al. 2015)

    W has one row for each position, of which there are `context`. Keys are never met, so it is
    for looks at states as such, not for those through matrices of keys.
    """

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        self.place = nn.Linear(head_dim, context, bias=False)  # W

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The rows of W q at the positions of the keys."""
        if k.shape[-2] > (context := self.place.out_features):
            raise ShapeError(
                f"score 'location' has learned context={context} positions, and there are "
                f"{k.shape[-2]}; give less at a time, or train with a larger model.context"
            )
        by_place = self.place(q)  # (batch, heads, time, context)
        index = key_positions[:, None, None].expand(*q.shape[:-1], -1)
        scores: Tensor = by_place.gather(-1, index)
        return scores


class Shaw(Score):
    r"""score(q_i, k_j) = q_i . (k_j + a_{j-i}) / sqrt(d)      (Shaw et al. 2018)

    a is learned per layer, shared by its heads; distances beyond `reach` use the last vector.
    The paper's second table, added to the values, is left out: it found no gain from it.
    """

    def __init__(self, head_dim: int, reach: int = 16) -> None:
        super().__init__()
        positive("score 'shaw'", reach=reach)
        self.scale, self.reach = head_dim**-0.5, reach
        self.relative = nn.Embedding(2 * reach + 1, head_dim)

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The content term and the position term, both scaled."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(
            -1
        )  # (batch, time, seen)
        bucket = distance.clamp(-self.reach, self.reach) + self.reach
        by_distance = q @ self.relative.weight.T  # (batch, heads, time, distances)
        bucket = bucket.unsqueeze(1).expand(*by_distance.shape[:-1], -1)
        return self.scale * (q @ k.transpose(-1, -2) + by_distance.gather(-1, bucket))


class TransformerXL(Score):
    r"""Content and position, each met by the query and by a bias of its own (Dai et al. 2019).

        score(q_i, k_j) = ((q_i + u) . k_j + (q_i + v) . R r_{i-j}) / sqrt(d)

    u and v are learned per head, R per layer; r is the sinusoidal vector of a distance. Gopher
    and Chinchilla use it. It replaces positions: take position="none" beside it.
    """

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.scale, self.heads, self.waves = head_dim**-0.5, heads, Sinusoidal(dim)
        self.distance = nn.Linear(dim, heads * head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))
        self.distance_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The content term and the distance term, both scaled."""
        reach = k.shape[-2] - 1  # no two tokens are farther apart than there are keys
        distances = torch.arange(-reach, reach + 1, device=q.device).unsqueeze(0)
        waves = self.waves.embed(distances).to(self.distance.weight.dtype)
        r = split_heads(self.distance(waves), self.heads).to(q.dtype)  # (1, heads, distances, d)
        by_distance = (q + self.distance_bias) @ r.transpose(-1, -2)
        index = (
            query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2) + reach
        )  # (batch, time, seen)
        index = index.clamp(0, 2 * reach).unsqueeze(1).expand(*q.shape[:-1], -1)
        content = (q + self.content_bias) @ k.transpose(-1, -2)
        return self.scale * (content + by_distance.gather(-1, index))


SCORES: dict[str, Callable[..., Score]] = {
    "scaled_dot": ScaledDot,
    "dot": Dot,
    "content": Content,
    "additive": Additive,
    "general": General,
    "location": Location,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
}
RELATIVE = frozenset({"shaw", "transformer_xl"})  # compare positions: not those of two sequences
MIXING = frozenset({"additive", "general"})  # have a matrix between query and key: not after a turn
