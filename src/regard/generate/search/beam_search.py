"""Beam search: follow the few likeliest texts at once instead of drawing one."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError, RegardError, unknown
from regard.generate.decode import prefill
from regard.generate.search.protocol import Hypothesis, longest_answer
from regard.models.base import Language
from regard.nn.state import Source

FORMS: dict[str, Callable[[int, float], float]] = {
    "power": lambda length, power: float(length**power),
    "gnmt": lambda length, power: float(((5 + length) / 6) ** power),
}
UNTIL = ("certain", "likely", "full")


@dataclass(frozen=True, slots=True)
class BeamSearch:
    r"""Search for the likeliest continuations of each prompt, `width` at a time.

        score(y) = log P(y | prompt, source) / penalty(|y|)

        power    penalty(n) = n^a                 transformers, fairseq
        gnmt     penalty(n) = ((5 + n) / 6)^a     Wu et al. 2016

    with a = `length_penalty`; |y| counts the generated tokens with the stop. Each step extends
    every text by every token and keeps the `width` likeliest; a text that stops while it ranks
    among them is set aside, and a further text takes its place. After `tokens` ids (or a full
    context, of the longest prompt) the texts that have not stopped are scored as they are.

    log P only falls, so a live text can at best reach its present sum over the largest penalty
    that is still to come. When a search ends is a choice:

        certain    when no live text can pass the worst of the `n_best`: nothing is cut off
        likely     when none passes the worst of `width` ended ones at its present length
        full       when `width` texts have ended

    (in transformers `early_stopping` "never", False and True). One beam is greedy search, which
    ends at its first stop. Fewer than `n_best` come back where the model allows no more.

    With `groups`, as many searches of width / groups go on side by side, and a token that g
    texts of the groups before it take at the same step ranks `diversity` * g lower (Vijayakumar
    et al. 2018). As in the paper, and not in transformers, the score stays log P. The `n_best`
    of the first group come first, which are those of a beam of its width.
    """

    width: int = 5
    length_penalty: float = 1.0  # a; 0: log P as it is
    form: str = "power"  # FORMS
    until: str = "certain"  # UNTIL
    n_best: int = 1  # of each group
    groups: int = 1
    diversity: float = 0.5

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"a beam of width={self.width} follows no text; 1 or more does")
        if self.groups < 1 or self.width % self.groups:
            raise ConfigError(f"groups={self.groups} must divide the beam's width={self.width}")
        if not 1 <= self.n_best <= self.each:
            raise ConfigError(
                f"n_best={self.n_best} must lie between 1 and the {self.each} beams of a group"
            )
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"length_penalty={self.length_penalty} must be a finite number")
        if not 0 <= self.diversity < math.inf:
            raise ConfigError(f"diversity={self.diversity} must be 0 (none) or larger")
        for name, known in (("form", tuple(FORMS)), ("until", UNTIL)):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(f"value of {name}", getattr(self, name), known))

    @property
    def each(self) -> int:
        """The beams of one group."""
        return self.width // self.groups

    def penalty(self, length: int) -> float:
        """What log P of a text of this length is divided by."""
        return FORMS[self.form](length, self.length_penalty)

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
        """The best texts of each prompt with their scores, group by group."""
        limit = longest_answer(model, prompts, tokens, source)
        if not prompts:
            return []
        logits, state = prefill(model, prompts, max(map(len, prompts)) + limit - 1, source)
        if self.width > logits.shape[1]:
            raise ConfigError(
                f"a beam of width={self.width} is wider than the vocabulary of {logits.shape[1]}"
            )
        device, each, groups = logits.device, self.each, self.groups
        stops = torch.tensor(sorted(stop), dtype=torch.long, device=device)
        left = torch.arange(len(prompts), device=device)  # prompts that are still searched
        spread = left.repeat_interleave(groups)  # below, a row is a group of a prompt
        logits, state = logits[spread], state.select(spread)
        live = _Texts.empty(len(spread), 1, limit, 0.0, device)
        kept = _Texts.empty(len(spread), each, limit, -torch.inf, device)
        done = torch.zeros(len(spread), dtype=torch.bool, device=device)
        found: list[list[Hypothesis]] = [[] for _ in prompts]

        for number in range(1, limit + 1):
            beams = live.scores.shape[1]  # one at first, then `each` or as many as there can be
            parents, chosen, sums = self._extensions(logits, live.scores, stops)
            stopped = torch.isin(chosen, stops)
            best = live.pick(parents[:, :each], sums[:, :each] / self.penalty(number))
            ended = best.without(~stopped[:, :each] | done[:, None])
            kept = kept.joined(ended).best(each)
            if number == limit:
                cut = best.longer(chosen[:, :each]).without(stopped[:, :each] | done[:, None])
                kept = kept.joined(cut).best(each)
                break
            going = stopped.long().argsort(dim=1, stable=True)[:, :each]  # stops come last
            parents, chosen = parents.gather(1, going), chosen.gather(1, going)
            sums = sums.masked_fill(stopped, -torch.inf).gather(1, going)
            live = live.pick(parents, sums).longer(chosen)
            done |= self._done(sums.amax(1), kept.scores, number, limit)
            over = done.view(-1, groups).all(1)
            rows = torch.arange(len(done), device=device)
            if 2 * int(over.sum()) >= len(left):  # fewer to carry on is worth one more copy
                gone = over.repeat_interleave(groups)
                self._collect(found, left[over], kept.rows(gone))
                left, rows = left[~over], rows[~gone]
                live, kept, done, parents = (
                    live.rows(rows),
                    kept.rows(rows),
                    done[rows],
                    parents[rows],
                )
            if not len(left):
                return found
            state = state.select((rows[:, None] * beams + parents).flatten())
            scored, state = model.step(live.ids[..., number - 1].flatten().unsqueeze(1), state)
            logits = scored[:, -1]
        self._collect(found, left, kept)
        return found

    def _extensions(
        self,
        logits: Float[Tensor, "texts vocab"],
        sums: Float[Tensor, "rows beams"],
        stops: Int[Tensor, " any"],
    ) -> tuple[Int[Tensor, "rows some"], Int[Tensor, "rows some"], Float[Tensor, "rows some"]]:
        """The likeliest one-token extensions: of which text, by which token, with what log P.

        As many that every beam may stop, with every stop, and `each` still go on; a single
        beam has no other to turn to.
        """
        some = 1 if self.each == 1 else (1 + len(stops)) * self.each
        before = sums.unflatten(0, (-1, self.groups))  # (prompts, groups, beams)
        by_group = logits.float().view(*before.shape, -1)
        taken = by_group.new_zeros(len(before), logits.shape[1])  # by the groups so far
        found = []
        for number, own in enumerate(by_group.unbind(1)):
            ranked = own - self.diversity * taken.unsqueeze(1) if number else own
            parents, chosen, total = _best(own, ranked, before[:, number], some)
            found.append((parents, chosen, total))
            if len(found) < self.groups:
                real = (total > -torch.inf) & ~torch.isin(chosen, stops)
                taken.scatter_add_(1, chosen, (real & (real.cumsum(1) <= self.each)).float())
        parts = zip(*found, strict=True)
        parents, chosen, total = (torch.stack(part, 1).flatten(0, 1) for part in parts)
        return parents, chosen, total

    def _done(
        self,
        best: Float[Tensor, " rows"],
        kept: Float[Tensor, "rows texts"],
        number: int,
        limit: int,
    ) -> Bool[Tensor, " rows"]:
        if self.until == "full":
            return (kept[:, -1] > -torch.inf) | (best == -torch.inf)
        if self.until == "likely":
            return best / self.penalty(number) <= kept[:, -1]
        reach = limit if self.length_penalty >= 0 else number + 1
        return best / self.penalty(reach) <= kept[:, self.n_best - 1]

    def _collect(
        self, found: list[list[Hypothesis]], prompts: Int[Tensor, " some"], kept: "_Texts"
    ) -> None:
        texts = kept.best(self.n_best).hypotheses()
        for number, prompt in enumerate(prompts.tolist()):
            own = texts[number * self.groups : (number + 1) * self.groups]
            found[prompt] = [text for group in own for text in group]
            if not found[prompt]:
                raise RegardError(f"row {prompt}: the model gives no text a probability above 0")


@dataclass(frozen=True, slots=True)
class _Texts:
    """Some texts of each row; a score of -inf means that there is none."""

    ids: Int[Tensor, "rows texts room"]
    lengths: Int[Tensor, "rows texts"]
    scores: Float[Tensor, "rows texts"]

    @classmethod
    def empty(
        cls, rows: int, texts: int, room: int, score: float, device: torch.device
    ) -> "_Texts":
        return cls(
            torch.zeros(rows, texts, room, dtype=torch.long, device=device),
            torch.zeros(rows, texts, dtype=torch.long, device=device),
            torch.full((rows, texts), score, device=device),
        )

    def rows(self, chosen: Tensor) -> "_Texts":
        return _Texts(self.ids[chosen], self.lengths[chosen], self.scores[chosen])

    def pick(self, which: Tensor, scores: Tensor) -> "_Texts":
        index = which.unsqueeze(-1).expand(-1, -1, self.ids.shape[-1])
        return _Texts(self.ids.gather(1, index), self.lengths.gather(1, which), scores)

    def longer(self, chosen: Tensor) -> "_Texts":
        ids = self.ids.scatter(-1, self.lengths.unsqueeze(-1), chosen.unsqueeze(-1))
        return _Texts(ids, self.lengths + 1, self.scores)

    def without(self, removed: Tensor) -> "_Texts":
        return replace(self, scores=self.scores.masked_fill(removed, -torch.inf))

    def best(self, count: int) -> "_Texts":
        scores, which = self.scores.topk(count)
        return self.pick(which, scores)

    def joined(self, other: "_Texts") -> "_Texts":
        return _Texts(
            torch.cat([self.ids, other.ids], 1),
            torch.cat([self.lengths, other.lengths], 1),
            torch.cat([self.scores, other.scores], 1),
        )

    def hypotheses(self) -> list[list[Hypothesis]]:
        rows = zip(self.ids.tolist(), self.lengths.tolist(), self.scores.tolist(), strict=True)
        return [
            [
                Hypothesis(text[:length], score)
                for text, length, score in zip(*row, strict=True)
                if score > -torch.inf
            ]
            for row in rows
        ]


def _best(
    logits: Float[Tensor, "rows beams vocab"],
    ranked: Float[Tensor, "rows beams vocab"],
    sums: Float[Tensor, "rows beams"],
    some: int,
) -> tuple[Int[Tensor, "rows some"], Int[Tensor, "rows some"], Float[Tensor, "rows some"]]:
    """The best extensions by `ranked`, and their log P by `logits`.

    Each text's best are taken first, so that nothing of the size of the whole vocabulary is
    written.
    """
    best, ids = ranked.topk(min(some, ranked.shape[-1]))  # (rows, beams, some)
    normal, sums = logits.logsumexp(-1, keepdim=True), sums.unsqueeze(-1)
    merit = (sums + (best - normal)).flatten(1)  # (rows, beams * some)
    total = (sums + (logits.gather(-1, ids) - normal)).flatten(1)
    which = merit.topk(min(some, merit.shape[1])).indices
    return which // ids.shape[-1], ids.flatten(1).gather(1, which), total.gather(1, which)
