"""A model as a drawing: the stream runs down on the left, branches leave it and come back.

├──▶┌───────────┐        what a branch is made of, in the order things happen
│   │ LayerNorm │
│   ├───────────┤
│   │ attention │
⊕◀──└───────────┘        added to the stream
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from regard.config import kind_of

WIDTH, NARROW, GAP = 60, 36, 5  # of one column; of two beside each other; between them
STREAM = 3  # where the stream runs
PLAIN = str.maketrans("│─┌┐└┘├┤┬┴┼╭╮╰╯▶◀▼⊕◇×→", "|-+++++++++++++><v+ox>")
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "rms_plus_one": "RMSNorm, scaled by 1 + g"}
FFNS = {"relu": "ReLU", "relu2": "squared ReLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)"}
FFNS |= {"silu": "SiLU", "reglu": "ReGLU", "swiglu": "SwiGLU", "geglu": "GeGLU"}
FFNS |= {"geglu_tanh": "GeGLU (tanh)"}
CELLS = {"elman": "Elman cell", "gated": "gated cell", "gru": "GRU", "lstm": "LSTM"}
HEADS = {
    "masked": "words that were masked",
    "classify": "the class of the whole",
    "tag": "a class for each token",
    "span": "where an answer starts and ends",
    "pooled": "one vector for the whole",
    "none": "hidden states",
}
ADDED = ("learned", "sinusoidal")  # positions that are added to embeddings

Part = str  # one thing that happens; its first words are its name
Lines = list[str]


def draw(family: str, config: Any, *, plain: bool = False) -> Lines:
    """The lines of a drawing, at most 80 wide; `plain` for a terminal that has only ASCII."""
    lines = DRAWINGS[family](config)
    return [line.translate(PLAIN).rstrip() if plain else line.rstrip() for line in lines]


# The families


def _transformer(config: Any) -> Lines:
    if config.shape != "encoder-decoder":
        return _column(config, config.shape, WIDTH)
    left, right = (_column(config, side, NARROW) for side in ("encoder", "decoder"))
    return _beside(left, right)


def _vision(config: Any) -> Lines:
    size, patch = config.image_size, config.patch
    before = [f"patches of {patch} × {patch} × {config.channels} → {config.dim:,}"]
    before += ["a vector for the whole in front"] if config.cls else []
    before += _added_position(config)
    return [
        *_begin(f"image of {size} × {size}"),
        *_through(before, WIDTH),
        *_layers(config, "encoder", WIDTH),
        *_through([*_final_norm(config), _head(config)], WIDTH),
        *_end(_result(config)),
    ]


def _recurrent(config: Any) -> Lines:
    kind, options = kind_of(config.cell)
    told = {key: "off" if value is False else value for key, value in options.items()}
    cell = f"{CELLS.get(kind, kind)}{_told(told)}"
    ways = "two, one from the end; their states go" if config.bidirectional else "its state goes"
    part = f"{cell} {config.dim:,} → {config.dim:,}, {ways} on in time"
    inside = _through([part], WIDTH - 2, STREAM - 1)
    return [
        *_begin("ids"),
        *_through([f"embedding {config.vocab_size:,} × {config.dim:,}"], WIDTH),
        *_repeated(inside, config.layers, WIDTH),
        *_through([_head(config)], WIDTH),
        *_end(_result(config)),
    ]


def _seq2seq(config: Any) -> Lines:
    kind, options = kind_of(config.cell)
    cell = f"{CELLS.get(kind, kind)}{_told(options)} {config.dim:,}"
    reads, writes = config.depths
    direction = ", from the end" if config.reversed_source else ""
    direction = ", bidirectional" if config.bidirectional else direction
    begins = "begins where the encoder ended" if config.bridge else "begins at zeros"
    parts = [
        f"source ids: embedding {config.source_vocab_size or config.vocab_size:,} × {config.dim:,}",
        f"encoder: {reads} × {cell}{direction}",
        f"target ids: embedding {config.vocab_size:,} × {config.dim:,}",
        f"decoder: {writes} × {cell}, {begins}",
    ]
    if config.score is not None:
        score, told = kind_of(config.score)
        heads = "" if config.heads is None else f", {config.heads} heads"
        hops = "" if config.hops == 1 else f", {config.hops} hops"
        hard = "" if config.hard is None else f", hard ({config.hard})"
        fed = ", fed to the next step" if config.input_feeding else ""
        looks = f"{score}{_told(told)}{heads}{hops}{hard}"
        parts.append(f"attention to the encoder: {looks}; {config.placement}{fed}")
    return [
        *_begin("source and target ids"),
        *_through([*parts, _head(config)], WIDTH),
        *_end("logits of the next token"),
    ]


def _feedforward(config: Any) -> Lines:
    seen, hidden = config.order - 1, config.hidden_dim
    width = seen * config.dim
    direct = f" and {width:,}" if config.direct else ""
    parts = [
        f"embedding {config.vocab_size:,} × {config.dim:,}",
        f"the last {seen} side by side, {width:,} wide",
        f"tanh layer {width:,} → {hidden:,}" + (", and past it" if config.direct else ""),
        f"head: {hidden:,}{direct} → {config.vocab_size:,}, a matrix of its own",
    ]
    return [*_begin("ids"), *_through(parts, WIDTH), *_end("logits of the next token")]


def _convolution(config: Any) -> Lines:
    dilated = f"dilated 1 to {2 ** (config.layers - 1):,}"
    part = f"gated convolution: of {config.width} vectors, {dilated}; also to the read-out"
    inside = _leave(_stacked([part], WIDTH - 2 - STREAM - 4), WIDTH - 2)
    read = f"sum of all branches, ReLU, {config.dim:,} → {config.dim:,}, ReLU"
    return [
        *_begin("ids"),
        *_through([f"embedding {config.vocab_size:,} × {config.dim:,}"], WIDTH),
        *_repeated(inside, config.layers, WIDTH),
        *_through([read, _head(config)], WIDTH),
        *_end(_result(config)),
    ]


def _bag(config: Any) -> Lines:
    parts = [f"how often each of {config.vocab_size:,} words occurs", "head: a weight for each"]
    return [*_begin("ids"), *_through(parts, WIDTH), *_end(HEADS["classify"])]


def _cbow(config: Any) -> Lines:
    near, all = config.window, f"{config.vocab_size:,}"
    parts = [
        f"embedding {all} × {config.dim:,}",
        f"mean of the {near} before and the {near} behind each",
        f"head: {config.dim:,} → {all}, a matrix of its own",
    ]
    if config.negatives:
        parts[-1] += f"; while learning, 1 and {config.negatives} at random"
    return [*_begin("ids"), *_through(parts, WIDTH), *_end("logits of the word in the middle")]


def _ngram(config: Any) -> Lines:
    seen = f"after the last {config.order - 1}, and after fewer" if config.order > 1 else "at all"
    return [
        *_begin("ids"),
        *_through([f"how often each id was seen {seen}"], WIDTH),
        *_end("probabilities of the next token"),
    ]


def _hmm(config: Any) -> Lines:
    states = f"which of {config.states:,} hidden states wrote each id, and which is next"
    return [
        *_begin("ids"),
        *_through([states, "what that state writes"], WIDTH),
        *_end("probabilities of the next token"),
    ]


def _autoregression(config: Any) -> Lines:
    return [
        *_begin("numbers"),
        *_through([f"a weight for each of the last {config.order}, and a bias"], WIDTH),
        *_end("the next number"),
    ]


DRAWINGS: dict[str, Callable[[Any], Lines]] = {
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
}


def _column(config: Any, side: str, width: int) -> Lines:
    """One stack with what stands before and after it."""
    both = config.shape == "encoder-decoder"
    ids = ("source ids" if side == "encoder" else "target ids") if both else "ids"
    reads = both and side == "encoder"
    after = [*_final_norm(config), *([] if reads else [_head(config)])]
    return [
        *_begin(ids),
        *_through(_embedding(config, reads), width),
        *_layers(config, side, width),
        *(_through(after, width) if after else []),
        *_end("memory" if reads else _result(config)),
    ]


# What happens, in words


def _embedding(config: Any, reads: bool) -> list[Part]:
    vocab = config.source_vocab_size if reads and config.source_vocab_size else config.vocab_size
    table = config.embed_dim or config.dim
    parts = [f"embedding {vocab:,} × {table:,}"]
    if config.embed_scaled:
        parts[0] += f", times sqrt({config.dim if config.factored == 'tokens' else table:,})"
    if config.segments:
        parts.append(f"+ {config.segments} kinds of sentences")
    widened = [f"widened to {config.dim:,}"] if config.embed_dim else []
    added = _added_position(config) + ([_norm(config)] if config.embed_norm else [])
    return [*parts, *(added + widened if config.factored == "tables" else widened + added)]


def _added_position(config: Any) -> list[Part]:
    kind, options = kind_of(config.position)
    if kind not in ADDED or options.get("each_layer"):
        return []
    rows = f"{config.context:,} " if kind == "learned" else ""
    return [f"+ {rows}{kind} positions"]


def _norm(config: Any) -> Part:
    return NORMS.get(config.norm, str(config.norm))


def _final_norm(config: Any) -> list[Part]:
    return [] if config.norm_order in ("post", "deepnorm") else [_norm(config)]


def _attention(config: Any, side: str, *, cross: bool = False) -> Part:
    name = "cross-attention" if cross else "attention"
    width = config.head_dim or config.dim // config.heads
    facts = [f"{config.heads} heads of {width}"]
    if config.kv_heads not in (None, config.heads):
        facts.append(f"{config.kv_heads} of keys and values")
    if not cross:
        facts.append("causal" if side == "decoder" else "both ways")
        facts += _sight(config)
        kind, options = kind_of(config.position)
        if kind not in ("none", *ADDED) or options.get("each_layer"):
            facts.append(f"{kind} positions{_told(options)}")
    kind, options = kind_of(config.score)
    if kind != "scaled_dot" or options:
        facts.append(f"score {kind}{_told(options)}")
    facts += ["queries and keys normed"] if config.qk_norm else []
    return f"{name}: {', '.join(facts)}"


def _sight(config: Any) -> list[str]:
    if config.window is None:
        return []
    others = f" (every {_ordinal(config.global_every)} layer: all)" if config.global_every else ""
    return [f"window of {config.window:,}{others}"]


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _told(options: Any) -> str:
    """Options in brackets, numbers as one reads them."""
    said = [
        key if value is True else f"{key} {_said(value)}"
        for key, value in options.items()
        if value not in (None, False)
    ]
    return f" ({', '.join(said)})" if said else ""


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    return str(value)


def _ffn(config: Any) -> Part:
    wide = f"{config.dim:,} → {config.width:,} → {config.dim:,}"
    return f"feed-forward: {wide}, {FFNS.get(config.ffn, config.ffn)}"


def _head(config: Any) -> Part:
    kind, options = kind_of(getattr(config, "head", "linear"))
    if kind not in ("linear", "masked"):
        classes = f", {options['classes']:,} of them" if "classes" in options else ""
        return f"head: {HEADS.get(kind, kind)}{classes}"
    tied = "the embedding's matrix" if getattr(config, "tied", False) else "a matrix of its own"
    width = getattr(config, "embed_dim", None) or config.dim
    bent = {key: value for key, value in options.items() if key != "next_sentence"}
    return f"head: {width:,} → {config.vocab_size:,}, {tied}{_told(bent)}"


def _result(config: Any) -> str:
    kind, _ = kind_of(config.head)
    if kind == "linear":
        encoder = getattr(config, "shape", "decoder") == "encoder"
        return "logits" if encoder else "logits of the next token"
    return HEADS.get(kind, kind) if kind in ("masked", "pooled", "none") else "logits"


# Lines and boxes


def _layers(config: Any, side: str, width: int) -> Lines:
    """The repeated part: branches that leave the stream and come back."""
    encoder, decoder = config.depths
    count = encoder if side == "encoder" else decoder
    inner = width - 2
    inside: Lines = []
    if config.norm_order in ("parallel", "parallel_norms"):
        inside += _parallel(config, side, inner)
    else:
        branches = [_attention(config, side)]
        if side == "decoder" and encoder:
            branches.append(_attention(config, side, cross=True))
        for part in [*branches, _ffn(config)]:
            inside += _branch(config, part, inner)
    shared = ", one set of weights" if config.shared_layers else ""
    return _repeated(inside, count, width, shared)


def _branch(config: Any, part: Part, width: int) -> Lines:
    norm, norm_order = _norm(config), config.norm_order
    if norm_order == "none":
        return _through([norm, part], width, STREAM - 1)
    boxed = {"pre": [norm, part], "sandwich": [norm, part, norm]}.get(norm_order, [part])
    lines = _leave(_stacked(boxed, width - STREAM - 4), width)
    if norm_order in ("post", "deepnorm"):
        weighed = "" if norm_order == "post" else " of the weighed stream and what came back"
        lines.append(_pad(f"{' ' * (STREAM - 1)}◇ {norm}{weighed}", width))
    return lines


def _parallel(config: Any, side: str, width: int) -> Lines:
    """Attention and feed-forward beside each other."""
    room = width - STREAM - 4
    left, right = room // 2, room - room // 2 + 1
    norm, norms = [_norm(config)], config.norm_order == "parallel_norms"
    columns = [
        _stacked([*(norm if norms else []), part], size)
        for part, size in ((_attention(config, side), left), (_ffn(config), right))
    ]
    height = max(map(len, columns))
    for column in columns:  # the shorter one is filled up above its last line
        column[-1:] = [f"│{' ' * (len(column[0]) - 2)}│"] * (height - len(column)) + column[-1:]
    joint = {"┐": "┬", "┘": "┴", "┤": "┼", "│": "│"}
    rows = [a[:-1] + joint.get(a[-1], a[-1]) + b[1:] for a, b in zip(*columns, strict=True)]
    if not norms:
        top = _stacked(norm, room)
        rows = [*top[:-1], f"├{rows[0][1:-1]}┤", *rows[1:]]
    return _leave(rows, width)


def _stacked(parts: Sequence[Part], width: int) -> Lines:
    """A box for each part, one under the other."""
    rule = "─" * (width - 2)
    lines = [f"┌{rule}┐"]
    for number, part in enumerate(parts):
        lines += [f"├{rule}┤"] if number else []
        name, colon, facts = part.partition(": ")
        said = [name, *textwrap.wrap(facts, width - 4)] if colon else textwrap.wrap(part, width - 4)
        lines += [f"│ {_pad(line, width - 4)} │" for line in said]
    return [*lines, f"└{rule}┘"]


def _leave(box: Lines, width: int) -> Lines:
    """A branch: a box to the right of the stream, with the way there and back."""
    margin = " " * (STREAM - 1)
    first, *middle, last = box
    lines = [f"{margin}├──▶{first}", *(f"{margin}│   {line}" for line in middle)]
    return [_pad(line, width) for line in [*lines, f"{margin}⊕◀──{last}"]]


def _through(parts: Sequence[Part], width: int, at: int = STREAM) -> Lines:
    """Boxes that the stream itself passes, at this column."""
    first, *middle, last = _stacked(parts, width)
    return [f"{first[:at]}┴{first[at + 1 :]}", *middle, f"{last[:at]}┬{last[at + 1 :]}"]


def _repeated(inside: Lines, count: int, width: int, note: str = "") -> Lines:
    """A frame around what happens several times."""
    title = f" {count} ×{note} "
    rule = "─" * (width - 2)
    top = f"╭{rule[: -len(title) - 1]}{title}─╮"
    framed = [f"│{_pad(line, width - 2)}│" for line in inside]
    return [
        f"{top[:STREAM]}┼{top[STREAM + 1 :]}",
        *framed,
        f"╰{rule[: STREAM - 1]}┼{rule[STREAM:]}╯",
    ]


def _begin(name: str) -> Lines:
    return [f"{' ' * STREAM}{name}", f"{' ' * STREAM}│"]


def _end(name: str) -> Lines:
    return [f"{' ' * STREAM}▼", f"{' ' * STREAM}{name}"]


def _pad(line: str, width: int) -> str:
    return line + " " * (width - len(line))


def _beside(encoder: Lines, decoder: Lines) -> Lines:
    """Two columns, and the way of the memory from the end of one to the other's branch."""
    target = next(n for n, line in enumerate(decoder) if "cross-attention" in line)
    start = len(encoder) - 1
    height = max(len(encoder), len(decoder))
    lines = []
    for number in range(height):
        left = _pad(encoder[number] if number < len(encoder) else "", NARROW)
        right = decoder[number] if number < len(decoder) else ""
        if number == target and right[STREAM] == "│":  # under frame and stream, into the box
            right = f"│{'─' * (STREAM - 1)}│──▶{right[STREAM + 4 :]}"
        lines.append(left + _way(number, start, target) + right)
    name = encoder[start].rstrip()
    rule = "─" * (NARROW - len(name) - 1)
    lines[start] = f"{name} {rule}{lines[start][NARROW:]}"
    return lines


def _way(row: int, start: int, target: int) -> str:
    """What stands between the columns in a row."""
    first, last = sorted((start, target))
    if row == start:
        return "──┘  " if start > target else "──┐  "
    if row == target:
        return "  ┌──" if start > target else "  └──"
    return "  │  " if first < row < last else " " * GAP
