"""Inspect a run: its attention, states, heads, attributions and gradients.

Each function calls the function of `regard.explain` that fits the model and the data of the run.
"""

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.api.overrides import WITHOUT_TOKENIZER
from regard.config import kind_of, make
from regard.errors import ConfigError, reject_options
from regard.explain.ablation import head_effects, next_token_loss
from regard.explain.attention import (
    attention_maps,
    has_attention,
    text_stack,
)
from regard.explain.attribution import Attribution, attribute
from regard.explain.gradient import GradientFlow, last_token_gradients, require_gradients
from regard.explain.heads import HeadScores, find_heads
from regard.explain.labelled_maps import (
    AxisLabels,
    cross_attention_path,
    encode_input,
    encoder_decoder_attention,
    image_attention,
    recurrent_states,
    self_attention,
)
from regard.explain.lens import LensPredictions, logit_lens
from regard.explain.token_map import AttentionMap, AttentionMaps, StateMaps
from regard.models.presets import PRESETS
from regard.nn.recurrent import RecurrentLayer
from regard.nn.state import Source
from regard.pipelines.captions import caption_image
from regard.pipelines.images import image_task, input_pixels
from regard.pipelines.strokes import SOFT_WINDOW, stroke_task
from regard.pipelines.text_pairs import encode_pair
from regard.tasks import TASKS
from regard.text import PairTokenizers

if TYPE_CHECKING:
    from regard.api.run import Run


def layer_attention(
    run: "Run", input: Any, *, layer: int | None, pattern: str | None, words: bool
) -> AttentionMaps:
    """Attention maps of one layer, by default the last; for pairs, its cross-attention."""
    require_attention(run)
    options: dict[str, Any] = {"pattern": pattern, "words": words}
    if run.config.model["family"] == SOFT_WINDOW:
        return all_attention(run, input, layers=None if layer is None else [layer], **options)
    if "file" in run.inputs or isinstance(run.tokenizers, PairTokenizers):
        options["pattern"] = pattern or cross_attention_path(run.model, layer)
        return all_attention(run, input, **options)
    last = len(text_stack(run.model)[1].layers) - 1
    return all_attention(run, input, layers=[last if layer is None else layer], **options)


def all_attention(
    run: "Run",
    input: Any,
    *,
    target: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    pattern: str | None = None,
    words: bool = False,
) -> AttentionMaps:
    """All attention weights of the model for a text or an image."""
    require_attention(run)
    if run.config.model["family"] == SOFT_WINDOW:
        reject_options(
            "the attention of a handwriting run is one map, its soft window",
            {
                "target": target,
                "layers": layers,
                "heads": heads,
                "rows": rows,
                "pattern": pattern,
                "words": words,
            },
        )
        return explain_window(run, input)
    if run.config.model["family"] == "vision":
        reason = "for an image, only layers, heads and rows of the attention can be selected"
        reject_options(reason, {"target": target, "pattern": pattern, "words": words})
        pixels = torch.from_numpy(input_pixels(run.model, input))
        image = image_task(run.config.task).normalize(pixels).to(run.device)
        return image_attention(
            run.model, image[0], pixels[0], layers=layers, heads=heads, rows=rows
        )
    selection: dict[str, Any] = {"heads": heads, "rows": rows, "words": words}
    if "file" in run.inputs:
        caption = None if target is None else run._normalize(target)
        captioned = caption_image(run, input, caption)
        return encoder_decoder_attention(
            run.model,
            captioned.source,
            AxisLabels.of_patches(captioned.image.grid),
            run.tokenizer,
            captioned.ids,
            pattern=pattern or _layer_patterns(run, layers),
            image=captioned.image,
            **selection,
        )
    if isinstance(run.tokenizers, PairTokenizers):
        source, ids = source_and_translation(run, input, target)
        return encoder_decoder_attention(
            run.model,
            source,
            AxisLabels.of(run.tokenizers.source, source.ids[0].tolist(), words),
            run.tokenizers.target,
            ids,
            pattern=pattern or _layer_patterns(run, layers),
            **selection,
        )
    reject_options("this run reads no target", {"target": target})
    ids, segments = _encode_texts(run, input)
    return self_attention(
        run.model,
        run.tokenizer,
        ids,
        segments=segments,
        layers=layers,
        pattern=pattern,
        **selection,
    )


def _layer_patterns(run: "Run", layers: Sequence[int] | None) -> list[str]:
    """Patterns for the paths of the attention modules in some layers or hops; None: in all."""
    if layers is None:
        return ["*"]
    if getattr(run.model.config, "shared_layers", False):
        return [f"*#{layer}" for layer in layers]
    names = [name for name, _ in run.model.named_modules()]
    patterns: list[str] = []
    for layer in layers:
        paths = (f"*.{layer}.*", f"attention.{layer}")
        matching = [path for path in paths if any(fnmatchcase(name, path) for name in names)]
        patterns += matching or paths[:1]  # a layer that does not exist is an error
    return patterns


def states(run: "Run", input: Any, pattern: str) -> StateMaps:
    """The gates and the hidden state of each recurrent layer at each position of its input.

    For pairs and captions, the input of the decoder is the model's own output.
    """
    model = run.model
    if run.config.model["family"] == SOFT_WINDOW:
        batch, points = _draw_text(run, input)
        return recurrent_states(
            model,
            lambda _: points,
            lambda: model(batch.inputs, source=batch.text),
            pattern=pattern,
        )
    source: Any = None
    encoded: list[str] = []
    if "file" in run.inputs:
        captioned = caption_image(run, input)
        source, ids, tokenizer = captioned.source, captioned.ids[:-1], run.tokenizer
    elif isinstance(run.tokenizers, PairTokenizers):
        source, target = source_and_translation(run, input)
        ids, tokenizer = target[:-1], run.tokenizers.target
        encoded = list(map(run.tokenizers.source.piece, _reading_order(run, source)))
    else:
        (ids, _), tokenizer = _encode_texts(run, input), run.tokenizer
    row = torch.tensor([ids], device=run.device)
    arguments = {} if source is None else {"source": source}
    tokens = list(map(tokenizer.piece, ids))
    return recurrent_states(
        model,
        lambda path: encoded if source is not None and path.startswith("encoder") else tokens,
        lambda: model(row, **arguments),
        pattern=pattern,
    )


def head_scores(run: "Run", seed: int) -> HeadScores:
    """Scores of every head of a decoder; special tokens are left out of the random sequences."""
    _require_language_model(run, "find_heads")
    special = set(run.tokenizer.special_ids)
    tokens = [id for id in range(run.tokenizer.vocab_size) if id not in special]
    return find_heads(run.model, tokens=tokens, seed=seed)


def text_head_effects(run: "Run", text: str, mean: bool) -> dict[str, Tensor]:
    """The increase in the loss of a text, or of a translation for pairs, when a head is ablated."""
    run._require("gradients", "predict the next token")
    require_attention(run)
    text_stack(run.model)  # raises if it is not a Transformer
    if isinstance(run.tokenizers, PairTokenizers):
        source, ids = source_and_translation(run, text)
        loss = next_token_loss(run.model, ids, source=source)
    else:
        ids = context_ids(run, text)
        if len(ids) < 2:
            raise ConfigError(
                "the text has 1 token; at least 2 are needed: each is predicted from those before"
            )
        loss = next_token_loss(run.model, ids)
    return head_effects(run.model, loss, mean=mean)


def text_logit_lens(run: "Run", text: str) -> LensPredictions:
    """The next token that each layer would predict at each position of a text."""
    _require_language_model(run, "logit_lens")
    ids = context_ids(run, text)
    logits = logit_lens(run.model, torch.tensor([ids], device=run.device))
    return LensPredictions.of(logits, run.tokenizer, ids)


def text_attribution(run: "Run", text: Any, output: str | None) -> Attribution:
    """The contribution of each token to a class or to the next token."""
    if run.tokenizers is None or isinstance(run.tokenizers, PairTokenizers):
        reads = "pairs" if run.tokenizers is not None else "no text"
        raise ConfigError(f"attribution needs a run that reads one text; this run reads {reads}")
    require_gradients(run.model)
    names: list[str] | None = getattr(make(run.config.task, TASKS, "task"), "class_names", None)
    if names is None:
        run._require("gradients", "predict the next token or the class of a text")
        token = None if output is None else run._normalize(output)
        return attribute(run.model, run.tokenizer, context_ids(run, text), token)
    ids, segments = _encode_texts(run, text)
    return attribute(run.model, run.tokenizer, ids, output, names, segments)


def text_gradients(run: "Run", text: str) -> GradientFlow:
    """The gradient norms of the loss of the last token of a text; for pairs, of its translation."""
    require_gradients(run.model)
    if isinstance(run.tokenizers, PairTokenizers):
        source, target = source_and_translation(run, text)
        tokens = list(map(run.tokenizers.source.piece, _reading_order(run, source)))
        return last_token_gradients(run.model, target, tokens, source=source)
    run._require("gradients", "predict the next token")
    ids = [*run.tokenizer.prefix_ids, *run.tokenizer.encode(run._normalize(text))]
    return last_token_gradients(run.model, ids, list(map(run.tokenizer.piece, ids[:-1])))


def source_and_translation(
    run: "Run", text: str, target: str | None = None
) -> tuple[Source, list[int]]:
    """The source ids of a sentence, and the ids of its translation from BOS to EOS."""
    source = _source(run, text)
    tokenizers, task = cast(PairTokenizers, run.tokenizers), run._pair_task()
    if target is not None:
        ids = tokenizers.target.encode(run._normalize(target))
    else:  # a translation without EOS may fill the context, which the prompt shares
        context = getattr(run.model, "context", None) or sys.maxsize
        ids = tokenizers.target.encode(run.translate(text))[: context - len(task.prompt)]
    return source, [*task.prompt, *ids, task.eos_id]


def context_ids(run: "Run", text: str) -> list[int]:
    """The ids of a text, after the tokenizer's prefix ids; raise if there are none."""
    ids = [*run.tokenizer.prefix_ids, *run.tokenizer.encode(run._normalize(text))]
    if not ids:
        raise ConfigError("the text is empty; give at least one token")
    return ids


def explain_window(run: "Run", text: str) -> AttentionMaps:
    """The weights of the soft window over a text, at each point of a drawing of the text."""
    batch, points = _draw_text(run, text)
    maps = attention_maps(run.model, lambda: run.model(batch.inputs, source=batch.text))
    return AttentionMaps(
        {
            path: AttentionMap(points, [*text, "end"], weights[0].cpu(), ["window"], "cross")
            for path, weights in maps.items()
        }
    )


def _draw_text(run: "Run", text: str) -> tuple[Any, list[str]]:
    """Draw a text; return the drawing as a batch, and labels of its points: 1, 2, …"""
    task = stroke_task(run.config.task)
    drawing = task.draw(run.model, 1, text=text, seed=0, bias=1.0)[0]
    batch = task.collate(([drawing], None, [text]), torch.Generator()).to(run.device)
    return batch, [str(point) for point in range(1, len(drawing) + 1)]


def require_attention(run: "Run") -> None:
    """Raise `ConfigError` if the model has no attention."""
    if not has_attention(run.model):
        alternatives = ""
        if "gradients" in run.methods and not hasattr(run.model, "fit"):
            alternatives += "; `regard explain --gradients` (run.gradients) shows gradient norms"
        layers = (module for module in run.model.modules() if isinstance(module, RecurrentLayer))
        if any(layer.hook_names for layer in layers):
            alternatives += "; `regard show gates` (run.states) shows its gates"
        raise ConfigError(
            f"{run.folder.path} is a model of the family {run.config.model['family']}, which has "
            f"no attention{alternatives};\n{_attention_advice(run)}"
        )


def _attention_advice(run: "Run") -> str:
    """Which model with attention can be trained for the task of a run."""
    task = TASKS.get(kind_of(run.config.task)[0])
    if task is None or task.data_kind in (*WITHOUT_TOKENIZER, "captions"):
        return "attention maps need a transformer, or a seq2seq model with model.score"
    names = (f"tiny-{architecture}" for architecture in task.architectures)
    preset = next((name for name in names if name in PRESETS), "tiny-decoder")
    score = ", or with model.score=additive" if run.config.model["family"] == "seq2seq" else ""
    return f"for attention maps, train a transformer: model.preset={preset}{score}"


def _require_language_model(run: "Run", method: str) -> None:
    run._require("gradients", "predict the next token")
    require_attention(run)
    if isinstance(run.tokenizers, PairTokenizers):
        raise ConfigError(f"{method} needs a decoder that continues a text; this run reads pairs")


def _encode_texts(run: "Run", input: Any) -> tuple[list[int], Tensor | None]:
    """The ids of a text, or of the texts of an input, and their segments."""
    names, texts = run.inputs, input if isinstance(input, list | tuple) else (input,)
    if len(texts) != len(names):
        expected = "one text"
        if len(names) > 1:
            example = ", ".join(f"the {name}" for name in names)
            expected = f"{len(names)} texts, as in ({example})"
        raise ConfigError(
            f"an input of this run is {' and '.join(names)}: give {expected}, not {len(texts)}"
        )
    normalized = [run._normalize(text) for text in texts]
    if len(normalized) == 1:
        return encode_input(run.model, run.tokenizer, normalized[0]), None
    ids, segments = encode_pair(cast(Any, run.model.config), run.tokenizer, *normalized)
    return ids, None if segments is None else torch.tensor([segments], device=run.device)


def _source(run: "Run", text: str) -> Source:
    """The ids of a text as the source of a run on pairs, with the special ids of the source."""
    if not text.strip():
        raise ConfigError("the text is empty; give at least one token")
    ids = cast(PairTokenizers, run.tokenizers).source.encode(run._normalize(text))
    return run._pair_task().source([np.asarray(ids, dtype=np.int64)]).to(run.device)


def _reading_order(run: "Run", source: Source) -> list[int]:
    """The source ids in the order in which the encoder reads them."""
    ids: list[int] = source.ids[0].tolist()
    return ids[::-1] if getattr(run.model.config, "reversed_source", False) else ids
