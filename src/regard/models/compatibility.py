"""Rules for settings that cannot be combined, each with the reason and what to set instead."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from regard.config import Choice, kind_of
from regard.errors import ConfigError, unknown
from regard.nn.head import HEADS, LMHead
from regard.nn.mixture_density import MixtureDensityHead
from regard.nn.position import POSITIONS, Position
from regard.nn.score import RELATIVE_SCORES, SCORES_WITH_MATRIX

CompatibilityRule = tuple[Callable[[Any], bool], str]  # whether a config breaks it, and the message


def option(choice: Choice, kinds: Mapping[str, Callable[..., Any]], name: str) -> Any:
    """The value of an option of a choice, or its default; None if there is no such option.

    >>> option({"kind": "learned", "offset": 2}, POSITIONS, "offset")
    2
    >>> option("learned", POSITIONS, "offset")
    0
    """
    kind, options = kind_of(choice)
    parameter = inspect.signature(kinds[kind]).parameters.get(name)
    return options.get(name, None if parameter is None else parameter.default)


def with_defaults(choice: Choice, kinds: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """A choice with all its options, defaults included.

    >>> with_defaults("learned", POSITIONS)
    {'kind': 'learned', 'offset': 0, 'each_layer': False, 'after_projection': False}
    """
    kind, options = kind_of(choice)
    parameters = inspect.signature(kinds[kind]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {"kind": kind, **defaults, **options}


def is_tied(config: Any) -> bool:
    """Whether the output matrix of a model is its embedding matrix (weight tying)."""
    over_vocabulary = kind_of(getattr(config, "head", "linear"))[0] in ("linear", "masked")
    tied: bool = getattr(config, "shares_embedding", getattr(config, "tied", False))
    return over_vocabulary and tied


def check_rules(config: Any, rules: tuple[CompatibilityRule, ...]) -> None:
    """Raise `ConfigError` with the message of the first rule that `config` breaks."""
    for breaks, reason in rules:
        if breaks(config):
            raise ConfigError(reason.format(c=config))


def check_sizes(config: Any, *names: str) -> None:
    """Raise `ConfigError` if one of these fields is less than 1; None is allowed."""
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            raise ConfigError(f"{name}={size} must be at least 1")


def check_dropout(config: Any, *names: str) -> None:
    """Raise `ConfigError` unless the dropout, or each of these dropouts, lies in [0, 1)."""
    for name in names or ("dropout",):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must lie in [0, 1)")


VECTOR_HEADS = ("forecast", "mixture")  # of models that read vectors
# heads that need hidden states only
COMMON_HEADS = {
    name: HEADS[name] for name in ("linear", "classification", "tag", "crf", "span", *VECTOR_HEADS)
}


def check_input_dim(config: Any) -> None:
    """Raise `ConfigError` unless a model that reads vectors has a head that predicts vectors."""
    if config.input_dim < 0:
        raise ConfigError(f"input_dim={config.input_dim} must be at least 0; 0: the inputs are ids")
    kind, _ = kind_of(config.head)
    if config.input_dim and kind not in VECTOR_HEADS:
        raise ConfigError(
            f"head={kind!r} predicts tokens or classes, but a model with "
            f"input_dim={config.input_dim} reads vectors; set head to "
            f"{' or '.join(map(repr, VECTOR_HEADS))}"
        )
    if config.input_dim and getattr(config, "char_dim", 0):
        raise ConfigError(
            f"char_dim={config.char_dim} needs words, but input_dim={config.input_dim} makes the "
            "model read vectors; set one of them to 0"
        )


def require_common_head(head: Choice) -> None:
    """Raise `ConfigError` for a head that only a Transformer supports."""
    kind, _ = kind_of(head)
    if kind not in COMMON_HEADS:
        raise ConfigError(unknown("head", kind, COMMON_HEADS))


def require_generating_head(head: Any, choice: Choice) -> None:
    """Raise `ConfigError` unless the head predicts tokens or pen points, which can be sampled."""
    if not isinstance(head, LMHead | MixtureDensityHead):
        raise ConfigError(
            f"head={choice!r} cannot generate: it does not predict the next token; "
            "use a model with head='linear'"
        )


def _rotates(position: Choice) -> bool:
    """Whether a position encoding rotates queries and keys (RoPE)."""
    cls = POSITIONS[kind_of(position)[0]]
    return getattr(cls, "rotation", Position.rotation) is not Position.rotation


def reads_first_position(head: Choice) -> bool:
    """Whether a head reads the first position only."""
    return (
        kind_of(head)[0] == "pooled"
        or option(head, HEADS, "pool") == "first"
        or bool(option(head, HEADS, "next_sentence"))
    )


STACK_RULES: tuple[CompatibilityRule, ...] = (
    (
        lambda c: c.global_every is not None and c.window is None,
        "global_every={c.global_every} needs a window: without one every layer is global;\n"
        "set window, or leave out global_every",
    ),
    (
        lambda c: c.global_layers is not None and (c.window is None or c.global_every is not None),
        "global_layers={c.global_layers} needs a window and cannot be combined with global_every;\n"
        "set window and leave out global_every, or leave out global_layers",
    ),
    (
        lambda c: (
            c.global_layers is not None
            and not 0 < len({*c.global_layers} & {*range(max(c.depths))}) == len(c.global_layers)
        ),
        "global_layers={c.global_layers} must be distinct indices of layers, from 0",
    ),
    (
        lambda c: c.global_every == 1,
        "global_every=1 makes every layer global, so window={c.window} has no effect;\n"
        "remove both, or set global_every to 2 or more",
    ),
    (
        lambda c: c.residual_scale is not None and c.norm_placement != "deepnorm",
        "residual_scale={c.residual_scale} belongs to norm_placement='deepnorm', not "
        "{c.norm_placement!r}; leave it out",
    ),
    (
        lambda c: c.norm == "batch" and c.depths[1] > 0,
        "norm='batch' normalizes by the mean over all positions, so that in training a decoder "
        "would see the tokens that it predicts;\nset norm='layer', or architecture='encoder'",
    ),
    (
        lambda c: c.ffn is None and c.norm_placement.startswith("parallel"),
        "norm_placement={c.norm_placement!r} computes attention and a feed-forward network in "
        "parallel, but ffn=none has no such network; choose another norm_placement",
    ),
    (
        lambda c: (
            c.ffn is None
            and bool(c.ffn_dim or c.ffn_dropout or getattr(c, "encoder_ffn_dim", None))
        ),
        "ffn=none has no feed-forward network; leave out ffn_dim, encoder_ffn_dim and ffn_dropout",
    ),
    (
        lambda c: kind_of(c.score)[0] in RELATIVE_SCORES and _rotates(c.position),
        "score={c.score!r} compares queries with distances, but position={c.position!r} rotates "
        "them first: scores would depend on absolute positions;\n"
        "set position='none', or score='scaled_dot'",
    ),
    (
        lambda c: kind_of(c.score)[0] in SCORES_WITH_MATRIX and _rotates(c.position),
        "score={c.score!r} has a matrix between query and key, but position={c.position!r} "
        "rotates both first: scores would depend on absolute positions;\n"
        "choose a position without rotation, or score='scaled_dot'",
    ),
    (
        lambda c: kind_of(c.score)[0] == "location",
        "score='location' does not depend on the keys, so the key projections would get no "
        "gradient;\nit is for recurrent decoders (model.family=seq2seq); choose another score",
    ),
    (
        lambda c: (
            kind_of(c.init)[0] == "zero_init_residual"
            and c.norm_placement in ("no_residual", "deepnorm")
        ),
        "init='zero_init_residual' cannot be combined with norm_placement={c.norm_placement!r}: "
        "without a residual connection the output would be 0, and deepnorm has its own "
        "initialization;\n"
        "set norm_placement='pre', or init='normal'",
    ),
)

TRANSFORMER_RULES: tuple[CompatibilityRule, ...] = (
    (
        lambda c: (
            c.input_dim and (c.segments or c.embed_dim or c.architecture == "encoder-decoder")
        ),
        "input_dim={c.input_dim} replaces the embedding of an encoder or a decoder by a "
        "projection of vectors;\n"
        "leave out segments and embed_dim, and set architecture='encoder' or 'decoder'",
    ),
    (
        lambda c: c.char_dim and (c.architecture != "encoder" or c.embed_dim),
        "char_dim={c.char_dim} needs architecture='encoder' without embed_dim; leave out char_dim",
    ),
    (
        lambda c: c.prefix and c.architecture != "decoder",
        "prefix=true is for a decoder, whose prompt is read bidirectionally, not for "
        "architecture={c.architecture!r}; leave it out",
    ),
    (
        lambda c: c.segments and c.architecture != "encoder",
        "segments={c.segments} belong to an encoder, not to architecture={c.architecture!r}; "
        "leave them out",
    ),
    (
        lambda c: (
            c.architecture != "encoder-decoder"
            and (c.source_vocab_size is not None or c.encoder_layers is not None)
        ),
        "source_vocab_size and encoder_layers belong to an encoder-decoder, not to "
        "architecture={c.architecture!r}; vocab_size and layers are enough",
    ),
    (
        lambda c: (
            c.encoder_heads is not None
            and (c.kv_heads is not None or (c.head_dim is None and c.dim % c.encoder_heads))
        ),
        "encoder_heads={c.encoder_heads} must divide dim={c.dim}, and cannot be combined with "
        "kv_heads={c.kv_heads}; choose other encoder_heads, or leave out kv_heads",
    ),
    (
        lambda c: (
            c.architecture != "encoder-decoder"
            and (c.encoder_heads is not None or c.encoder_ffn_dim is not None)
        ),
        "encoder_heads and encoder_ffn_dim belong to an encoder-decoder, not to "
        "architecture={c.architecture!r}; heads and ffn_dim are enough",
    ),
    (
        lambda c: c.norm_placement.startswith("parallel") and c.architecture == "encoder-decoder",
        "norm_placement={c.norm_placement!r} has no cross-attention; "
        "architecture='encoder-decoder' needs pre, post, sandwich, deepnorm or no_residual",
    ),
    (
        lambda c: not c.factorize_positions and c.embed_dim is None,
        "factorize_positions=false needs embed_dim, the width of the factorized embedding; "
        "set embed_dim, or leave out factorize_positions",
    ),
    (
        lambda c: c.architecture != "encoder" and reads_first_position(c.head),
        "head={c.head!r} reads the first position, which in a causal model "
        "(architecture={c.architecture!r}) depends on the first token only;\n"
        "set architecture='encoder', or pool='last' of head 'classification'",
    ),
)

SEQ2SEQ_RULES: tuple[CompatibilityRule, ...] = (
    (
        lambda c: c.heads is not None and c.score is not None and kind_of(c.score)[0] == "location",
        "score='location' does not depend on the keys, so the key projections of "
        "heads={c.heads} would get no gradient;\nleave out heads, or choose another score",
    ),
    (
        lambda c: c.score is None and not c.bridge,
        "with bridge=false and no attention the decoder does not see the source; "
        "set bridge=true, or choose a score",
    ),
    (
        lambda c: c.bridge and c.depths[0] != c.depths[1],
        "bridge=true initializes each decoder layer from one encoder layer, but "
        "layers={c.layers} and encoder_layers={c.encoder_layers};\n"
        "leave out encoder_layers, or set bridge=false",
    ),
    (
        lambda c: c.score is not None and kind_of(c.score)[0] in RELATIVE_SCORES,
        "score={c.score!r} compares positions within one sequence, but a decoder attends to "
        "another; choose additive, cosine, dot, general, location or scaled_dot",
    ),
    (
        lambda c: c.attention_placement == "between" and c.score is not None and c.layers < 2,
        "attention_placement='between' attends between two layers of the decoder, but "
        "layers={c.layers}; set layers=2 or more, or attention_placement='luong'",
    ),
    (
        lambda c: c.input_feeding and (c.score is None or c.attention_placement != "luong"),
        "input_feeding=true feeds the attentional vector of attention_placement='luong' to the "
        "next step;\nchoose a score and attention_placement='luong', or leave out input_feeding",
    ),
    (
        lambda c: (
            c.score is None and (c.heads is not None or c.hops != 1 or c.hard_attention is not None)
        ),
        "heads, hops and hard_attention configure attention, but no score is set; choose a "
        "score, such as score='additive', or leave them out",
    ),
)
