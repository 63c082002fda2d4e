"""Choices that do not go together, each with the reason and the way out."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from regard.config import Choice, kind_of
from regard.errors import ConfigError, unknown
from regard.nn.head import HEADS, Head
from regard.nn.position import POSITIONS, Position
from regard.nn.score import MIXING, RELATIVE

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


def with_defaults(choice: Choice, table: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """A choice with all its options, those that were not given too.

    >>> with_defaults("learned", POSITIONS)
    {'kind': 'learned', 'offset': 0, 'each_layer': False}
    """
    kind, options = kind_of(choice)
    taken = inspect.signature(table[kind]).parameters.values()
    defaults = {each.name: each.default for each in taken if each.default is not each.empty}
    return {"kind": kind, **defaults, **options}


def check_rules(config: Any, rules: tuple[Rule, ...]) -> None:
    """Raise the reason of the first rule that `config` breaks."""
    for broken, reason in rules:
        if broken(config):
            raise ConfigError(reason.format(c=config))


READOUTS = ("linear", "classify", "tag")  # heads that need nothing but hidden states


def require_readout_head(head: Choice) -> None:
    """Refuse a head that only a Transformer has the parts for."""
    kind, _ = kind_of(head)
    if kind not in READOUTS:
        raise ConfigError(unknown("head", kind, READOUTS))


def require_generating_head(head: Any, choice: Choice) -> None:
    """Refuse to generate with a head that does not read tokens off."""
    if not isinstance(head, Head):
        raise ConfigError(f"head={choice!r} reads, it does not write tokens")


def _turns(position: Choice) -> bool:
    part = POSITIONS[kind_of(position)[0]]
    return getattr(part, "rotation", Position.rotation) is not Position.rotation


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
        lambda c: c.stream_scale is not None and c.norm_order != "deepnorm",
        "stream_scale={c.stream_scale} belongs to norm_order='deepnorm', not {c.norm_order!r}; "
        "leave it out",
    ),
    (
        lambda c: kind_of(c.score)[0] in RELATIVE and _turns(c.position),
        "score={c.score!r} compares queries with distances, position={c.position!r} turns them "
        "first, so that the result would depend on more than the distance;\n"
        "set position='none', or score='scaled_dot'",
    ),
    (
        lambda c: kind_of(c.score)[0] in MIXING and _turns(c.position),
        "score={c.score!r} has a matrix between query and key, position={c.position!r} turns both "
        "first, so that the result would depend on more than the distance;\n"
        "choose a position that turns nothing, or score='scaled_dot'",
    ),
    (
        lambda c: kind_of(c.score)[0] == "location",
        "score='location' looks at places, whatever is there, so the matrices of keys would learn "
        "nothing;\nit is for recurrent decoders (model.family=seq2seq); here take another score",
    ),
    (
        lambda c: kind_of(c.init)[0] == "zero_out" and c.norm_order in ("none", "deepnorm"),
        "init='zero_out' does not go with norm_order={c.norm_order!r}: without a residual stream "
        "nothing would be left, and deepnorm begins in its own way;\n"
        "set norm_order='pre', or init='normal'",
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
        lambda c: c.norm_order.startswith("parallel") and c.shape == "encoder-decoder",
        "norm_order={c.norm_order!r} has no place for cross-attention; "
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

SEQ2SEQ: tuple[Rule, ...] = (
    (
        lambda c: c.heads is not None and c.score is not None and kind_of(c.score)[0] == "location",
        "score='location' looks at places, whatever is there, so the matrices of keys that "
        "heads={c.heads} have would learn nothing;\nleave out heads, or take another attention",
    ),
    (
        lambda c: c.score is None and not c.bridge,
        "bridge=false without attention leaves nothing of the source to write from; "
        "set bridge=true, or choose an attention",
    ),
    (
        lambda c: c.bridge and c.depths[0] != c.depths[1],
        "bridge=true hands each layer of the decoder the state of one of the encoder, and there "
        "are {c.layers} and {c.encoder_layers};\nleave out encoder_layers, or set bridge=false",
    ),
    (
        lambda c: c.score is not None and kind_of(c.score)[0] in RELATIVE,
        "score={c.score!r} compares positions of one sequence, and a decoder looks at "
        "another; choose additive, content, dot, general, location or scaled_dot",
    ),
    (
        lambda c: c.placement == "between" and c.score is not None and c.layers < 2,
        "placement='between' looks between two layers of the decoder, and layers={c.layers}; "
        "set layers=2 or more, or placement='luong'",
    ),
    (
        lambda c: c.input_feeding and (c.score is None or c.placement != "luong"),
        "input_feeding=true feeds the attentional vector of placement='luong' to the next step;\n"
        "choose a score and placement='luong', or leave out input_feeding",
    ),
    (
        lambda c: c.score is None and (c.heads is not None or c.hops != 1 or c.hard is not None),
        "heads, hops and hard say how to look, and there is no attention; choose one, as in "
        "score='additive', or leave them out",
    ),
)
