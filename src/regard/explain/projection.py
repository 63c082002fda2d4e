"""Vectors projected to two dimensions (PCA, t-SNE), and similarities of positions."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.nn.position import Position

Vectors = Float[Tensor, "points dim"]


def pca(x: Vectors, dims: int = 2) -> tuple[Float[Tensor, "points dims"], Float[Tensor, " dims"]]:
    """Project vectors onto their principal components; also return the explained variance ratio.

    The sign of a component is such that the projection of largest magnitude is positive.
    """
    if dims > min(x.shape):
        raise ShapeError(f"vectors of shape {tuple(x.shape)} have fewer than {dims} components")
    centred = x.double() - x.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    points = u[:, :dims] * s[:dims]
    largest = points.gather(0, points.abs().argmax(0, keepdim=True))
    points = points * largest.sign().where(largest != 0, 1.0)
    return points.to(x.dtype), (s[:dims].square() / s.square().sum().clamp_min(1e-300)).to(x.dtype)


def tsne(
    x: Vectors, *, perplexity: float = 30.0, steps: int = 500, seed: int = 0
) -> Float[Tensor, "points 2"]:
    r"""t-SNE: points in the plane whose neighbours are those of the vectors.

        p_ij ~ exp(-|x_i - x_j|^2 / 2 s_i^2), symmetric;   q_ij ~ 1 / (1 + |y_i - y_j|^2)
        y <- y - lr dKL(p || q) / dy

    s_i is such that row i has the given perplexity. Exact, with quadratic cost: suited to at
    most a few thousand points. The start is the principal components; the updates use momentum and
    early exaggeration. van der Maaten & Hinton 2008.
    """
    count = len(x)
    if count < 4:
        raise ShapeError(f"t-SNE needs at least 4 points, not {count}")
    if not perplexity > 0:
        raise ConfigError(f"perplexity={perplexity} must be above 0")
    perplexity = min(perplexity, (count - 1) / 3)
    p = _neighbour_probabilities(x.double(), perplexity)
    generator = torch.Generator().manual_seed(seed)
    y, _ = pca(x.double()) if min(x.shape) > 1 else (x.double().repeat(1, 2), None)
    y = 1e-2 * y / y.std().clamp_min(1e-12)
    y = y + 1e-4 * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    lr, velocity, gain = max(50.0, count / 12), torch.zeros_like(y), torch.ones_like(y)
    for step in range(steps):
        weight = 1 / (1 + torch.cdist(y, y).square())
        weight.fill_diagonal_(0)
        q = (weight / weight.sum()).clamp_min(1e-12)
        forces = ((12.0 if step < steps // 4 else 1.0) * p - q) * weight
        gradient = 4 * (forces.sum(1, keepdim=True) * y - forces @ y)
        gain = torch.where(gradient.sign() != velocity.sign(), gain + 0.2, gain * 0.8)
        gain = gain.clamp_min(0.01)
        velocity = (0.5 if step < steps // 4 else 0.8) * velocity - lr * gain * gradient
        y = y + velocity
        y = y - y.mean(0)
    return y.to(x.dtype)


def _neighbour_probabilities(x: Tensor, perplexity: float) -> Tensor:
    """The symmetric p_ij; the precision of each row is found by bisection."""
    squared = torch.cdist(x, x).square()
    squared.fill_diagonal_(torch.inf)
    squared = squared - squared.min(1, keepdim=True).values
    low, high = x.new_zeros(len(x), 1), x.new_full((len(x), 1), torch.inf)
    beta = 1 / squared.where(squared.isfinite(), 0.0).mean(1, keepdim=True).clamp_min(1e-12)
    target = math.log(perplexity)
    for _ in range(60):
        p = (-beta * squared).softmax(1)
        too_flat = -torch.xlogy(p, p).sum(1, keepdim=True) > target
        low, high = torch.where(too_flat, beta, low), torch.where(too_flat, high, beta)
        beta = torch.where(high.isfinite(), (low + high) / 2, 2 * beta)
    return (p + p.T) / (2 * len(x))


@torch.no_grad()
def position_similarity(
    position: Position, length: int, *, head_dim: int | None = None, normalize: bool = True
) -> Float[Tensor, "maps length length"]:
    r"""The similarity of every pair of positions, one map or one per head.

        learned, sinusoidal     cos(p_i, p_j), or p_i . p_j without `normalize`
        rotary                  q . R_{j-i} q / |q|^2 for q = (1, ..., 1)
        ALiBi, T5               the bias of each head

    `head_dim` is the width that rotary embeddings rotate.
    """
    positions = position_indices(position, length)
    if (vectors := position.embed(positions)) is not None:
        vectors = vectors.float()
        vectors = nn.functional.normalize(vectors, dim=-1) if normalize else vectors
        return vectors @ vectors.mT
    if (rotation := position.rotation(positions)) is not None:
        width = head_dim or getattr(position, "rotary_dim", None)
        if width is None:
            raise ConfigError("rotary embeddings need head_dim, the width that they rotate")
        rotated = rotation.apply(torch.ones(1, 1, length, width, device=positions.device))[0, 0]
        return (rotated @ rotated.T / width).unsqueeze(0).float()
    if (bias := position.bias(positions, positions)) is not None:
        return bias[0].float()
    raise ConfigError(
        f"position encoding {type(position).__name__!r} has no vectors, rotation or bias to compare"
    )


def position_indices(position: Position, length: int) -> Int[Tensor, "1 length"]:
    """0, 1, ... on the device of a position encoding."""
    tensors = [*position.parameters(), *position.buffers()]
    return torch.arange(length, device=tensors[0].device if tensors else None).unsqueeze(0)
