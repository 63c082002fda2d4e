r"""The linear-chain conditional random field: a distribution over the tags of a whole text.

    score(y) = s[y_1] + sum_t u_t[y_t] + sum_{t>1} A[y_{t-1}, y_t] + e[y_N]
    P(y | x) = exp(score(y)) / Z,    Z = sum over all y of exp(score(y))

u_t are the emission scores of the tags of word t, A[i, j] the transition score of tag j after tag
i, s and e the scores of the first and of the last tag.
Lafferty et al. 2001. Texts are right-padded; `lengths` gives their numbers of words, at least 1.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

Emissions = Float[Tensor, "batch words tags"]


class Transitions(NamedTuple):
    """Scores of the first tag, of each transition between two tags, and of the last tag."""

    start_transitions: Float[Tensor, " tags"]  # s
    transitions: Float[Tensor, "tags tags"]  # A
    end_transitions: Float[Tensor, " tags"]  # e


def path_score(
    u: Emissions, tags: Int[Tensor, "batch words"], lengths: Int[Tensor, " batch"], a: Transitions
) -> Float[Tensor, " batch"]:
    """The score of one sequence of tags for each text."""
    valid = torch.arange(u.shape[1], device=u.device) < lengths.unsqueeze(1)
    last_tag = tags.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
    emissions = u.gather(2, tags.unsqueeze(2)).squeeze(2)
    transitions = a.transitions[tags[:, :-1], tags[:, 1:]]
    return (
        a.start_transitions[tags[:, 0]]
        + (emissions * valid).sum(1)
        + (transitions * valid[:, 1:]).sum(1)
        + a.end_transitions[last_tag]
    )


def log_partition(
    u: Emissions, lengths: Int[Tensor, " batch"], a: Transitions
) -> Float[Tensor, " batch"]:
    r"""log Z by the forward algorithm, in log space.

    alpha_1 = s + u_1,    alpha_t[j] = u_t[j] + log sum_i exp(alpha_{t-1}[i] + A[i, j])
    log Z = log sum_j exp(alpha_N[j] + e[j])
    """
    alpha = a.start_transitions + u[:, 0]
    for t in range(1, u.shape[1]):
        next_alpha = u[:, t] + (alpha.unsqueeze(2) + a.transitions).logsumexp(1)
        alpha = torch.where((t < lengths).unsqueeze(1), next_alpha, alpha)
    return (alpha + a.end_transitions).logsumexp(1)


def viterbi(
    u: Emissions, lengths: Int[Tensor, " batch"], a: Transitions
) -> Int[Tensor, "batch words"]:
    r"""The highest-scoring tags of each text, by the Viterbi algorithm; 0 beyond its length.

    delta_1 = s + u_1,    delta_t[j] = u_t[j] + max_i (delta_{t-1}[i] + A[i, j])
    """
    delta = a.start_transitions + u[:, 0]
    backpointers = []  # [t - 1][j]: the best tag of word t - 1 if word t has tag j
    for t in range(1, u.shape[1]):
        best, previous_tag = (delta.unsqueeze(2) + a.transitions).max(1)
        delta = torch.where((t < lengths).unsqueeze(1), u[:, t] + best, delta)
        backpointers.append(previous_tag)
    tag = (delta + a.end_transitions).argmax(1)  # of the last word, then of the words before it
    tags = torch.zeros(u.shape[:2], dtype=torch.long, device=u.device)
    for t in range(u.shape[1] - 1, -1, -1):
        if t < len(backpointers):  # the tag of word t + 1 determines that of word t
            previous_tag = backpointers[t].gather(1, tag.unsqueeze(1)).squeeze(1)
            tag = torch.where(t + 1 < lengths, previous_tag, tag)
        tags[:, t] = torch.where(t < lengths, tag, 0)
    return tags


@torch.enable_grad()
def marginals(u: Emissions, lengths: Int[Tensor, " batch"], a: Transitions) -> Emissions:
    """P(y_t = j | x), the derivative of log Z with respect to u_t[j]; 0 beyond a text's length."""
    u = u.detach().requires_grad_()
    (probabilities,) = torch.autograd.grad(log_partition(u, lengths, a).sum(), u)
    return probabilities
