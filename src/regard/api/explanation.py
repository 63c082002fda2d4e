"""Inspect a run: its attention, states, heads, attributions and gradients.

The functions choose, by the kind of the run, the function of `regard.explain` that computes it.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.config import make
from regard.errors import ConfigError
from regard.explain.attention import (
    NEEDS_ATTENTION,
    attention_maps,
    cross_attention_path,
    has_attention,
    image_attention,
    pair_attention,
    read_ids,
    recurrent_states,
    self_attention,
    text_stack,
)
from regard.explain.attribution import Attribution, attribute
from regard.explain.effects import head_effects, next_token_loss
from regard.explain.gradient import GradientFlow, last_token_gradients, require_gradients
from regard.explain.heads import HeadScores, find_heads
from regard.explain.lens import Lens, logit_lens
from regard.explain.token_map import AttentionMap, AttentionMaps, StateMaps
from regard.nn.state import Source
from regard.pipelines.captions import explain_caption
from regard.pipelines.images import image_task, input_pixels
from regard.pipelines.strokes import SOFT_WINDOW, stroke_task
from regard.pipelines.text_pairs import encode_pair
from regard.tasks import TASKS
from regard.text import PairTokenizers

if TYPE_CHECKING:
    from regard.api.run import Run


def last_attention(
    run: "Run", what: Any, *, layer: int | None, pattern: str | None, words: bool
) -> AttentionMaps:
    """Attention maps of one layer, by default the last; for pairs, its cross-attention."""
    require_attention(run)
    if run.config.model["family"] == SOFT_WINDOW:
        return explain_window(run, what)
    if "file" in run.inputs:
        return explain_caption(run, what, [layer])
    if isinstance(run.tokenizers, PairTokenizers):
        path = cross_attention_path(run.model, layer)
        return all_attention(run, what, pattern=pattern or path, words=words)
    last = len(text_stack(run.model)[1].layers) - 1
    layers = [last if layer is None else layer]
    return all_attention(run, what, layers=layers, pattern=pattern, words=words)


def all_attention(
    run: "Run",
    what: Any,
    *,
    target: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    pattern: str | None = None,
    words: bool = False,
) -> AttentionMaps:
    """All attention of the model while it reads a text or an image."""
    require_attention(run)
    if run.config.model["family"] == SOFT_WINDOW:
        return explain_window(run, what)
    if "file" in run.inputs:
        if (target, heads, rows, pattern, words) != (None, None, None, None, False):
            raise ConfigError("of a captioning run only `layers` can be chosen")
        return explain_caption(run, what, layers or cast(Any, run.model).attention_layers)
    if run.config.model["family"] == "vision":
        pixels = torch.from_numpy(input_pixels(run.model, what))
        image = image_task(run.config.task).normalize(pixels).to(run.device)
        return image_attention(
            run.model, image[0], pixels[0], layers=layers, heads=heads, rows=rows
        )
    if isinstance(run.tokenizers, PairTokenizers):
        source, ids = source_and_translation(run, what, target)
        paths = [f"*.{n}.*" for n in layers or ()] + [f"attention.{n}" for n in layers or ()]
        names = [name for name, _ in run.model.named_modules()]
        matching = [path for path in paths if any(fnmatchcase(name, path) for name in names)]
        return pair_attention(
            run.model,
            run.tokenizers,
            source,
            ids,
            pattern=pattern or (matching if layers and matching else paths or "*"),
            heads=heads,
            rows=rows,
            words=words,
        )
    ids, segments = _read(run, what)
    return self_attention(
        run.model,
        run.tokenizer,
        ids,
        segments=segments,
        layers=layers,
        pattern=pattern,
        heads=heads,
        rows=rows,
        words=words,
    )


def states(run: "Run", text: Any, pattern: str) -> StateMaps:
    """The gates and the hidden state of each recurrent layer; for pairs, of the encoder."""
    model = run.model
    if isinstance(run.tokenizers, PairTokenizers):
        source = _source(run, text)
        start = torch.tensor([run._pair_task().prompt], device=run.device)
        return recurrent_states(
            model,
            run.tokenizers.source,
            _reading_order(run, source),
            lambda: model(start, source=source),
            pattern="encoder.*" if pattern == "*" else pattern,
        )
    ids, _ = _read(run, text)
    batch = torch.tensor([ids], device=run.device)
    return recurrent_states(model, run.tokenizer, ids, lambda: model(batch), pattern=pattern)


def heads_by_score(run: "Run", seed: int) -> HeadScores:
    """Scores of every head of a decoder; special tokens are left out of the random sequences."""
    _require_language_model(run)
    special = set(run.tokenizer.special_ids)
    tokens = [id for id in range(run.tokenizer.vocab_size) if id not in special]
    return find_heads(run.model, tokens=tokens, seed=seed)


def text_head_effects(run: "Run", text: str, mean: bool) -> dict[str, Tensor]:
    """How much the loss of a text grows without each head."""
    _require_language_model(run)
    return head_effects(run.model, next_token_loss(run.model, context_ids(run, text)), mean=mean)


def text_lens(run: "Run", text: str) -> Lens:
    """The next token that each layer would predict at each position of a text."""
    _require_language_model(run)
    ids = context_ids(run, text)
    logits = logit_lens(run.model, torch.tensor([ids], device=run.device))
    return Lens.of(logits, run.tokenizer, ids)


def text_attribution(run: "Run", text: Any, output: str | None) -> Attribution:
    """The contribution of each token to a class or to the next token."""
    if run.tokenizers is None or isinstance(run.tokenizers, PairTokenizers):
        raise ConfigError("attribution is for runs that read one text")
    require_gradients(run.model)
    names: list[str] | None = getattr(make(run.config.task, TASKS, "task"), "names", None)
    if names is None:
        run._require("gradients", "predict the next token or the class of a text")
        return attribute(run.model, run.tokenizer, context_ids(run, text), output)
    ids, segments = _read(run, text)
    return attribute(run.model, run.tokenizer, ids, output, names, segments)


def text_gradients(run: "Run", text: str) -> GradientFlow:
    """The gradient norm of the last token's loss; for pairs, of its own translation."""
    require_gradients(run.model)
    if isinstance(run.tokenizers, PairTokenizers):
        source, target = source_and_translation(run, text)
        pieces = list(map(run.tokenizers.source.piece, _reading_order(run, source)))
        return last_token_gradients(run.model, target, pieces, source=source)
    run._require("gradients", "predict the next token")
    ids = [*run.tokenizer.prefix_ids, *run.tokenizer.encode(run._normalize(text))]
    return last_token_gradients(run.model, ids, list(map(run.tokenizer.piece, ids[:-1])))


def source_and_translation(
    run: "Run", text: str, target: str | None = None
) -> tuple[Source, list[int]]:
    """The source ids of a sentence, and the ids of its translation from BOS to EOS."""
    source = _source(run, text)
    tokenizers, task = cast(PairTokenizers, run.tokenizers), run._pair_task()
    target = run.translate(text) if target is None else run._normalize(target)
    return source, [*task.prompt, *tokenizers.target.encode(target), task.eos_id]


def context_ids(run: "Run", text: str) -> list[int]:
    """The ids of a text, with those that a tokenizer puts before it; at least one."""
    ids = [*run.tokenizer.prefix_ids, *run.tokenizer.encode(run._normalize(text))]
    if not ids:
        raise ConfigError("the text is empty; give at least one token")
    return ids


def explain_window(run: "Run", text: str) -> AttentionMaps:
    """The weights of the soft window over a text, at each point of a drawing of it."""
    task = stroke_task(run.config.task)
    drawing = task.draw(run.model, 1, text=text, seed=0, bias=1.0)[0]
    batch = task.collate(([drawing], None, [text]), torch.Generator()).to(run.device)
    maps = attention_maps(run.model, lambda: run.model(batch.inputs, source=batch.text))
    rows = [str(point) for point in range(1, len(drawing) + 1)]
    return AttentionMaps(
        {
            path: AttentionMap(rows, [*text, "end"], weights[0].cpu(), ["window"], "cross")
            for path, weights in maps.items()
        }
    )


def require_attention(run: "Run") -> None:
    """Raise `ConfigError` if the model has no attention."""
    if not has_attention(run.model):
        gradients = "" if hasattr(run.model, "fit") else "; --gradients shows gradient norms"
        raise ConfigError(
            f"{run.folder.path} is a model of the family {run.config.model['family']}, which has "
            f"no attention{gradients};\n{NEEDS_ATTENTION}"
        )


def _require_language_model(run: "Run") -> None:
    run._require("gradients", "predict the next token")
    require_attention(run)


def _read(run: "Run", what: Any) -> tuple[list[int], Tensor | None]:
    """The ids of a text, or of the texts of an input, and their segments."""
    names, texts = run.inputs, what if isinstance(what, list | tuple) else (what,)
    if len(texts) != len(names):
        example = f", as in ({', '.join(f'the {name}' for name in names)})"
        raise ConfigError(
            f"an input of this run is {' and '.join(names)}: give {len(names)} texts"
            f"{example if len(names) > 1 else ''}, not {len(texts)}"
        )
    normal = [run._normalize(text) for text in texts]
    if len(normal) == 1:
        return read_ids(run.model, run.tokenizer, normal[0]), None
    ids, segments = encode_pair(cast(Any, run.model.config), run.tokenizer, *normal)
    return ids, None if segments is None else torch.tensor([segments], device=run.device)


def _source(run: "Run", text: str) -> Source:
    """The source of a run on pairs, as its encoder reads it."""
    if not text.strip():
        raise ConfigError("the text is empty; give at least one token")
    ids = cast(PairTokenizers, run.tokenizers).source.encode(run._normalize(text))
    return run._pair_task().source([np.asarray(ids, dtype=np.int64)]).to(run.device)


def _reading_order(run: "Run", source: Source) -> list[int]:
    """The source ids in the order in which the encoder reads them."""
    ids: list[int] = source.ids[0].tolist()
    return ids[::-1] if getattr(run.model.config, "reversed_source", False) else ids
