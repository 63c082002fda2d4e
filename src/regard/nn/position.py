"""Position encodings: position embeddings, rotations of queries and keys, or score biases."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import kind_of, make
from regard.errors import ShapeError
from regard.nn.options import require_positive

Positions = Int[Tensor, "#batch time"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotations of queries and keys, one angle per position and pair of coordinates."""

    cos: Float[Tensor, "#batch 1 time pairs"]
    sin: Float[Tensor, "#batch 1 time pairs"]
    interleaved: bool = False  # pairs are (0,1), (2,3) … instead of (0,d/2), (1,d/2+1) …

    def apply(
        self, x: Float[Tensor, "batch heads time head_dim"]
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """Rotate the first 2 * pairs coordinates; the others are unchanged."""
        width = 2 * self.cos.shape[-1]
        rotated, unrotated = x[..., :width], x[..., width:]
        if self.interleaved and x.dtype == torch.float32 and x.shape[-1] % 2 == 0:
            rotated = rotate_complex(rotated, self.cos, self.sin)
        else:
            rotated = rotate_pairs(rotated, self.cos, self.sin, self.interleaved).to(x.dtype)
        return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin)"""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs` of interleaved pairs, as one complex multiplication: faster on a CPU."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


class Position(nn.Module):
    """No position encoding (NoPE), and the base class of all position encodings.

    A subclass overrides `embed`, `rotation` or `bias`. `positions` holds the absolute position of
    every token, so KV caches and packed documents need no special case. The methods are called once
    per forward pass for all layers with the same sliding window, not in every layer.
    """

    each_layer = False  # add `embed` to the input of attention in every layer, not once
    after_projection = False  # with `each_layer`: add it to the projected q, k and v instead

    def for_sliding_window(self) -> "Position":
        """The position encoding of layers with a sliding window."""
        return self

    def embed(self, positions: Positions) -> Float[Tensor, "#batch time dim"] | None:
        """Vectors to add to the embeddings."""
        return None

    def rotation(self, positions: Positions) -> Rotation | None:
        """Rotations of the queries and keys of every layer."""
        return None

    def bias(
        self, query_positions: Positions, key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"] | None:
        """Biases to add to the attention scores of every layer."""
        return None


class Sinusoidal(Position):
    r"""Sinusoids of decreasing frequency.

        p_{t,2i} = sin(t / base^(2i/d)),   p_{t,2i+1} = cos(t / base^(2i/d))

    so that p_{t+k} = M_k p_t for a matrix M_k that does not depend on t (Vaswani et al. 2017).
    Without `interleaved` all sines come before all cosines, as in the authors' code and in Marian.
    They are added to the embeddings; with `each_layer` to the input of every attention layer; with
    `after_projection` to its queries, keys and values: Q = X W + P, d then the width of a head.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10_000.0,
        interleaved: bool = True,
        each_layer: bool = False,
        after_projection: bool = False,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ShapeError(
                f"position 'sinusoidal' needs an even width (dim, embed_dim or head_dim), not {dim}"
            )
        require_positive("position 'sinusoidal'", base=base)
        self.dim, self.base, self.interleaved = dim, base, interleaved
        _check_after_projection("sinusoidal", each_layer, after_projection)
        self.each_layer, self.after_projection = each_layer, after_projection

    def embed(self, positions: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The sines and cosines at `positions`."""
        even = torch.arange(0, self.dim, 2, device=positions.device)  # 2i
        angle = positions.unsqueeze(-1) * self.base ** (-even / self.dim)  # (batch, time, dim / 2)
        pair = (angle.sin(), angle.cos())
        return torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)


class Learned(Position):
    """One learned vector for each position below `context` (Gehring et al. 2017; GPT, BERT).

    The first `offset` rows of the table are unused: OPT, BART and RoBERTa have two.
    `each_layer` and `after_projection` as for `Sinusoidal`; all layers and heads share one table.
    """

    def __init__(
        self,
        dim: int,
        context: int,
        offset: int = 0,
        each_layer: bool = False,
        after_projection: bool = False,
    ) -> None:
        super().__init__()
        if offset < 0:
            raise ShapeError(f"position 'learned': offset={offset} must be at least 0")
        self.table = nn.Embedding(context + offset, dim)
        self.offset = offset
        _check_after_projection("learned", each_layer, after_projection)
        self.each_layer, self.after_projection = each_layer, after_projection

    def embed(self, positions: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The rows of the table at `positions`."""
        return self.table(positions + self.offset if self.offset else positions)


def _check_after_projection(name: str, each_layer: bool, after_projection: bool) -> None:
    if after_projection and not each_layer:
        raise ShapeError(
            f"position {name!r}: after_projection=true adds positions in every layer; "
            "set each_layer=true"
        )


Frequencies = Float[Tensor, " pairs"]


def linear(frequency: Frequencies, factor: float) -> Frequencies:
    """Position interpolation: t becomes t / factor (Chen et al. 2023)."""
    require_positive("rotary scaling 'linear'", factor=factor)
    return frequency / factor


def ntk(frequency: Frequencies, factor: float) -> Frequencies:
    """NTK-aware scaling: divide the lowest frequency by `factor`, keep the highest."""
    require_positive("rotary scaling 'ntk'", factor=factor)
    return _scale_ntk(frequency, factor)


def _scale_ntk(frequency: Frequencies, factor: float | Tensor) -> Frequencies:
    pairs = len(frequency)
    exponent = torch.arange(pairs, device=frequency.device) / max(pairs - 1, 1)
    return frequency * factor**-exponent


def llama3(
    frequency: Frequencies,
    factor: float,
    original_context: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Frequencies:
    """Divide low frequencies by `factor` and keep high ones (LLaMA 3.1).

    Low ones have at most `low_freq_factor` periods in the original context, high ones at least
    `high_freq_factor`; those between are interpolated.
    """
    require_positive("rotary scaling 'llama3'", factor=factor, original_context=original_context)
    low, high = low_freq_factor, high_freq_factor
    if low >= high:
        raise ShapeError(
            f"rotary scaling 'llama3': low_freq_factor={low} must be less than "
            f"high_freq_factor={high}"
        )
    periods = original_context * frequency / (2 * math.pi)  # in the original context
    smooth = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (smooth + (1 - smooth) / factor)


def yarn(
    frequency: Frequencies,
    base: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> tuple[Frequencies, float]:
    """Interpolate low frequencies and keep high ones (YaRN, Peng et al. 2023).

    Pairs with more than `beta_fast` rotations in the original context keep their frequency, those
    with fewer than `beta_slow` are divided by `factor`, with a linear ramp between. `truncate`
    rounds the ends of the ramp to integers. Queries and keys are multiplied by `attention_factor`,
    by default 0.1 ln(factor) + 1.
    """
    require_positive(
        "rotary scaling 'yarn'",
        factor=factor,
        original_context=original_context,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
    )
    if base == 1:
        raise ShapeError("rotary scaling 'yarn': base=1 gives all pairs the same frequency")
    pairs = len(frequency)

    def pair_with_rotations(rotations: float) -> float:
        return pairs * math.log(original_context / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair_with_rotations(beta_fast), pair_with_rotations(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    index = torch.arange(pairs, device=frequency.device)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return frequency / factor * ramp + frequency * (1 - ramp), attention_factor


def dynamic(
    frequency: Frequencies, length: Int[Tensor, ""], factor: float, original_context: int
) -> Frequencies:
    """Dynamic NTK scaling: `ntk` with a factor that grows with the length of the sequence.

    max(1, factor · length / original_context - (factor - 1))
    """
    require_positive("rotary scaling 'dynamic'", factor=factor, original_context=original_context)
    return _scale_ntk(frequency, (factor * length / original_context - (factor - 1)).clamp_min(1))


def longrope(
    frequency: Frequencies,
    length: Int[Tensor, ""],
    short_factor: list[float],
    long_factor: list[float],
    original_context: int,
    attention_factor: float = 1.0,
) -> tuple[Frequencies, float]:
    """Divide frequencies by `long_factor` beyond the original context, else by `short_factor`.

    Both have a factor for each pair. Queries and keys are multiplied by `attention_factor`.
    LongRoPE, Ding et al. 2024.
    """
    options = {"original_context": original_context, "attention_factor": attention_factor}
    require_positive("rotary scaling 'longrope'", **options)
    for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(factors) != len(frequency) or not all(0 < f < math.inf for f in factors):
            raise ShapeError(
                f"rotary scaling 'longrope': {name} must have {len(frequency)} factors above 0"
            )
    divisors = torch.tensor([short_factor, long_factor], device=frequency.device)
    return frequency / divisors[(length > original_context).long()], attention_factor


# Each returns the frequencies, or the frequencies and a factor for queries and keys.
SCALINGS: dict[str, Callable[..., Frequencies | tuple[Frequencies, float]]] = {
    "linear": linear,
    "ntk": ntk,
    "llama3": llama3,
    "yarn": yarn,
    "dynamic": dynamic,
    "longrope": longrope,
}
LENGTH_DEPENDENT_SCALINGS = ("dynamic", "longrope")  # use the length of the sequence


class Rotary(Position):
    r"""Rotate each pair of coordinates of q and k by an angle that grows with the position.

        (a, b) at position t  ->  (a cos tw - b sin tw,  b cos tw + a sin tw),   w = base^(-2i/d)

    so that q_t . k_s depends on t - s only (RoPE, Su et al. 2021). `base` is `rope_theta` of
    transformers, `scaling` its `rope_scaling`, which extends a trained model to longer contexts.
    With `partial_rotary_factor` only the first part of each head is rotated, and d is the width of
    this part (GPT-NeoX, Phi). `window_base` is the base in layers with a sliding window, which are
    not scaled (Gemma 3). A scaling that depends on the length of the sequence takes the largest
    position plus 1 as the length; keys that are already in a KV cache keep their rotation.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10_000.0,
        partial_rotary_factor: float = 1.0,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        window_base: float | None = None,
    ) -> None:
        super().__init__()
        if not 0 < partial_rotary_factor <= 1:
            raise ShapeError(
                f"position 'rotary': partial_rotary_factor={partial_rotary_factor} must lie in "
                "(0, 1]"
            )
        require_positive("position 'rotary'", base=base, window_base=window_base)
        rotary_dim = int(head_dim * partial_rotary_factor)
        if rotary_dim % 2 or rotary_dim == 0:
            raise ShapeError(
                f"position 'rotary' rotates pairs of coordinates: head_dim={head_dim} times "
                f"partial_rotary_factor={partial_rotary_factor} must be even and more than 0"
            )
        self.rotary_dim, self.base = rotary_dim, base
        self.interleaved, self.scaling = interleaved, scaling
        if window_base is not None:
            self.window_rotary = Rotary(head_dim, window_base, partial_rotary_factor, interleaved)
        # whether the scaling depends on the length of the sequence
        self.length_dependent = (
            scaling is not None and kind_of(scaling)[0] in LENGTH_DEPENDENT_SCALINGS
        )
        # on the CPU, since `scaling` needs values even if the default device is meta
        start = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        self.rotation(start)  # checks the options of `scaling`

    def for_sliding_window(self) -> Position:
        """Rotations by `window_base`, without scaling, if it is set."""
        return getattr(self, "window_rotary", self)

    def rotation(self, positions: Int[Tensor, "#batch time"]) -> Rotation:
        """The cosines and sines of the angles at `positions`."""
        even = torch.arange(0, self.rotary_dim, 2, device=positions.device)  # 2i
        frequency = self.base ** (-even / self.rotary_dim)
        attention_factor = 1.0
        if self.scaling is not None:
            length = positions.max() + 1 if self.length_dependent else None
            arguments = {"frequency": frequency, "base": self.base, "length": length}
            scaled = make(self.scaling, SCALINGS, "rotary scaling", **arguments)
            frequency, attention_factor = scaled if isinstance(scaled, tuple) else (scaled, 1.0)
        angle = (positions.unsqueeze(-1) * frequency).unsqueeze(1)  # (batch, 1, time, pairs)
        cos, sin = cos_sin(angle)
        if attention_factor != 1:
            cos, sin = cos * attention_factor, sin * attention_factor
        return Rotation(cos, sin, self.interleaved)


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine and the sine of `angle`: a function that `accel.compile` can substitute."""
    return angle.cos(), angle.sin()


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    r"""The slope of each head: m_h = 2^(-8h / heads) if `heads` is a power of two.

    Otherwise the slopes of the next smaller power of two, then every second slope of the next
    larger one, as in the authors' code.
    """
    power = 2 ** math.floor(math.log2(heads))  # the largest power of two up to `heads`
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)]
    device = torch.get_default_device()  # the slopes need values even on the meta device
    return torch.tensor(slopes[:heads], device="cpu" if device.type == "meta" else device)


class ALiBi(Position):
    r"""score_ij += -m_h |i - j|,   m_h = 2^(-8h / heads)      (Press et al. 2022)"""

    slope: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slope", alibi_slopes(heads), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ALiBi":
        """Compute the slopes again, since `to_empty` leaves the buffer uninitialized."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.slope.copy_(alibi_slopes(len(self.slope)))
        return self

    def bias(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"]:
        """-slope_h |i - j|"""
        distance = (
            query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        ).abs()  # (batch, time, seen)
        return -self.slope.view(-1, 1, 1) * distance.unsqueeze(1)


class T5Bias(Position):
    r"""T5's relative position bias (Raffel et al. 2020): one table for all layers.

        score_ij += b_{h, bucket(j - i)}

    Half of the buckets hold one distance each; the others grow logarithmically up to
    `max_distance`; all larger distances share the last. A bidirectional model has half of the
    buckets for the past and half for the future.
    """

    def __init__(
        self, heads: int, causal: bool, buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        if buckets < 4 or max_distance <= buckets:
            raise ShapeError(
                f"position 't5': buckets={buckets} must be at least 4, and "
                f"max_distance={max_distance} must be more than buckets"
            )
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, distance: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The bucket of key position minus query position."""
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp_min(0)
        else:
            buckets //= 2
            offset = buckets * (distance > 0)
            distance = distance.abs()
        max_exact = buckets // 2  # smaller distances have a bucket each
        ratio = (distance.clamp_min(1) / max_exact).log() / math.log(self.max_distance / max_exact)
        log_bucket = (max_exact + (ratio * (buckets - max_exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < max_exact, distance, log_bucket)

    def bias(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"]:
        """The learned bias of each bucket, per head."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)
        bias: Tensor = self.table(self.bucket(distance))  # (batch, time, seen, heads)
        return bias.permute(0, 3, 1, 2)


POSITIONS: dict[str, Callable[..., Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "alibi": ALiBi,
    "t5": T5Bias,
}
