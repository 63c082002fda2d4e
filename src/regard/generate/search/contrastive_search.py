"""Contrastive search: a likely text that does not repeat itself."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.errors import ConfigError, RegardError
from regard.generate.search.protocol import Hypothesis, longest_answer
from regard.models.base import Hidden, Language
from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class ContrastiveSearch:
    r"""Write what is likely and at the same time unlike all that stands there already.

        v* = argmax over the k likeliest v of   (1 - alpha) P(v) - alpha max_j cos(h_v, h_j)

    h_v is the hidden state that the model comes to by reading v, h_j are those of the text so
    far, prompt included. P is that of the whole vocabulary. alpha = 0 is greedy, and so is k = 1.
    A step reads all k candidates, and so costs what a beam of k does. The score that comes back
    is log P of the text with its stop. Su et al. 2022.
    """

    k: int = 5
    alpha: float = 0.6

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k={self.k} of contrastive search must be 1 or more candidates")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} of contrastive search must lie in [0, 1]")

    @torch.inference_mode()
    def __call__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """One text for each prompt."""
        if not isinstance(model, Hidden):
            kind = type(model).__name__
            raise ConfigError(f"contrastive search compares hidden states, and {kind} has none")
        limit = longest_answer(model, prompts, tokens, source, unread=0)
        if not prompts:
            return []
        capacity = max(map(len, prompts)) + limit
        state = model.start(len(prompts), capacity, source)
        device = state.lengths.device
        counts = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        x, state = model.hidden(ids.to(device), state, counts=counts)
        seen = F.pad(_direction(x), (0, 0, 0, capacity - x.shape[1]))  # (rows, capacity, dim)
        x = x[torch.arange(len(x), device=device), counts - 1]
        left = list(range(len(prompts)))  # rows that have not stopped
        texts: list[list[int]] = [[] for _ in prompts]
        scores = [0.0] * len(prompts)
        for number in range(1, limit + 1):
            log_p, ids = self._likeliest(model.head(x.unsqueeze(1)).squeeze(1), left)
            rows = torch.arange(len(left), device=device)
            x, ahead = model.hidden(
                ids.flatten().unsqueeze(1), state.select(rows.repeat_interleave(self.k))
            )
            x = x.unflatten(0, (-1, self.k)).squeeze(2)  # (rows, k, dim)
            cosine = _direction(x) @ seen.mT  # (rows, k, capacity)
            real = torch.arange(capacity, device=device) < state.lengths.unsqueeze(1)
            likeness = cosine.masked_fill(~real.unsqueeze(1), -1.0).amax(-1)
            best = ((1 - self.alpha) * log_p.exp() - self.alpha * likeness).argmax(1)
            x = x[rows, best]
            chosen, gained = ids[rows, best].tolist(), log_p[rows, best].tolist()
            for row, token, gain in zip(left, chosen, gained, strict=True):
                scores[row] += gain
                if token not in stop:
                    texts[row].append(token)
            going = [at for at, token in enumerate(chosen) if token not in stop]
            if not going or number == limit:
                break
            left, on = [left[at] for at in going], rows[going]
            seen[rows, state.lengths] = _direction(x)
            state = ahead.select((rows * self.k + best)[on])
            x, seen = x[on], seen[on]
        return [[Hypothesis(*each)] for each in zip(texts, scores, strict=True)]

    def _likeliest(self, logits: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """log P and ids of the candidates."""
        if self.k > logits.shape[1]:
            raise ConfigError(
                f"k={self.k} of contrastive search is more than the vocabulary's {logits.shape[1]}"
            )
        possible = logits.amax(-1).isfinite().tolist()  # neither NaN nor nothing at all
        if not all(possible):
            row = rows[possible.index(False)]
            raise RegardError(f"row {row}: the model gives no text a probability above 0")
        best, ids = logits.float().log_softmax(-1).topk(self.k)
        return best, ids


def _direction(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1)
