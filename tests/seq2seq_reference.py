"""Recurrent translation once more, one row and one vector at a time, from the papers' equations.

Weights come as a dict of tensors by their names in a checkpoint; nothing else is shared.
"""

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = w[f"{name}.weight"] @ x
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def gru(w: Weights, name: str, x: Tensor, h: Tensor) -> Tensor:
    """With the reset gate behind the product, as torch has it."""
    r, z, n = linear(w, f"{name}.input", x).chunk(3)
    u_r, u_z, u = linear(w, f"{name}.hidden", h).chunk(3)
    r, z = (r + u_r).sigmoid(), (z + u_z).sigmoid()
    return z * h + (1 - z) * (n + r * u).tanh()


def lstm(w: Weights, name: str, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    h, c = state
    i, f, g, o = (linear(w, f"{name}.input", x) + linear(w, f"{name}.hidden", h)).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def attend(scores: list[Tensor], states: list[Tensor]) -> Tensor:
    """c = sum_i softmax_i(score_i) h_i"""
    e = [score.exp() for score in scores]
    return sum(each / sum(e) * h for each, h in zip(e, states, strict=True))


def bahdanau(w: Weights, source: list[int], ids: list[int]) -> Tensor:
    """z after each id, of GRUs that read both ways and look by the additive score."""
    xs = [w["embed.weight"][id] for id in source]
    zero = torch.zeros_like(xs[0])
    ahead, back = [zero], [zero]
    for x, last in zip(xs, reversed(xs), strict=True):
        ahead.append(gru(w, "encoder.0.forward_layer", x, ahead[-1]))
        back.append(gru(w, "encoder.0.backward_layer", last, back[-1]))
    both = [torch.cat(each) for each in zip(ahead[1:], reversed(back[1:]), strict=True)]
    states = [linear(w, "direction_projection", each).tanh() for each in both]
    s = linear(w, "bridge.0.0", torch.cat([ahead[-1], back[-1]])).tanh()
    zs = []
    for id in ids:
        e = w["embed.weight"][id]
        scores = []
        for h in states:
            inner = linear(w, "attention.0.score.query", s) + linear(w, "attention.0.score.key", h)
            scores.append(w["attention.0.score.energy.weight"][0] @ inner.tanh())
        c = attend(scores, states)
        s = gru(w, "decoder.0", torch.cat([e, c]), s)
        zs.append(linear(w, "readout", torch.cat([e, s, c])).tanh())
    return torch.stack(zs)


def luong(w: Weights, source: list[int], ids: list[int]) -> Tensor:
    """z after each id, of two layers of LSTM that look by the general score and feed z."""
    zero = torch.zeros_like(w["embed.weight"][0])
    below, above, states = (zero, zero), (zero, zero), []
    for id in source:
        below = lstm(w, "encoder.0", w["embed.weight"][id], below)
        above = lstm(w, "encoder.1", below[0], above)
        states.append(above[0])
    z, zs = zero, []
    for id in ids:
        below = lstm(w, "decoder.0", torch.cat([w["embed.weight"][id], z]), below)
        above = lstm(w, "decoder.1", below[0], above)
        s = above[0]
        scores = [s @ linear(w, "attention.0.score.key", h) for h in states]
        z = linear(w, "readout", torch.cat([s, attend(scores, states)])).tanh()
        zs.append(z)
    return torch.stack(zs)
