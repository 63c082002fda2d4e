"""Synchronous many to many: say the class of every word of a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.data.batch import TagBatch
from regard.nn.loss import IGNORED
from regard.tasks.base import Learns
from regard.tasks.label import Ids, Label, padded

Span = tuple[int, int, str]  # from the first word to before the last, and what they are


@dataclass(frozen=True, kw_only=True)
class Tag(Label):
    r"""P(tag_1 … tag_N | text): cross-entropy of the tag of each word, read off its last token.

    There a model that reads ahead has seen the whole word, and one that reads both ways anyway.
    """

    learns: ClassVar[Learns] = "tags"
    head: ClassVar[str] = "tag"

    def collate(self, examples: tuple[Ids, Ids, int], generator: torch.Generator) -> TagBatch:
        """Texts and the tags of their tokens, each filled up to a width."""
        texts, tags, width = examples
        lengths = torch.tensor([len(each) for each in texts])
        return TagBatch(padded(texts, width, 0), lengths, padded(tags, width, IGNORED))

    def logits(self, model: nn.Module, batch: Any) -> Float[Tensor, "batch time classes"]:
        """What the model says of each class, at every token."""
        said: Tensor = model.head(model(batch.ids, lengths=batch.lengths))  # type: ignore[operator]
        return said

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats, the share of right tags, and F1 of the spans that they mark.

        F1 = 2 right / (said + wanted); a span is right if its ends and its kind are.
        """
        loss, answers = self.judged(model, batches)
        right = said = wanted = same = words = 0
        for ours, theirs in answers:
            found, there = (spans([self.names[i] for i in each]) for each in (ours, theirs))
            said, wanted, right = said + len(found), wanted + len(there), right + len(found & there)
            same, words = same + int((ours == theirs).sum()), words + len(theirs)
        f1 = 2 * right / (said + wanted) if said + wanted else 0.0
        return {"loss": loss, "accuracy": same / words, "f1": f1}


def spans(tags: Sequence[str]) -> set[Span]:
    """The spans that tags mark: B-x begins one of kind x, I-x goes on with it, O is outside.

    An I-x that goes on with nothing begins one, as in CoNLL's own script; a tag of another form
    is a span of one word.

    >>> sorted(spans(["B-place", "I-place", "O", "I-person", "B-person"]))
    [(0, 2, 'place'), (3, 4, 'person'), (4, 5, 'person')]
    """
    found: set[Span] = set()
    begun: tuple[int, str] | None = None
    for at, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        goes_on = mark == "I" and begun is not None and begun[1] == kind
        if begun is not None and not goes_on:
            found.add((begun[0], at, begun[1]))
            begun = None
        if begun is None and tag != "O":
            begun = (at, kind if mark in ("B", "I") and kind else tag)
    return found
