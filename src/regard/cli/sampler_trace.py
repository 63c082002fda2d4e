"""The output of `regard generate --trace`: the effect of every sampler on the distribution."""

from collections.abc import Iterable, Iterator
from itertools import chain as concatenate
from typing import TYPE_CHECKING, Any, TextIO

from regard.cli.output import align_columns, bold, dim, strip_control, terminal_width

if TYPE_CHECKING:
    from regard.api import Tokenizer, TracedChain

MAX_TOKENS = 3  # named in a line


def as_text(
    chain: "TracedChain", chunks: Iterable[str], tokenizer: "Tokenizer", out: TextIO
) -> Iterator[str]:
    """The chain, then for every sampled token its probability and the effect of each sampler.

    1  ' the'   model 12.1 %   sampled 19.3 %
       model                                                 9.20 bits
       temperature=0.8               10,000 left             8.93 bits   ' the' 12.1 → 19.3
       top_p=0.95                       812 left   95.0 %    7.70 bits   - 9,188: ' ox' 0.010
    """
    yield str(chain)
    count = 0
    for _ in concatenate(chunks, [""]):  # the last [""]: tokens that completed no chunk of text
        for number, (token,) in enumerate(chain.tokens[count:], count + 1):
            yield ""
            yield from _token_lines(number, token, tokenizer, out)
        count = len(chain.tokens)


def as_table(chain: "TracedChain", tokenizer: "Tokenizer") -> dict[str, Any]:
    """The trace for --json; every token has its id and its piece."""
    return {"tokens": chain.table(lambda id: _piece(id, tokenizer))}


def _token_lines(number: int, token: Any, tokenizer: "Tokenizer", out: TextIO) -> Iterator[str]:
    margin = " " * (len(str(number)) + 2)
    name = bold(_quote(token.id, tokenizer), out)
    model, sampled = _percent(token.model_prob), _percent(token.final_prob)
    yield f"{number}  {name}   model {model} %   sampled {sampled} %"
    rows: list[tuple[str, ...]] = [("model", "", "", f"{token.entropy:.2f} bits", "")]
    rows += [_row(effect, tokenizer) for effect in token.samplers]
    width = terminal_width() - len(margin) if out.isatty() else None
    for line in align_columns(rows, right=[1, 2, 3]):
        yield margin + dim(line[:width], out)


def _row(effect: Any, tokenizer: "Tokenizer") -> tuple[str, ...]:
    count = f"{effect.remaining:,} left"
    mass = f"{_percent(effect.mass)} %" if effect.removed else ""
    return effect.sampler, count, mass, f"{effect.entropy:.2f} bits", _effect(effect, tokenizer)


def _effect(effect: Any, tokenizer: "Tokenizer") -> str:
    if effect.removed:
        removed = [
            f"{_quote(change.id, tokenizer)} {_percent(change.before)}"
            for change in effect.top_removed[:MAX_TOKENS]
        ]
        count = f"- {effect.removed:,}"
        return f"{count}: {', '.join(removed)}" if removed else count
    changes = [
        f"{_quote(change.id, tokenizer)} {_percent(change.before)} → {_percent(change.after)}"
        for change in effect.top_changed[:MAX_TOKENS]
        if _percent(change.before) != _percent(change.after)
    ]
    return ", ".join(changes) or "nothing"


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f}" if probability >= 0.001 else f"{100 * probability:.3f}"


def _quote(id: int, tokenizer: "Tokenizer") -> str:
    return repr(strip_control(_piece(id, tokenizer)))


def _piece(id: int, tokenizer: "Tokenizer") -> str:
    """The text of an id; a model may have more ids than its tokenizer."""
    return tokenizer.piece(id) if id < tokenizer.vocab_size else f"<{id}>"
