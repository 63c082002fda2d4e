"""Contrastive search: a likely continuation whose hidden states do not repeat."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError, RegardError
from regard.generate.decode import MAX_TOKENS, pad_prompts
from regard.generate.search.protocol import Hypothesis, token_limits
from regard.models.base import Language, SupportsHidden, mark_prompt_as_prefix
from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class ContrastiveSearch:
    r"""Choose tokens that are likely and whose hidden state is unlike all earlier ones.

        v* = argmax over the k most probable v of   (1 - alpha) P(v) - alpha max_j cos(h_v, h_j)

    h_v is the hidden state of v, h_j are those of the prompt and of the tokens so far; max_j cos is
    the degeneration penalty, alpha the `penalty_alpha` of transformers. P is over the whole
    vocabulary. alpha = 0 is greedy, and so is k = 1. A step runs the model on all k candidates, and
    so costs as much as a beam search of width k. The returned score is log P of the continuation
    with its stop id. Su et al. 2022.
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
        max_new_tokens: int | Sequence[int],
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """One hypothesis for each prompt."""
        if not isinstance(model, SupportsHidden):
            raise ConfigError(
                "contrastive search needs hidden states, and this model has none; use beam search"
            )
        limits = token_limits(model, prompts, max_new_tokens, source, unread=0)
        if not prompts:
            return []
        longest, limit = max(map(len, prompts)), max(limits)
        capacity = min(longest + limit, model.context or MAX_TOKENS)
        state = mark_prompt_as_prefix(model, model.start(len(prompts), capacity, source))
        device = state.lengths.device
        ids, counts = pad_prompts(prompts, device)
        x, state = model.hidden(ids, state, counts=counts)
        # (rows, capacity, dim)
        past_hidden = F.pad(_unit_vectors(x), (0, 0, 0, capacity - x.shape[1]))
        x = x[torch.arange(len(x), device=device), counts - 1]
        unfinished = list(range(len(prompts)))
        completions: list[list[int]] = [[] for _ in prompts]
        scores = [0.0] * len(prompts)
        for length in range(1, limit + 1):
            log_p, ids = self._candidates(model.head(x.unsqueeze(1)).squeeze(1), unfinished)
            rows = torch.arange(len(unfinished), device=device)
            x, candidate_state = model.hidden(
                ids.flatten().unsqueeze(1), state.select(rows.repeat_interleave(self.k))
            )
            x = x.unflatten(0, (-1, self.k)).squeeze(2)  # (rows, k, dim)
            cosine = _unit_vectors(x) @ past_hidden.mT  # (rows, k, capacity)
            valid = torch.arange(capacity, device=device) < state.lengths.unsqueeze(1)
            similarity = cosine.masked_fill(~valid.unsqueeze(1), -1.0).amax(-1)
            best = ((1 - self.alpha) * log_p.exp() - self.alpha * similarity).argmax(1)
            x = x[rows, best]
            chosen, log_probs = ids[rows, best].tolist(), log_p[rows, best].tolist()
            for prompt, token, log_prob in zip(unfinished, chosen, log_probs, strict=True):
                scores[prompt] += log_prob
                if token not in stop:
                    completions[prompt].append(token)
            keep = [
                row
                for row, (prompt, token) in enumerate(zip(unfinished, chosen, strict=True))
                if token not in stop and length < limits[prompt]
            ]
            if not keep:
                break
            unfinished, keep_rows = [unfinished[row] for row in keep], rows[keep]
            past_hidden[rows, state.lengths] = _unit_vectors(x)
            state = candidate_state.select((rows * self.k + best)[keep_rows])
            if longest > min(map(len, prompts)):
                state = state.rewind(state.lengths)  # shrink it: the longest row may be gone
            x, past_hidden = x[keep_rows], past_hidden[keep_rows]
        return [[Hypothesis(ids, score)] for ids, score in zip(completions, scores, strict=True)]

    def _candidates(self, logits: Tensor, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """log P and ids of the k most probable tokens of each row."""
        if self.k > logits.shape[1]:
            raise ConfigError(
                f"k={self.k} of contrastive search must be at most vocab_size={logits.shape[1]}"
            )
        possible = logits.amax(-1).isfinite().tolist()  # neither NaN nor -inf
        if not all(possible):
            row = prompts[possible.index(False)]
            raise RegardError(
                f"row {row}: no continuation has a probability above 0; the logits are -inf or NaN"
            )
        best, ids = logits.float().log_softmax(-1).topk(self.k)
        return best, ids


def _unit_vectors(x: Tensor) -> Tensor:
    """Unit vectors, so that a dot product is a cosine."""
    return F.normalize(x.float(), dim=-1)
