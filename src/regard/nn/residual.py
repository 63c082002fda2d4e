"""Residual connections: where the norms are placed.

One branch after the other, n and m norms:

    pre             x + f(n(x))         GPT-2, LLaMA, ViT
    post            n(x + f(x))         the 2017 Transformer, BERT
    sandwich        x + m(f(n(x)))      CogView, Gemma 2
    deepnorm        n(a x + f(x))       Wang et al. 2022; a = (2 layers)^(1/4) for a decoder
    none            f(n(x))             no residual: deep stacks then do not train

Both branches in parallel, f attention and g the feed-forward network:

    parallel        x + f(n(x)) + g(n(x))       GPT-J, PaLM, Phi
    parallel_norms  x + f(n(x)) + g(m(x))       GPT-NeoX
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

Stream = Float[Tensor, "batch time dim"]


@dataclass(frozen=True, slots=True)
class NormOrder:
    """The norm placement of a block, and DeepNorm's weight of the residual stream."""

    kind: Literal["pre", "post", "sandwich", "deepnorm", "none", "parallel", "parallel_norms"]
    scale: float = 1.0

    @property
    def final_norm(self) -> bool:
        """Whether the output of the last block is not normalised: the stack then has a norm."""
        return self.kind not in ("post", "deepnorm")

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward read the same x."""
        return self.kind in ("parallel", "parallel_norms")


def residual(
    x: Stream,
    branch: Callable[[Tensor], Tensor],
    norm: nn.Module,
    norm_order: NormOrder,
    after: nn.Module | None = None,
) -> Stream:
    """One branch with its residual connection and norms, as above; `after` is m."""
    if norm_order.kind == "pre":
        return x + branch(norm(x))
    if norm_order.kind == "post":
        return norm(x + branch(x))
    if norm_order.kind == "deepnorm":
        return norm(norm_order.scale * x + branch(x))
    if norm_order.kind == "sandwich":
        assert after is not None
        return x + after(branch(norm(x)))
    return branch(norm(x))


def deepnorm(
    side: Literal["encoder", "decoder"], encoder_layers: int, decoder_layers: int
) -> tuple[float, float]:
    r"""DeepNorm's weight of the stream and gain of the initialisation (Wang et al. 2022, table 1).

        encoder only, N layers       a = (2N)^(1/4)                  b = (8N)^(-1/4)
        decoder only, M layers       a = (2M)^(1/4)                  b = (8M)^(-1/4)
        encoder of both              a = 0.81 (N^4 M)^(1/16)         b = 0.87 (N^4 M)^(-1/16)
        decoder of both              a = (3M)^(1/4)                  b = (12M)^(-1/4)

    >>> deepnorm("decoder", 0, 8)[0]
    2.0
    """
    n, m = encoder_layers, decoder_layers
    if not n or not m:
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    if side == "encoder":
        return 0.81 * (n**4 * m) ** 0.0625, 0.87 * (n**4 * m) ** -0.0625
    return (3 * m) ** 0.25, (12 * m) ** -0.25
