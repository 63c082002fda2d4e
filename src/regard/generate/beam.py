"""Beam search: follow the few likeliest texts at once instead of drawing one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError, RegardError
from regard.generate.decode import check_prompts, prefill
from regard.models.base import Language
from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One text the search ended with."""

    ids: list[int]  # without prompt and stop
    score: float


@dataclass(frozen=True, slots=True)
class _Texts:
    """Some texts of each row, best first; a score of -inf means that there is none."""

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

    def best(self, count: int) -> "_Texts":
        scores, which = self.scores.topk(count)
        index = which.unsqueeze(-1).expand(-1, -1, self.ids.shape[-1])
        return _Texts(self.ids.gather(1, index), self.lengths.gather(1, which), scores)

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


@torch.inference_mode()
def beam(
    model: Language,
    source: Source | None = None,
    *,
    prompts: Sequence[Sequence[int]],
    width: int,
    tokens: int,
    stop: int,
    length_penalty: float = 1.0,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    r"""Search for the likeliest continuations of each prompt, `width` at a time.

        score(y) = sum_t log P(y_t | y_<t, source) / |y|^length_penalty

    |y| counts the generated tokens with the stop. Each step extends every text by every token
    and keeps the `width` likeliest; a text that stops while it ranks among them is set aside,
    and a further text takes its place. After `tokens` ids (or a full context, of the longest
    prompt) the texts that have not stopped are scored as they are.

    log P only falls, so a live text can at best reach its present sum over the largest |y|
    (the smallest, for a negative penalty). A row is done when no live text can pass the worst
    of the `n_best` set aside: nothing better is ever cut off. One beam is greedy search, which
    ends at its first stop. Fewer than `n_best` come back where the model allows no more.
    """
    check_prompts(prompts, tokens, source)
    if not 1 <= n_best <= width:
        raise ConfigError(f"n_best={n_best} must lie between 1 and width={width}")
    if not prompts:
        return []
    longest = max(map(len, prompts))
    if model.context is not None and longest > model.context:
        raise ConfigError(
            f"a prompt of {longest} ids does not fit the model's context of {model.context}"
        )
    limit = tokens if model.context is None else min(tokens, model.context - longest + 1)

    logits, state = prefill(model, prompts, longest + limit - 1, source)
    left = torch.arange(len(prompts), device=logits.device)  # rows that are still searched
    live = _Texts.empty(len(left), 1, limit, 0.0, logits.device)
    kept = _Texts.empty(len(left), n_best, limit, -torch.inf, logits.device)
    found: list[list[Hypothesis]] = [[] for _ in prompts]

    for number in range(1, limit + 1):
        beams = live.scores.shape[1]  # one at first, then `width` or as many as there can be
        parents, chosen, sums = _extensions(logits, live.scores, width)
        stopped = chosen == stop
        ended = _Texts(
            live.ids.gather(1, parents[:, :width, None].expand(-1, -1, limit)),
            torch.full_like(parents[:, :width], number - 1),
            (sums / number**length_penalty).masked_fill(~stopped, -torch.inf)[:, :width],
        )
        kept = kept.joined(ended).best(n_best)
        sums, which = sums.masked_fill(stopped, -torch.inf).topk(min(width, sums.shape[1]))
        parents, chosen = parents.gather(1, which), chosen.gather(1, which)
        ids = live.ids.gather(1, parents[..., None].expand(-1, -1, limit))
        ids[..., number - 1] = chosen
        live = _Texts(ids, torch.full_like(parents, number), sums)
        if number == limit:
            unfinished = replace(live, scores=sums / number**length_penalty)
            kept = kept.joined(unfinished).best(n_best)
            break
        reach = limit if length_penalty >= 0 else number + 1
        done = sums[:, 0] / reach**length_penalty <= kept.scores[:, -1]
        rows = torch.arange(len(left), device=left.device)
        if 2 * int(done.sum()) >= len(left):  # fewer to carry on is worth one more copy
            _collect(found, left[done], kept.rows(done))
            rows = rows[~done]
            left, kept, live, parents = left[rows], kept.rows(rows), live.rows(rows), parents[rows]
        if not len(left):
            return found
        state = state.select((rows[:, None] * beams + parents).flatten())
        scored, state = model.step(live.ids[..., number - 1].flatten().unsqueeze(1), state)
        logits = scored[:, -1]
    _collect(found, left, kept)
    return found


def _extensions(
    logits: Float[Tensor, "texts vocab"], sums: Float[Tensor, "rows beams"], width: int
) -> tuple[Int[Tensor, "rows some"], Int[Tensor, "rows some"], Float[Tensor, "rows some"]]:
    """The likeliest one-token extensions: of which text, by which token, with what log P.

    Twice `width` of them, since each text may stop and `width` must go on; a single beam has
    no other to turn to. Each text's best are taken first, so that nothing of the size of the
    whole vocabulary is written.
    """
    some = 1 if width == 1 else 2 * width
    logits = logits.float()
    best, ids = logits.topk(min(some, logits.shape[1]))  # (rows * beams, each)
    log_p = best - logits.logsumexp(-1, keepdim=True)
    rows, each = len(sums), ids.shape[1]
    total = (sums.flatten().unsqueeze(1) + log_p).view(rows, -1)  # (rows, beams * each)
    total, which = total.topk(min(some, total.shape[1]))
    return which // each, ids.view(rows, -1).gather(1, which), total


def _collect(found: list[list[Hypothesis]], rows: Int[Tensor, " some"], kept: _Texts) -> None:
    for row, hypotheses in zip(rows.tolist(), kept.hypotheses(), strict=True):
        if not hypotheses:
            raise RegardError(f"row {row}: the model gives no text a probability above 0")
        found[row] = hypotheses
