"""Attention scores: dot product, additive, general, location, cosine, relative, disentangled."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.nn.loss import soft_cap
from regard.nn.options import require_positive
from regard.nn.position import Sinusoidal

Queries = Float[Tensor, "batch heads time head_dim"]
Keys = Float[Tensor, "batch heads seen head_dim"]
Scores = Float[Tensor, "batch heads time seen"]


class Score(nn.Module):
    """The compatibility of a query and a key, a scalar.

    `fused`: the score is `scale * q . k`, so torch's scaled_dot_product_attention computes it.
    """

    fused = False
    scale = 1.0
    cap: float | None = None
    key_bias = True  # whether the key projection has a bias if that of the queries has one
    per_head = False  # whether heads have separate parameters: q and k then hold all heads
    hidden_dim = 1  # values that `forward` allocates per query-key pair

    def prepare(self, k: Keys) -> Keys:
        """Compute the part of the score that depends on k only; `forward` takes it as k."""
        return k

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The scores; relative scores and `Location` use the positions."""
        raise NotImplementedError


class Dot(Score):
    r"""score(q, k) = q . k      (Luong et al. 2015)

    Its variance grows with head_dim, so the Transformer divides it by sqrt(head_dim). `cap` is
    soft-capping, cap tanh(s / cap) between ±cap (Gemma 2); no fused kernel computes it.
    """

    def __init__(self, scale: float = 1.0, cap: float | None = None) -> None:
        super().__init__()
        require_positive("score 'dot'", cap=cap)
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

    `scale_dim` is d where it is not head_dim (`query_pre_attn_scalar` of Gemma 2 27B).
    """

    def __init__(
        self, head_dim: int, scale_dim: int | None = None, cap: float | None = None
    ) -> None:
        require_positive("score 'scaled_dot'", scale_dim=scale_dim, cap=cap)
        super().__init__((head_dim if scale_dim is None else scale_dim) ** -0.5, cap)


class Cosine(Score):
    r"""score(q, k) = cos(q, k) = q . k / (|q| |k|)      (Graves et al. 2014)

    The cosine similarity, between -1 and 1: the weights of two keys differ by a factor of at most
    e^2 = 7.4.
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
        """q / |q| . k"""
        return F.normalize(q, dim=-1) @ k.transpose(-1, -2)


class Additive(Score):
    r"""score(q, k) = v . tanh(W [q; k])      (Bahdanau et al. 2015; "concat" in Luong et al. 2015)

    W is stored in two halves, `query` and `key`, so that the keys are projected once. v and W are
    learned per layer, shared by its heads.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.hidden_dim = head_dim
        self.query = nn.Linear(head_dim, head_dim, bias=False)
        self.key = nn.Linear(head_dim, head_dim, bias=False)
        self.energy = nn.Linear(head_dim, 1, bias=False)  # v

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
        # (batch, heads, time, seen, head_dim)
        hidden = (self.query(q).unsqueeze(-2) + k.unsqueeze(-3)).tanh()
        scores: Tensor = self.energy(hidden).squeeze(-1)
        return scores


class General(Score):
    r"""score(q, k) = q . W k      (Luong et al. 2015)

    The bilinear (multiplicative) score. W is learned per layer, shared by its heads.
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
    r"""score(q, k_i) = (W q)_i      (Luong et al. 2015)

    W has one row for each of `context` positions. The score does not depend on the keys, so key
    projections would get no gradient: it is for recurrent decoders without `heads`.
    """

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        self.location = nn.Linear(head_dim, context, bias=False)  # W

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The entries of W q at the positions of the keys."""
        if k.shape[-2] > (context := self.location.out_features):
            raise ShapeError(
                f"score 'location' has context={context} learned positions, but the source has "
                f"{k.shape[-2]}; shorten the source, or train with a larger model.context"
            )
        by_position = self.location(q)  # (batch, heads, time, context)
        index = key_positions[:, None, None].expand(*q.shape[:-1], -1)
        scores: Tensor = by_position.gather(-1, index)
        return scores


class Shaw(Score):
    r"""score(q_i, k_j) = q_i . (k_j + a_{j-i}) / sqrt(d)      (Shaw et al. 2018)

    Relative position representations: a is learned per layer, shared by its heads; distances are
    clipped to ±`max_distance`. The paper's second table, which is added to the values, is not
    implemented: the paper found no gain from it.
    """

    def __init__(self, head_dim: int, max_distance: int = 16) -> None:
        super().__init__()
        require_positive("score 'shaw'", max_distance=max_distance)
        self.scale, self.max_distance = head_dim**-0.5, max_distance
        self.relative = nn.Embedding(2 * max_distance + 1, head_dim)

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
    ) -> Scores:
        """The content term and the position term, both scaled."""
        i, j = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
        limit = self.max_distance
        clipped_distance = (j - i).clamp(-limit, limit) + limit  # (batch, time, seen)
        by_distance = q @ self.relative.weight.T  # (batch, heads, time, distances)
        clipped_distance = clipped_distance.unsqueeze(1).expand(*by_distance.shape[:-1], -1)
        return self.scale * (q @ k.transpose(-1, -2) + by_distance.gather(-1, clipped_distance))


class TransformerXL(Score):
    r"""Relative attention with content and position terms (Dai et al. 2019).

        score(q_i, k_j) = ((q_i + u) . k_j + (q_i + v) . R r_{i-j}) / sqrt(d)

    u and v are learned per head, R per layer; r is the sinusoidal vector of a distance. Gopher
    and Chinchilla use it. Combine it with position="none".
    """

    per_head = True

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.scale, self.heads, self.sinusoidal = head_dim**-0.5, heads, Sinusoidal(dim)
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
        max_distance = k.shape[-2] - 1
        distances = torch.arange(-max_distance, max_distance + 1, device=q.device).unsqueeze(0)
        encoded = self.sinusoidal.embed(distances).to(self.distance.weight.dtype)
        r = self.distance(encoded).unflatten(-1, (self.heads, -1))  # (1, distances, heads, d)
        r = r.transpose(1, 2).to(q.dtype)
        by_distance = (q + self.distance_bias) @ r.transpose(-1, -2)
        i, j = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
        index = (i - j + max_distance).clamp(0, 2 * max_distance)  # (batch, time, seen)
        index = index.unsqueeze(1).expand(*q.shape[:-1], -1)
        content = (q + self.content_bias) @ k.transpose(-1, -2)
        return self.scale * (content + by_distance.gather(-1, index))


class Disentangled(Score):
    r"""Disentangled attention: separate vectors for content and for relative position.

        score(q_i, k_j) = (q_i . k_j + q_i . K r_d + k_j . Q r_d) / sqrt(3 head_dim)
                           content     content to    position to
                           to content  position      content
        d = delta(i - j)

    r has a learned vector for each distance, the same in all layers (`RelativePositionEmbedding`);
    Q and K are the layer's query and key projections, and `Attention` passes Q r and K r.
    With `buckets`, distances beyond buckets / 2 share vectors, in logarithmic steps:

        delta(d) = d                                                               |d| <= m
        delta(d) = sign(d) (m + ceil((m - 1) log(|d| / m) / log((M - 1) / m)))     else

    with m = buckets / 2 and M = max_distance. He et al. 2021 (DeBERTa; versions 2 and 3). The paper
    has delta(j - i) in the third term; this is delta(i - j), as in the authors' code. With
    `position_projections`, every layer has separate projections Q and K for distances, and its keys
    have no bias (version 1).
    """

    per_head = True

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        max_distance: int = 32,
        buckets: int | None = None,
        norm_relative_embeddings: bool = False,
        position_projections: bool = False,
    ) -> None:
        super().__init__()
        require_positive("score 'disentangled'", max_distance=max_distance, buckets=buckets)
        if buckets is not None and not 4 <= buckets < 2 * max_distance - 2:
            raise ConfigError(
                f"score 'disentangled': buckets={buckets} must be at least 4 and less than "
                f"2 max_distance - 2 = {2 * max_distance - 2}; without it, every distance has a "
                "vector"
            )
        self.scale, self.norm_relative_embeddings = (3 * head_dim) ** -0.5, norm_relative_embeddings
        self.max_distance, self.buckets = max_distance, buckets
        self.key_bias = not position_projections
        self.positions: nn.ModuleDict | None = None
        if position_projections:
            query = nn.Linear(dim, heads * head_dim)
            self.positions = nn.ModuleDict(
                {"query": query, "key": nn.Linear(dim, heads * head_dim, bias=False)}
            )

    @property
    def attention_span(self) -> int:
        """The number of vectors for distances in one direction."""
        return self.max_distance if self.buckets is None else self.buckets

    def new_embedding(
        self, dim: int, norm: Callable[[int], nn.Module]
    ) -> "RelativePositionEmbedding":
        """Create the relative position embeddings, which all layers of a stack share."""
        return RelativePositionEmbedding(
            2 * self.attention_span, dim, norm(dim) if self.norm_relative_embeddings else None
        )

    def forward(
        self,
        q: Queries,
        k: Keys,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"],
        q_relative: Float[Tensor, "1 heads distances head_dim"] | None = None,
        k_relative: Float[Tensor, "1 heads distances head_dim"] | None = None,
    ) -> Scores:
        """The three terms, scaled; `q_relative` and `k_relative` are Q r and K r."""
        assert q_relative is not None
        assert k_relative is not None
        i, j = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
        index = self.delta(i - j).unsqueeze(1)  # (batch, 1, time, seen)
        content_to_content = q @ k.mT
        by_distance = q @ k_relative.mT  # (batch, heads, time, distances)
        content_to_position = by_distance.gather(-1, index.expand(*q.shape[:-1], -1))
        by_distance = k @ q_relative.mT  # (batch, heads, seen, distances)
        position_to_content = by_distance.gather(-1, index.mT.expand(*k.shape[:-1], -1)).mT
        return self.scale * (content_to_content + content_to_position + position_to_content)

    def delta(self, distance: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The row of the relative position embeddings for each distance i - j."""
        bucket = distance
        if self.buckets is not None:
            middle = self.buckets // 2
            ratio = distance.abs().clamp_min(middle) / middle
            max_ratio = torch.tensor((self.max_distance - 1) / middle, dtype=ratio.dtype)
            steps = torch.ceil(ratio.log() / max_ratio.log().item() * (middle - 1)).long()
            bucket = torch.where(
                distance.abs() <= middle, distance, distance.sign() * (middle + steps)
            )
        return (bucket + self.attention_span).clamp(0, 2 * self.attention_span - 1)


class RelativePositionEmbedding(nn.Module):
    """A learned vector for each distance, normalized if there is a `norm`."""

    def __init__(self, distances: int, dim: int, norm: nn.Module | None) -> None:
        super().__init__()
        self.count, self.vectors, self.norm = distances, nn.Embedding(distances, dim), norm

    def forward(self) -> Float[Tensor, "distances dim"]:
        """All vectors."""
        r: Tensor = self.vectors(torch.arange(self.count, device=self.vectors.weight.device))
        return r if self.norm is None else self.norm(r)


SCORES: dict[str, Callable[..., Score]] = {
    "scaled_dot": ScaledDot,
    "dot": Dot,
    "cosine": Cosine,
    "additive": Additive,
    "general": General,
    "location": Location,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "disentangled": Disentangled,
}
# scores that depend on distances between positions of one sequence: for self-attention only
RELATIVE_SCORES = frozenset({"shaw", "transformer_xl", "disentangled"})
# scores that multiply q or k by a learned matrix: RoPE cannot be applied to q and k before it
SCORES_WITH_MATRIX = frozenset({"additive", "general"})
