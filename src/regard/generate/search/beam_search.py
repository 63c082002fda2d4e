"""Beam search: follow the `width` most probable continuations at once instead of sampling one."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError, RegardError, unknown
from regard.generate.decode import MAX_TOKENS, prefill
from regard.generate.search.protocol import Hypothesis, token_limits
from regard.models.base import Language
from regard.nn.state import Source

NORMALIZATIONS: dict[str, Callable[[int, float], float]] = {
    "power": lambda length, power: float(length**power),
    "gnmt": lambda length, power: float(((5 + length) / 6) ** power),
}
MAX_LENGTH_PENALTY = 20  # larger powers of a length overflow
EARLY_STOPPING = ("never", "heuristic", "full")

# one-token extensions of beams: their beam, their token and their log P
Extensions = tuple[
    Int[Tensor, "rows candidates"], Int[Tensor, "rows candidates"], Float[Tensor, "rows candidates"]
]


@dataclass(frozen=True, slots=True)
class BeamSearch:
    r"""Search for the most probable continuations of each prompt with `width` beams.

        score(y) = log P(y | prompt, source) / penalty(|y|)

        power    penalty(n) = n^a                 transformers, fairseq
        gnmt     penalty(n) = ((5 + n) / 6)^a     Wu et al. 2016

    with a = `length_penalty`; |y| counts the generated tokens, including the stop id. Each step
    extends every beam by every token and keeps the `width` most probable extensions. An extension
    by a stop id becomes a finished hypothesis, and the next best extension takes its place. When
    `max_new_tokens` ids were generated for a prompt, or its context is full, its unfinished beams
    are scored as they are.

    log P only decreases, so the best score a beam can reach is its log P over the largest penalty
    still possible. `early_stopping` says when a search ends:

        never       when no beam can still enter the `n_best`: no better hypothesis is lost
        heuristic   when no beam at its present length beats the worst of `width` finished ones
        full        when `width` hypotheses are finished

    (`early_stopping` of transformers: "never", False and True). One beam is greedy search, which
    ends at its first stop id. Fewer than `n_best` are returned if no more have a probability
    above 0.

    Diverse beam search (Vijayakumar et al. 2018): the beams form `groups` groups of width / groups
    beams, each a search in parallel with the others. For ranking, the score of a token that g beams
    of earlier groups choose at the same step is lowered by `diversity` * g. As in the paper, and
    not in transformers, the returned score stays log P. The `n_best` of every group are returned,
    best first; those of the first group equal those of a beam search of its width.
    """

    width: int = 5
    length_penalty: float = 1.0  # a; 0: log P without normalization
    normalization: str = "power"  # NORMALIZATIONS
    early_stopping: str = "never"  # EARLY_STOPPING
    n_best: int = 1  # hypotheses returned per group
    groups: int = 1
    diversity: float = 0.5

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width={self.width} of a beam search must be at least 1")
        if self.groups < 1 or self.width % self.groups:
            raise ConfigError(f"groups={self.groups} must divide the beam's width={self.width}")
        if not 1 <= self.n_best <= self.group_width:
            raise ConfigError(
                f"n_best={self.n_best} must lie between 1 and the {self.group_width} beams of a "
                "group"
            )
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ConfigError(
                f"length_penalty={self.length_penalty:g} must lie between -{MAX_LENGTH_PENALTY} "
                f"and {MAX_LENGTH_PENALTY}"
            )
        if not 0 <= self.diversity < math.inf:
            raise ConfigError(f"diversity={self.diversity} must be 0 (none) or larger")
        choices = {"normalization": tuple(NORMALIZATIONS), "early_stopping": EARLY_STOPPING}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(unknown(f"value of {name}", getattr(self, name), known))

    @property
    def group_width(self) -> int:
        """The number of beams of one group."""
        return self.width // self.groups

    def penalty(self, length: int) -> float:
        """The length penalty: log P of a hypothesis of this length is divided by it."""
        return NORMALIZATIONS[self.normalization](length, self.length_penalty)

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
        """The `n_best` hypotheses of every group of each prompt, best first."""
        limits = token_limits(model, prompts, max_new_tokens, source)
        if not prompts:
            return []
        limit, longest = max(limits), max(map(len, prompts))
        capacity = min(longest + limit - 1, model.context or MAX_TOKENS)
        logits, state = prefill(model, prompts, capacity, source)
        if self.width > logits.shape[1]:
            raise ConfigError(
                f"width={self.width} of a beam search must be at most vocab_size={logits.shape[1]}"
            )
        device, width, groups = logits.device, self.group_width, self.groups
        stops = torch.tensor(sorted(stop), dtype=torch.long, device=device)
        unfinished = torch.arange(len(prompts), device=device)
        expanded = unfinished.repeat_interleave(groups)  # below, a row is a group of a prompt
        logits, state = logits[expanded], state.select(expanded)
        row_limits = torch.tensor(limits, device=device)[expanded]
        row_penalties = torch.tensor(list(map(self.penalty, limits)), device=device)[expanded]
        beams = _Beams.empty(len(expanded), 1, limit, 0.0, device)
        finished = _Beams.empty(len(expanded), width, limit, -torch.inf, device)
        done = torch.zeros(len(expanded), dtype=torch.bool, device=device)
        results: list[list[Hypothesis]] = [[] for _ in prompts]

        for length in range(1, limit + 1):
            # one beam at first, then `width`, or fewer if there are not so many extensions
            beam_count = beams.scores.shape[1]
            parents, next_ids, log_probs = self._extensions(logits, beams.scores, stops)
            stopped = torch.isin(next_ids, stops)
            best = beams.pick(parents[:, :width], log_probs[:, :width] / self.penalty(length))
            ended = best.mask(~stopped[:, :width] | done[:, None])
            finished = finished.concat(ended).best(width)
            at_limit = row_limits == length  # rows whose beams end here, without a stop id
            if any_at_limit := length in limits:
                truncated = best.append(next_ids[:, :width])
                removed = stopped[:, :width] | (done | ~at_limit)[:, None]
                finished = finished.concat(truncated.mask(removed)).best(width)
            if length == limit:
                break
            keep = stopped.long().argsort(dim=1, stable=True)[:, :width]  # stops come last
            parents, next_ids = parents.gather(1, keep), next_ids.gather(1, keep)
            log_probs = log_probs.masked_fill(stopped, -torch.inf).gather(1, keep)
            beams = beams.pick(parents, log_probs).append(next_ids)
            best_log_probs = log_probs.amax(1)
            done |= at_limit | self._is_done(best_log_probs, finished.scores, length, row_penalties)
            prompt_done = done.view(-1, groups).all(1)
            rows = torch.arange(len(done), device=device)
            # Rows at their limit have no free position in the state; others are dropped when
            # half of them are done, so that copying pays off.
            if any_at_limit or 2 * int(prompt_done.sum()) >= len(unfinished):
                row_done = prompt_done.repeat_interleave(groups)
                self._collect(results, unfinished[prompt_done], finished.select(row_done))
                unfinished, rows = unfinished[~prompt_done], rows[~row_done]
                beams, finished = beams.select(rows), finished.select(rows)
                done, parents = done[rows], parents[rows]
                row_limits, row_penalties = row_limits[rows], row_penalties[rows]
            if not len(unfinished):
                return results
            state = state.select((rows[:, None] * beam_count + parents).flatten())
            if any_at_limit and longest > min(map(len, prompts)):
                state = state.rewind(state.lengths)  # shrink it: the longest row may be gone
            scored, state = model.step(beams.ids[..., length - 1].flatten().unsqueeze(1), state)
            logits = scored[:, -1]
        self._collect(results, unfinished, finished)
        return results

    def _extensions(
        self,
        logits: Float[Tensor, "hypotheses vocab"],
        beam_log_probs: Float[Tensor, "rows beams"],
        stops: Int[Tensor, " stops"],
    ) -> Extensions:
        """The most probable one-token extensions of each row.

        There are enough of them that `group_width` beams continue even if every beam also ends
        with every stop id. A single beam ends at its first stop id and needs one only.
        """
        width = self.group_width
        count = 1 if width == 1 else (1 + len(stops)) * width
        by_group = beam_log_probs.unflatten(0, (-1, self.groups))  # (prompts, groups, beams)
        logits_by_group = logits.float().view(*by_group.shape, -1)
        # how many beams of earlier groups chose each token
        token_counts = logits_by_group.new_zeros(len(by_group), logits.shape[1])
        extensions = []
        for group, group_logits in enumerate(logits_by_group.unbind(1)):
            ranked = group_logits
            if group:
                ranked = group_logits - self.diversity * token_counts.unsqueeze(1)
            parents, next_ids, log_probs = _best_extensions(
                group_logits, ranked, by_group[:, group], count
            )
            extensions.append((parents, next_ids, log_probs))
            if len(extensions) < self.groups:
                possible = (log_probs > -torch.inf) & ~torch.isin(next_ids, stops)
                counted = possible & (possible.cumsum(1) <= width)
                token_counts.scatter_add_(1, next_ids, counted.float())
        columns = zip(*extensions, strict=True)
        parents, next_ids, log_probs = (torch.stack(column, 1).flatten(0, 1) for column in columns)
        return parents, next_ids, log_probs

    def _is_done(
        self,
        best: Float[Tensor, " rows"],
        finished: Float[Tensor, "rows beams"],
        length: int,
        final_penalties: Float[Tensor, " rows"],
    ) -> Bool[Tensor, " rows"]:
        """Whether the search of each row ends; `best` is log P of its best beam."""
        if self.early_stopping == "full":
            return (finished[:, -1] > -torch.inf) | (best == -torch.inf)
        if self.early_stopping == "heuristic":
            return best / self.penalty(length) <= finished[:, -1]
        largest = final_penalties if self.length_penalty >= 0 else self.penalty(length + 1)
        return best / largest <= finished[:, self.n_best - 1]

    def _collect(
        self, results: list[list[Hypothesis]], prompts: Int[Tensor, " selected"], finished: "_Beams"
    ) -> None:
        """Write the best hypotheses of `prompts` to `results`; a prompt has one row per group."""
        by_group = finished.best(self.n_best).hypotheses()
        for index, prompt in enumerate(prompts.tolist()):
            groups = by_group[index * self.groups : (index + 1) * self.groups]
            hypotheses = (hypothesis for group in groups for hypothesis in group)
            results[prompt] = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
            if not results[prompt]:
                raise RegardError(
                    f"row {prompt}: no continuation has a probability above 0; the logits are "
                    "-inf or NaN"
                )


@dataclass(frozen=True, slots=True)
class _Beams:
    """Several hypotheses of each row; a score of -inf marks an unused slot."""

    ids: Int[Tensor, "rows beams capacity"]
    lengths: Int[Tensor, "rows beams"]
    scores: Float[Tensor, "rows beams"]

    @classmethod
    def empty(
        cls, rows: int, beams: int, capacity: int, score: float, device: torch.device
    ) -> "_Beams":
        return cls(
            torch.zeros(rows, beams, capacity, dtype=torch.long, device=device),
            torch.zeros(rows, beams, dtype=torch.long, device=device),
            torch.full((rows, beams), score, device=device),
        )

    def select(self, rows: Tensor) -> "_Beams":
        return _Beams(self.ids[rows], self.lengths[rows], self.scores[rows])

    def pick(self, beams: Tensor, scores: Tensor) -> "_Beams":
        index = beams.unsqueeze(-1).expand(-1, -1, self.ids.shape[-1])
        return _Beams(self.ids.gather(1, index), self.lengths.gather(1, beams), scores)

    def append(self, next_ids: Tensor) -> "_Beams":
        ids = self.ids.scatter(-1, self.lengths.unsqueeze(-1), next_ids.unsqueeze(-1))
        return _Beams(ids, self.lengths + 1, self.scores)

    def mask(self, removed: Tensor) -> "_Beams":
        return replace(self, scores=self.scores.masked_fill(removed, -torch.inf))

    def best(self, count: int) -> "_Beams":
        scores, beams = self.scores.topk(count)
        return self.pick(beams, scores)

    def concat(self, other: "_Beams") -> "_Beams":
        return _Beams(
            torch.cat([self.ids, other.ids], 1),
            torch.cat([self.lengths, other.lengths], 1),
            torch.cat([self.scores, other.scores], 1),
        )

    def hypotheses(self) -> list[list[Hypothesis]]:
        rows = zip(self.ids.tolist(), self.lengths.tolist(), self.scores.tolist(), strict=True)
        return [
            [
                Hypothesis(ids[:length], score)
                for ids, length, score in zip(*row, strict=True)
                if score > -torch.inf
            ]
            for row in rows
        ]


def _best_extensions(
    logits: Float[Tensor, "rows beams vocab"],
    ranked: Float[Tensor, "rows beams vocab"],
    beam_log_probs: Float[Tensor, "rows beams"],
    count: int,
) -> Extensions:
    """The best extensions by `ranked`, and their log P by `logits`.

    The best of each beam are selected first, so that no log-softmax over the whole vocabulary
    is written to memory.
    """
    best, ids = ranked.topk(min(count, ranked.shape[-1]))  # (rows, beams, count)
    log_normalizer = logits.logsumexp(-1, keepdim=True)
    beam_log_probs = beam_log_probs.unsqueeze(-1)
    rank_score = (beam_log_probs + (best - log_normalizer)).flatten(1)  # (rows, beams * count)
    log_prob = (beam_log_probs + (logits.gather(-1, ids) - log_normalizer)).flatten(1)
    index = rank_score.topk(min(count, rank_score.shape[1])).indices
    return index // ids.shape[-1], ids.flatten(1).gather(1, index), log_prob.gather(1, index)
