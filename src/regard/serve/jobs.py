"""What the server computes beside generation, in a thread of its own."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

from regard.errors import ConfigError
from regard.explain.attention import has_attention
from regard.generate.sampler_trace import TracedChain
from regard.models.base import Language
from regard.serve.models import ServedModel
from regard.serve.prepare import source_ids
from regard.serve.schema import Sampling
from regard.text import PairTokenizers

TEXT_PIPELINES = ("text", "pairs", "labels", "tags")  # whose predictions need one text each
MAX_EXPLAINED = 128  # tokens: a map has a number for each pair of them


def tokenize(model: ServedModel, text: str, special: bool) -> list[int]:
    """The ids of a text; with `special`, those that the model reads, with its prefix ids."""
    tokenizers = model.run.tokenizers
    if isinstance(tokenizers, PairTokenizers):
        return tokenizers.source.encode(text)
    tokenizer = model.tokenizer
    prefix = tokenizer.prefix_ids if special else []
    return [*prefix, *tokenizer.encode(text)]


def detokenize(model: ServedModel, ids: list[int]) -> str:
    """The text of ids."""
    for token in ids:
        if token >= model.tokenizer.size:
            raise ConfigError(f"tokens: {token} is not in the vocabulary of {model.tokenizer.size}")
    return model.tokenizer.decode(ids)


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The special tokens of a model."""
    tokenizer = model.tokenizer

    def token(name: str) -> str | None:
        id = tokenizer.special_id(name)
        return None if id is None else tokenizer.piece(id)

    return {
        "model": model.name,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.size,
        "eos_token": tokenizer.piece(tokenizer.stop_id),
        "bos_token": token("start"),
        "pad_token": token("pad"),
        "chat_template": None,
    }


@torch.inference_mode()
def embed(model: ServedModel, inputs: Sequence[str | list[int]]) -> tuple[list[list[float]], int]:
    """The mean of the hidden states of each text, with length 1; and the number of tokens."""
    network = model.run.model
    if model.takes_source or not hasattr(network, "head") or hasattr(network, "fit"):
        raise ConfigError(
            f"the model {model.name!r} has no embeddings; use a decoder, an encoder or a recurrent "
            "model of text"
        )
    vectors, used = [], 0
    for text in inputs:
        ids = tokenize(model, text, special=True) if isinstance(text, str) else text
        if not ids:
            raise ConfigError("input: a text has no token; give some text")
        limit = model.context
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"input: a text has {len(ids)} tokens, and the model's context is {limit}"
            )
        if max(ids) >= model.tokenizer.size:
            raise ConfigError(f"input: token {max(ids)} is not in the vocabulary")
        hidden = network(torch.tensor([ids], device=model.run.device))
        mean = hidden[0].float().mean(0)
        vectors.append((mean / mean.norm().clamp_min(1e-12)).tolist())
        used += len(ids)
    return vectors, used


def translate(model: ServedModel, texts: list[str], beam: int, penalty: float) -> list[str]:
    """The translations of sentences."""
    _check_sources(model, texts)
    found: list[str] = model.run.translate(texts, beam=beam, length_penalty=penalty)
    return found


def predict(model: ServedModel, texts: list[str], top: int) -> list[Any]:
    """The predictions for texts."""
    if model.run.pipeline.name not in TEXT_PIPELINES:
        raise ConfigError(f"the model {model.name!r} does not predict from a text")
    _check_sources(model, texts)
    found: list[Any] = model.run.predict(texts, top=top)
    return found


def _check_sources(model: ServedModel, texts: list[str]) -> None:
    """Refuse sources that an encoder-decoder has no room for."""
    if model.takes_source:
        for text in texts:
            source_ids(model, text)


def explain(
    model: ServedModel, text: str, layer: int | None, top: int, tokens: int, body: Sampling
) -> dict[str, Any]:
    """Attention maps, the likeliest next tokens, and what each sampler did to the first tokens."""
    ids = source_ids(model, text) if model.takes_source else tokenize(model, text, special=True)
    if len(ids) > MAX_EXPLAINED:
        raise ConfigError(f"text: it has more than {MAX_EXPLAINED} tokens; shorten it")
    run = model.explained
    answer: dict[str, Any] = {"attention": {}, "next": [], "trace": []}
    if has_attention(run.model):
        for name, one in run.explain(text, layer=layer).items():
            answer["attention"][name] = {
                "rows": one.rows,
                "columns": one.columns,
                "weights": [
                    [[round(weight, 6) for weight in row] for row in head]
                    for head in one.weights.tolist()
                ],
            }
    if "generate" in run.verbs:
        answer["next"] = _next_tokens(model, text, top)
        if tokens:
            chain = TracedChain(model.chain(body.specs(), body.order).stages)
            for _ in run.stream(text, tokens=tokens, sampler=chain, seed=body.seed):
                pass
            answer["trace"] = [_with_pieces(model, asdict(token)) for (token,) in chain.tokens]
    return answer


@torch.inference_mode()
def _next_tokens(model: ServedModel, text: str, top: int) -> list[dict[str, Any]]:
    language = cast(Language, model.explained.model)
    ids = model.run._prompt(text)[-(model.context or 2**31) :]
    state = language.start(1, len(ids))
    logits, _ = language.step(torch.tensor([ids], device=language.device), state)
    probabilities = logits[0, -1].float().softmax(-1)
    best = probabilities.topk(min(top, len(probabilities)))
    return [
        {"id": id, "piece": model.piece(id), "probability": probability}
        for id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _with_pieces(model: ServedModel, value: Any) -> Any:
    if isinstance(value, list):
        return [_with_pieces(model, item) for item in value]
    if not isinstance(value, dict):
        return value
    table = {key: _with_pieces(model, item) for key, item in value.items()}
    return {"piece": model.piece(table["id"]), **table} if "id" in table else table
