"""How `regard generate --trace` shows what every sampler did."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain as joined
from typing import Any, TextIO

from regard.cli.output import aligned, bold, dim, harmless, width
from regard.generate.sampler_trace import ProbabilityChange, StageEffect, TokenTrace, TracedChain
from regard.text import Tokenizer

NAMED = 3  # tokens that a line names


def as_text(
    chain: TracedChain, pieces: Iterable[str], tokenizer: Tokenizer, out: TextIO
) -> Iterator[str]:
    """The chain, then for every token as it comes: how likely it was, and what each stage did.

    1  ' the'   model 12.1 %   drawn 19.3 %
       the model said                10,000 tokens            9.20 bits
       temperature=0.8               10,000 tokens            8.93 bits   ' the' 12.1 → 19.3
       top_p=0.95                       812 tokens   95.0 %   7.70 bits   - 9,188: ' ox' 0.01
    """
    yield str(chain)
    told = 0
    for _ in joined(pieces, [""]):  # at the end, what was drawn but is no piece of text
        for number, (token,) in enumerate(chain.tokens[told:], told + 1):
            yield ""
            yield from _token(number, token, tokenizer, out)
        told = len(chain.tokens)


def as_table(chain: TracedChain, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same for programs; tokens have their pieces beside their ids."""

    def with_pieces(value: Any) -> Any:
        if isinstance(value, list):
            return [with_pieces(each) for each in value]
        if not isinstance(value, dict):
            return value
        table = {key: with_pieces(each) for key, each in value.items()}
        return {"piece": _piece(table["id"], tokenizer)} | table if "id" in table else table

    return {"tokens": [with_pieces(asdict(token)) for (token,) in chain.tokens]}


def _token(number: int, token: TokenTrace, tokenizer: Tokenizer, out: TextIO) -> Iterator[str]:
    margin = " " * (len(str(number)) + 2)
    name = bold(_quoted(token.id, tokenizer), out)
    model_prob, final_prob = _percent(token.model_prob), _percent(token.final_prob)
    yield f"{number}  {name}   model {model_prob} %   drawn {final_prob} %"
    rows: list[tuple[str, ...]] = [("the model said", "", "", f"{token.bits:.2f} bits", "")]
    rows += [_row(step, tokenizer) for step in token.stages]
    room = width() - len(margin) if out.isatty() else None
    for line in aligned(rows, right=[1, 2, 3]):
        yield margin + dim(line[:room], out)


def _row(step: StageEffect, tokenizer: Tokenizer) -> tuple[str, ...]:
    left = f"{step.remaining:,} left"
    mass = f"{_percent(step.mass)} %" if step.removed else ""
    return step.stage, left, mass, f"{step.bits:.2f} bits", _what(step, tokenizer)


def _what(step: StageEffect, tokenizer: Tokenizer) -> str:
    if step.removed:
        lost = [
            f"{_quoted(c.id, tokenizer)} {_percent(c.before)}" for c in step.top_removed[:NAMED]
        ]
        return f"- {step.removed:,}: " + ", ".join(lost) if lost else f"- {step.removed:,}"
    moved = [c for c in step.top_changed[:NAMED] if _percent(c.before) != _percent(c.after)]
    return ", ".join(_moved(change, tokenizer) for change in moved) or "nothing"


def _moved(change: ProbabilityChange, tokenizer: Tokenizer) -> str:
    numbers = f"{_percent(change.before)} → {_percent(change.after)}"
    return f"{_quoted(change.id, tokenizer)} {numbers}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share >= 0.001 else f"{100 * share:.3f}"


def _quoted(id: int, tokenizer: Tokenizer) -> str:
    return repr(harmless(_piece(id, tokenizer)))


def _piece(id: int, tokenizer: Tokenizer) -> str:
    """What an id looks like; a model may have more of them than its tokenizer."""
    return tokenizer.piece(id) if id < tokenizer.size else f"<{id}>"
