"""A diagram of a model: the residual stream runs down on the left, with its branches.

├──▶┌───────────┐        the modules of a branch, in order
│   │ LayerNorm │
│   ├───────────┤
│   │ attention │
⊕◀──└───────────┘        added to the residual stream
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

from regard.config import kind_of
from regard.explain.render.diagram_lines import (
    NARROW,
    STREAM,
    WIDTH,
    Part,
    TextLines,
    in_stream,
    input_line,
    output_line,
    pad,
    repeat_frame,
    residual_branch,
    side_by_side,
    stacked_boxes,
)
from regard.explain.render.token_text import ordinal

ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼╭╮╰╯▶◀▼⊕◇×→", "|-+++++++++++++><v+ox>")
NORM_NAMES = {
    "layer": "LayerNorm",
    "layer_std": "LayerNorm, divided by std + eps",
    "batch": "BatchNorm",
}
NORM_NAMES |= {"rms": "RMSNorm", "rms_plus_one": "RMSNorm, scaled by 1 + g"}
FFN_NAMES = {"relu": "ReLU", "relu2": "squared ReLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)"}
FFN_NAMES |= {"silu": "SiLU", "reglu": "ReGLU", "swiglu": "SwiGLU", "geglu": "GeGLU"}
FFN_NAMES |= {"geglu_tanh": "GeGLU (tanh)"}
CELL_NAMES = {
    "elman": "Elman cell",
    "update_gate": "cell with an update gate",
    "gru": "GRU",
    "lstm": "LSTM",
    "mut1": "MUT1 cell",
    "mut2": "MUT2 cell",
    "mut3": "MUT3 cell",
}
HEAD_NAMES = {
    "masked": "logits of the masked tokens",
    "classification": "class of the sequence",
    "tag": "class of each token",
    "crf": "conditional random field over the tags",
    "span": "start and end of an answer",
    "pooled": "pooled vector of the sequence",
    "forecast": "next values",
    "mixture": "distribution of the next point",
    "none": "hidden states",
}
ADDED_POSITIONS = ("learned", "sinusoidal")  # position encodings added to the embedding


def diagram(family: str, config: Any, *, ascii: bool = False) -> TextLines:
    """The lines of a model's diagram, at most 80 columns wide, in Unicode or ASCII."""
    lines = DIAGRAMS[family](config)
    return [line.translate(ASCII).rstrip() if ascii else line.rstrip() for line in lines]


def _transformer(config: Any) -> TextLines:
    if config.architecture != "encoder-decoder":
        return _column(config, config.architecture, WIDTH)
    left, right = (_column(config, side, NARROW) for side in ("encoder", "decoder"))
    return side_by_side(left, right)


def _vision(config: Any) -> TextLines:
    (height, width), patch = config.image_sides, config.patch_sides
    embedding = [f"patches of {patch[0]} × {patch[1]} × {config.channels} → {config.dim:,}"]
    embedding += ["prepended class token"] if config.cls else []
    embedding += _added_position(config)
    return [
        *input_line(f"image of {height} × {width}"),
        *in_stream(embedding, WIDTH),
        *_layers(config, "encoder", WIDTH),
        *in_stream([*_final_norm(config), _head(config)], WIDTH),
        *output_line(_output_name(config)),
    ]


def _recurrent(config: Any) -> TextLines:
    kind, options = kind_of(config.cell)
    cell_options = {key: "off" if value is False else value for key, value in options.items()}
    cell = f"{CELL_NAMES.get(kind, kind)}{_format_options(cell_options)}"
    direction = ", bidirectional" if config.bidirectional else ""
    input_width = f"{config.input_width:,}"

    def layer(width: int) -> TextLines:
        part = f"{cell} {width:,} → {config.dim:,}{direction}, recurrent in time"
        return in_stream([part], WIDTH - 2, STREAM - 1)

    upper_width = (1 + config.bidirectional) * config.dim
    widths = [config.input_width] + [upper_width] * (config.layers - 1)
    layers = [
        line
        for width, equal in groupby(widths)
        for line in repeat_frame(layer(width), len(list(equal)), WIDTH)
    ]
    embedding = [f"one-hot vectors, {input_width} wide" if config.one_hot else _lookup(config)]
    if config.char_dim:
        embedding.append(f"and convolution over characters: {config.char_dim:,}")
    skip = (
        [f"concatenation with the input: {config.dim:,} + {input_width}"]
        if config.input_skip
        else []
    )
    return [
        *input_line(_input_name(config)),
        *in_stream(embedding, WIDTH),
        *layers,
        *in_stream([*skip, _head(config)], WIDTH),
        *output_line(_output_name(config)),
    ]


def _soft_window(config: Any) -> TextLines:
    cell = CELL_NAMES.get(kind_of(config.cell)[0], kind_of(config.cell)[0])
    dim, width = config.dim, config.vocab_size
    window = f"soft window over the text: {config.components} Gaussian components, monotonic"
    upper_layer = f"{cell} {2 * dim + width:,} → {dim:,}, recurrent in time"
    return [
        *input_line(_input_name(config)),
        *in_stream([_lookup(config)], WIDTH),
        *in_stream([f"{cell} {dim + width:,} → {dim:,}, recurrent in time", window], WIDTH),
        *repeat_frame(in_stream([upper_layer], WIDTH - 2, STREAM - 1), config.layers - 1, WIDTH),
        *in_stream([_head(config)], WIDTH),
        *output_line(_output_name(config)),
    ]


def _seq2seq(config: Any) -> TextLines:
    kind, options = kind_of(config.cell)
    cell = f"{CELL_NAMES.get(kind, kind)}{_format_options(options)} {config.dim:,}"
    encoder_layers, decoder_layers = config.depths
    direction = ", reversed source" if config.reversed_source else ""
    direction = ", bidirectional" if config.bidirectional else direction
    initial = "initial state from the encoder" if config.bridge else "initial state zero"
    parts = [
        f"source ids: embedding {config.source_vocab_size or config.vocab_size:,} × {config.dim:,}",
        f"encoder: {encoder_layers} × {cell}{direction}",
        f"target ids: embedding {config.vocab_size:,} × {config.dim:,}",
        f"decoder: {decoder_layers} × {cell}, {initial}",
    ]
    if config.score is not None:
        score, options = kind_of(config.score)
        heads = "" if config.heads is None else f", {config.heads} heads"
        hops = "" if config.hops == 1 else f", {config.hops} hops"
        hard = "" if config.hard_attention is None else f", hard ({config.hard_attention})"
        feeding = ", input feeding" if config.input_feeding else ""
        details = f"{score}{_format_options(options)}{heads}{hops}{hard}"
        parts.append(f"attention to the encoder: {details}; {config.attention_placement}{feeding}")
    return [
        *input_line("source and target ids"),
        *in_stream([*parts, _head(config)], WIDTH),
        *output_line("logits of the next token"),
    ]


def _feedforward(config: Any) -> TextLines:
    context, hidden = config.order - 1, config.hidden_dim
    width = context * config.dim
    direct = f" and {width:,}" if config.direct_connections else ""
    parts = [
        f"embedding {config.vocab_size:,} × {config.dim:,}",
        f"concatenation of the last {context} embeddings: {width:,}",
        f"tanh layer {width:,} → {hidden:,}"
        + (", and direct connections to the output" if config.direct_connections else ""),
        f"head: {hidden:,}{direct} → {config.vocab_size:,}, untied",
    ]
    return [*input_line("ids"), *in_stream(parts, WIDTH), *output_line("logits of the next token")]


def _convolution(config: Any) -> TextLines:
    dilated = f"dilated 1 to {2 ** (config.layers - 1):,}"
    part = (
        f"gated convolution: kernel {config.kernel_size}, {dilated}; skip connection to the output"
    )
    inside = residual_branch(stacked_boxes([part], WIDTH - 2 - STREAM - 4), WIDTH - 2)
    output = f"sum of skip connections, ReLU, {config.dim:,} → {config.dim:,}, ReLU"
    return [
        *input_line(_input_name(config)),
        *in_stream([_lookup(config)], WIDTH),
        *repeat_frame(inside, config.layers, WIDTH),
        *in_stream([output, _head(config)], WIDTH),
        *output_line(_output_name(config)),
    ]


def _bag(config: Any) -> TextLines:
    parts = [f"counts of {config.vocab_size:,} words", "head: linear"]
    return [
        *input_line("ids"),
        *in_stream(parts, WIDTH),
        *output_line(HEAD_NAMES["classification"]),
    ]


def _cbow(config: Any) -> TextLines:
    window, vocab = config.window, f"{config.vocab_size:,}"
    parts = [
        f"embedding {vocab} × {config.dim:,}",
        f"mean of {window} before and {window} after each position",
        f"head: {config.dim:,} → {vocab}, untied",
    ]
    if config.negatives:
        parts[-1] += f"; in training, negative sampling with {config.negatives}"
    return [*input_line("ids"), *in_stream(parts, WIDTH), *output_line("logits of the centre word")]


def _ngram(config: Any) -> TextLines:
    context = f" after up to {config.order - 1} ids" if config.order > 1 else ""
    return [
        *input_line("ids"),
        *in_stream([f"n-gram counts of each id{context}"], WIDTH),
        *output_line("probabilities of the next token"),
    ]


def _hmm(config: Any) -> TextLines:
    states = f"transitions between {config.states:,} hidden states"
    return [
        *input_line("ids"),
        *in_stream([states, "emission probabilities of the state"], WIDTH),
        *output_line("probabilities of the next token"),
    ]


def _autoregression(config: Any) -> TextLines:
    return [
        *input_line("values"),
        *in_stream([f"linear in the last {config.order} values, with bias"], WIDTH),
        *output_line("the next value"),
    ]


def _linear(config: Any) -> TextLines:
    sizes = f"{config.context:,} → {config.horizon:,}"
    part = f"linear layer {sizes}, on differences from the last value"
    return [*input_line("values"), *in_stream([part], WIDTH), *output_line("the next values")]


def _recurrent_captioner(config: Any) -> TextLines:
    kind, options = kind_of(config.cell)
    cell = f"{CELL_NAMES.get(kind, kind)}{_format_options(options)} {config.dim:,}"
    score, score_options = kind_of(config.score)
    hard = "" if config.hard_attention is None else f", hard ({config.hard_attention})"
    details = f"{score}{_format_options(score_options)}{hard}; {config.attention_placement}"
    parts = [
        *_image_embedding(config),
        *([f"{config.encoder_layers} × convolution 3 × 3"] if config.encoder_layers else []),
        f"target ids: embedding {config.vocab_size:,} × {config.dim:,}",
        f"decoder: {config.layers} × {cell}, initial state from the mean of the regions",
        f"attention to the regions: {details}",
        _head(config),
    ]
    return [
        *input_line(f"image of {config.image_size} × {config.image_size}, and target ids"),
        *in_stream(parts, WIDTH),
        *output_line("logits of the next token"),
    ]


def _image_embedding(config: Any) -> list[Part]:
    """The embedding of the regions of an image."""
    projection = "convolutions 3 × 3, stride 2" if config.features == "convolution" else "linear"
    grid = (
        f"{config.grid} × {config.grid} regions of {config.patch_size} × {config.patch_size} pixels"
    )
    return [f"{grid}: {projection} → {config.dim:,}"]


DIAGRAMS: dict[str, Callable[[Any], TextLines]] = {
    "captioner": _transformer,
    "soft_window": _soft_window,
    "recurrent_captioner": _recurrent_captioner,
    "transformer": _transformer,
    "vision": _vision,
    "recurrent": _recurrent,
    "seq2seq": _seq2seq,
    "feedforward": _feedforward,
    "convolution": _convolution,
    "bag": _bag,
    "cbow": _cbow,
    "ngram": _ngram,
    "hmm": _hmm,
    "autoregression": _autoregression,
    "linear": _linear,
}


def _column(config: Any, side: str, width: int) -> TextLines:
    """One stack with its embedding and head."""
    is_encoder_decoder = config.architecture == "encoder-decoder"
    name = _input_name(config)
    if is_encoder_decoder:
        name = "source ids" if side == "encoder" else "target ids"
    if side == "encoder" and getattr(config, "input_kind", "text") == "images":
        name = f"image of {config.image_size} × {config.image_size}"
    is_source = is_encoder_decoder and side == "encoder"
    output_parts = [*_final_norm(config), *([] if is_source else [_head(config)])]
    return [
        *input_line(name),
        *in_stream(_embedding(config, is_source), width),
        *_layers(config, side, width),
        *(in_stream(output_parts, width) if output_parts else []),
        *output_line("memory" if is_source else _output_name(config)),
    ]


def _input_name(config: Any) -> str:
    return f"vectors of {config.input_dim:,}" if config.input_dim else "ids"


def _lookup(config: Any) -> Part:
    """The embedding of ids, or the projection of vectors."""
    if config.input_dim:
        return f"projection {config.input_dim:,} → {config.dim:,}"
    return f"embedding {config.vocab_size:,} × {config.dim:,}"


def _embedding(config: Any, is_source: bool) -> list[Part]:
    vocab = (config.source_vocab_size if is_source else None) or config.vocab_size
    table = config.embed_dim or config.dim
    if is_source and getattr(config, "input_kind", "text") == "images":
        return [*_image_embedding(config), *_added_position(config)]
    parts = [_lookup(config)] if config.input_dim else [f"embedding {vocab:,} × {table:,}"]
    if config.embed_scaled:
        parts[0] += f", times sqrt({table if config.factorize_positions else config.dim:,})"
    if config.segments:
        parts.append(f"+ {config.segments} segment embedding{'s'[: config.segments > 1]}")
    if config.char_dim:
        parts.append(f"+ convolution over characters: {config.char_dim:,} → {config.dim:,}")
    projection = [f"projection to {config.dim:,}"] if config.embed_dim else []
    added = _added_position(config) + ([_norm(config)] if config.embed_norm else [])
    return [*parts, *(added + projection if config.factorize_positions else projection + added)]


def _added_position(config: Any) -> list[Part]:
    kind, options = kind_of(config.position)
    if kind not in ADDED_POSITIONS or options.get("each_layer"):
        return []
    rows = f"{config.context:,} " if kind == "learned" else ""
    return [f"+ {rows}{kind} positions"]


def _norm(config: Any) -> Part:
    return NORM_NAMES.get(config.norm, str(config.norm))


def _final_norm(config: Any) -> list[Part]:
    return [] if config.norm_placement in ("post", "deepnorm") else [_norm(config)]


def _attention(config: Any, side: str, *, cross: bool = False) -> Part:
    name = "cross-attention" if cross else "attention"
    width = config.head_dim or config.dim // config.heads
    details = [f"{config.heads} heads of {width}"]
    if config.kv_heads not in (None, config.heads):
        details.append(f"{config.kv_heads} KV heads")
    if not cross:
        prefix = getattr(config, "prefix", False)
        masks = {"decoder": "bidirectional prefix, then causal" if prefix else "causal"}
        details.append(masks.get(side, "bidirectional"))
        details += _window(config)
        kind, options = kind_of(config.position)
        if kind not in ("none", *ADDED_POSITIONS) or options.get("each_layer"):
            details.append(f"{kind} positions{_format_options(options)}")
    kind, options = kind_of(config.score)
    if kind != "scaled_dot" or options:
        details.append(f"score {kind}{_format_options(options)}")
    details += ["QK norm"] if config.qk_norm else []
    return f"{name}: {', '.join(details)}"


def _window(config: Any) -> list[str]:
    if config.window is None:
        return []
    every = config.global_every
    others = f" (global in every {ordinal(every)} layer)" if every else ""
    if config.global_layers is not None:
        others = f" (global in {len(config.global_layers)} of {config.layers} layers)"
    return [f"sliding window of {config.window:,}{others}"]


def _format_options(options: Any) -> str:
    """Options in brackets."""
    parts = [
        key if value is True else f"{key} {_format(value)}"
        for key, value in options.items()
        if value not in (None, False)
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    return str(value)


def _ffn(config: Any) -> Part:
    sizes = f"{config.dim:,} → {config.resolved_ffn_dim:,} → {config.dim:,}"
    return f"feed-forward: {sizes}, {FFN_NAMES.get(config.ffn, config.ffn)}"


def _head(config: Any) -> Part:
    kind, options = kind_of(getattr(config, "head", "linear"))
    if kind not in ("linear", "masked"):
        classes = f", {options['classes']:,} classes" if "classes" in options else ""
        if kind == "forecast":
            horizon, outputs = options.get("horizon", 1), options.get("outputs", 1)
            return f"head: the next {horizon:,} values of {outputs:,} column{'s'[: outputs > 1]}"
        return f"head: {HEAD_NAMES.get(kind, kind)}{classes}"
    is_tied = getattr(config, "shares_embedding", getattr(config, "tied", False))
    tied = "tied to the embedding" if is_tied else "untied"
    width = getattr(config, "embed_dim", None) or getattr(config, "head_width", config.dim)
    head_options = {key: value for key, value in options.items() if key != "next_sentence"}
    return f"head: {width:,} → {config.vocab_size:,}, {tied}{_format_options(head_options)}"


def _output_name(config: Any) -> str:
    kind, _ = kind_of(config.head)
    if kind == "linear":
        encoder = getattr(config, "architecture", "decoder") == "encoder"
        return "logits" if encoder else "logits of the next token"
    return (
        HEAD_NAMES.get(kind, kind)
        if kind in ("masked", "pooled", "forecast", "mixture", "none")
        else "logits"
    )


def _layers(config: Any, side: str, width: int) -> TextLines:
    """The repeated layers, each with its residual branches."""
    encoder, decoder = config.depths
    count = encoder if side == "encoder" else decoder
    inner = width - 2
    inside: TextLines = []
    if config.norm_placement in ("parallel", "parallel_norms"):
        inside += _parallel(config, side, inner)
    else:
        branches = [_attention(config, side)]
        if side == "decoder" and encoder:
            branches.append(_attention(config, side, cross=True))
        for part in branches if config.ffn is None else [*branches, _ffn(config)]:
            inside += _branch(config, part, inner)
    shared = ", shared weights" if config.shared_layers else ""
    return repeat_frame(inside, count, width, shared)


def _branch(config: Any, part: Part, width: int) -> TextLines:
    norm, norm_placement = _norm(config), config.norm_placement
    if norm_placement == "no_residual":
        return in_stream([norm, part], width, STREAM - 1)
    boxed = {
        "pre": [norm, part],
        "sandwich": [norm, part, norm],
        "post": [part],
        "deepnorm": [part],
    }
    lines = residual_branch(stacked_boxes(boxed[norm_placement], width - STREAM - 4), width)
    if norm_placement in ("post", "deepnorm"):
        scaled = "" if norm_placement == "post" else " of the scaled stream plus the branch"
        lines.append(pad(f"{' ' * (STREAM - 1)}◇ {norm}{scaled}", width))
    return lines


def _parallel(config: Any, side: str, width: int) -> TextLines:
    """Attention and feed-forward side by side."""
    box_width = width - STREAM - 4
    left, right = box_width // 2, box_width - box_width // 2 + 1
    norm, norms = [_norm(config)], config.norm_placement == "parallel_norms"
    columns = [
        stacked_boxes([*(norm if norms else []), part], size)
        for part, size in ((_attention(config, side), left), (_ffn(config), right))
    ]
    height = max(map(len, columns))
    for column in columns:  # the shorter column is padded above its last line
        column[-1:] = [f"│{' ' * (len(column[0]) - 2)}│"] * (height - len(column)) + column[-1:]
    joint = {"┐": "┬", "┘": "┴", "┤": "┼", "│": "│"}
    rows = [a[:-1] + joint.get(a[-1], a[-1]) + b[1:] for a, b in zip(*columns, strict=True)]
    if not norms:
        top = stacked_boxes(norm, box_width)
        rows = [*top[:-1], f"├{rows[0][1:-1]}┤", *rows[1:]]
    return residual_branch(rows, width)
