"""Choices that do not go together, each with the reason and the way out."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from regard.config import Choice, kind_of
from regard.errors import ConfigError
from regard.nn.head import HEADS
from regard.nn.position import POSITIONS, Position
from regard.nn.score import RELATIVE

Rule = tuple[Callable[[Any], bool], str]  # whether a config breaks it, and what to tell then


def option(choice: Choice, table: Mapping[str, Callable[..., Any]], name: str) -> Any:
    """An option of a choice, or else its default; None where there is no such option.

    >>> option({"kind": "learned", "offset": 2}, POSITIONS, "offset")
    2
    >>> option("learned", POSITIONS, "offset")
    0
    """
    kind, options = kind_of(choice)
    taken = inspect.signature(table[kind]).parameters.get(name)
    return options.get(name, None if taken is None else taken.default)


def spelled_out(choice: Choice, table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """A choice with all its options, those that were not given too.

    >>> spelled_out("learned", POSITIONS)
    {'kind': 'learned', 'offset': 0, 'each_layer': False}
    """
    kind, options = kind_of(choice)
    taken = inspect.signature(table[kind]).parameters.values()
    defaults = {each.name: each.default for each in taken if each.default is not each.empty}
    return {"kind": kind, **defaults, **options}


def refuse(config: Any, rules: tuple[Rule, ...]) -> None:
    """Raise the reason of the first rule that `config` breaks."""
    for broken, reason in rules:
        if broken(config):
            raise ConfigError(reason.format(c=config))


def _turns(position: Choice) -> bool:
    part = POSITIONS[kind_of(position)[0]]
    return getattr(part, "turn", Position.turn) is not Position.turn


def _reads_first(head: Choice) -> bool:
    return (
        kind_of(head)[0] == "pooled"
        or option(head, HEADS, "pool") == "first"
        or bool(option(head, HEADS, "next_sentence"))
    )


STACK: tuple[Rule, ...] = (
    (
        lambda c: c.global_every is not None and c.window is None,
        "global_every={c.global_every} needs a window: without one every layer is global",
    ),
    (
        lambda c: c.global_every == 1,
        "global_every=1 leaves no layer for window={c.window}; leave out both, or set 2 or more",
    ),
    (
        lambda c: c.stream_scale is not None and c.order != "deepnorm",
        "stream_scale={c.stream_scale} belongs to order='deepnorm', not {c.order!r}; leave it out",
    ),
    (
        lambda c: kind_of(c.score)[0] in RELATIVE and _turns(c.position),
        "score={c.score!r} compares queries with distances, position={c.position!r} turns them "
        "first, so that the result would depend on more than the distance;\n"
        "set position='none', or score='scaled_dot'",
    ),
    (
        lambda c: kind_of(c.init)[0] == "zero_out" and c.order in ("none", "deepnorm"),
        "init='zero_out' does not go with order={c.order!r}: without a residual stream nothing "
        "would be left, and deepnorm begins in its own way;\nset order='pre', or init='normal'",
    ),
)

TRANSFORMER: tuple[Rule, ...] = (
    (
        lambda c: c.segments and c.shape != "encoder",
        "segments={c.segments} belong to an encoder, not to shape={c.shape!r}; leave them out",
    ),
    (
        lambda c: (
            c.shape != "encoder-decoder"
            and (c.source_vocab_size is not None or c.encoder_layers is not None)
        ),
        "source_vocab_size and encoder_layers belong to an encoder-decoder, not to "
        "shape={c.shape!r}; vocab_size and layers are enough",
    ),
    (
        lambda c: c.order.startswith("parallel") and c.shape == "encoder-decoder",
        "order={c.order!r} has no place for cross-attention; "
        "shape='encoder-decoder' needs pre, post, sandwich, deepnorm or none",
    ),
    (
        lambda c: c.factored != "tables" and c.embed_dim is None,
        "factored={c.factored!r} says what embed_dim narrows; give an embed_dim, or leave it out",
    ),
    (
        lambda c: c.shape != "encoder" and _reads_first(c.head),
        "head={c.head!r} reads the first vector, which in shape={c.shape!r} has seen nothing but "
        "its own token;\nset shape='encoder', or pool='last' of head 'classify'",
    ),
)
