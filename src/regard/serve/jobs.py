"""What the server computes beside generation, in a thread of its own."""

import base64
import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from regard.data.images import open_image
from regard.errors import ConfigError, DataError
from regard.explain.attention import has_attention
from regard.generate.sampler_trace import TracedChain
from regard.models.base import Language
from regard.pipelines.series import series_task
from regard.serve.engine_request import source_ids
from regard.serve.models import ServedModel
from regard.serve.schema import PredictBody, Sampling
from regard.text import PairTokenizers

MAX_EXPLAINED = 128  # tokens: a map has a number for each pair of them
MAX_PIXELS = 50_000_000  # of all images of a request, which a small file can have


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
        if token >= model.tokenizer.vocab_size:
            raise ConfigError(
                f"tokens: {token} is not in the vocabulary of {model.tokenizer.vocab_size}"
            )
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
        "vocab_size": tokenizer.vocab_size,
        "eos_token": tokenizer.piece(tokenizer.eos_id),
        "bos_token": token("bos"),
        "pad_token": token("pad"),
        "chat_template": None,
    }


@torch.inference_mode()
def embed(model: ServedModel, inputs: Sequence[str | list[int]]) -> tuple[list[list[float]], int]:
    """The L2-normalized mean of the hidden states of each text, and the number of tokens."""
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
                f"input: a text has {len(ids)} tokens, and the model's context is {limit}; "
                "shorten it"
            )
        if max(ids) >= model.tokenizer.vocab_size:
            raise ConfigError(f"input: token {max(ids)} is not in the vocabulary")
        hidden = network(torch.tensor([ids], device=model.run.device))
        mean = hidden[0].float().mean(0)
        vectors.append((mean / mean.norm().clamp_min(1e-12)).tolist())
        used += len(ids)
    return vectors, used


def translate(model: ServedModel, texts: list[str], beam: int, penalty: float) -> list[str]:
    """The translations of sentences."""
    _check_sources(model, texts)
    translations: list[str] = model.run.translate(texts, beam=beam, length_penalty=penalty)
    return translations


def predict(model: ServedModel, body: PredictBody) -> Any:
    """The predictions for texts or images, or the next values of a series."""
    wanted = {"images": "image", "captions": "image", "series": "series"}.get(
        model.run.pipeline.name, "input"
    )
    given = [name for name in ("input", "image", "series") if getattr(body, name) is not None]
    if given != [wanted]:
        raise ConfigError(
            f"{given[0] if given else wanted}: the model {model.name!r} predicts from {wanted!r}; "
            f"give {wanted!r} and nothing else"
        )
    if body.series is not None:
        return _forecast(model, body.series, body.steps)
    if body.steps is not None:
        raise ConfigError("steps: it is for a series")
    predictions: list[Any]
    if body.image is not None:
        images = [body.image] if isinstance(body.image, str) else body.image
        with TemporaryDirectory() as folder:
            paths = [_write_image(Path(folder), *pair) for pair in enumerate(images)]
            _check_pixels(paths)
            predictions = model.run.predict(paths, top=body.top)
        return predictions
    given_texts = cast("str | list[str] | list[list[str]]", body.input)
    inputs = [given_texts] if isinstance(given_texts, str) else given_texts
    names = model.run.inputs
    for texts in inputs:
        if (1 if isinstance(texts, str) else len(texts)) != len(names):
            form = json.dumps(["…"] if len(names) == 1 else [[f"the {name}" for name in names]])
            raise ConfigError(f"input: the model {model.name!r} reads {form}, a list of inputs")
        if isinstance(texts, str):
            _check_sources(model, [texts])
    predictions = model.run.predict(
        [texts if isinstance(texts, str) else tuple(texts) for texts in inputs], top=body.top
    )
    return predictions


def _forecast(model: ServedModel, series: Any, steps: int | None) -> Any:
    columns = series_task(model.run.config.task).columns
    if isinstance(series, list):
        series = {columns[0]: series}
    missing = [name for name in columns if name not in series]
    if missing or len({*map(len, series.values())}) > 1:
        raise ConfigError(
            f"series: the model {model.name!r} reads columns of equal length by name: "
            + ", ".join(columns)
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "series.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(series[name] for name in columns), strict=True))
        return model.run.forecast(path, steps=steps)


def _write_image(folder: Path, number: int, image: str) -> Path:
    """A file with the image; its pixels are read as those of any file."""
    try:
        content = base64.b64decode(image.partition("base64,")[2] or image, validate=True)
    except ValueError:
        raise ConfigError("image: it is not base64 of a PNG or JPEG file") from None
    suffix = ".png" if content.startswith(b"\x89PNG") else ".jpg"
    path = folder / f"image-{number}{suffix}"
    path.write_bytes(content)
    return path


def _check_pixels(paths: list[Path]) -> None:
    """Refuse images that take long to decode; what is no image is refused where it is read."""
    pixels = 0
    for path in paths:
        with suppress(DataError):
            width, height = open_image(path, path.read_bytes()).size
            pixels += width * height
    if pixels > MAX_PIXELS:
        raise ConfigError(f"image: {pixels:,} pixels in all, and the limit is {MAX_PIXELS:,}")


def _check_sources(model: ServedModel, texts: list[str]) -> None:
    """Refuse sources that an encoder-decoder has no room for."""
    if model.takes_source:
        for text in texts:
            source_ids(model, text)


def explain(
    model: ServedModel, text: str, layer: int | None, top: int, tokens: int, body: Sampling
) -> dict[str, Any]:
    """Attention maps, the likeliest next tokens, and what each sampler did to the first tokens."""
    if "file" in model.run.inputs:  # `run.explain` would open a file that the client names
        raise ConfigError(f"{model.name} reads images; /explain takes texts only")
    ids = source_ids(model, text) if model.takes_source else tokenize(model, text, special=True)
    if len(ids) > MAX_EXPLAINED:
        raise ConfigError(f"text: it has more than {MAX_EXPLAINED} tokens; shorten it")
    run = model.run_copy
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
    if "generate" in run.methods:
        answer["next"] = _next_tokens(model, text, top)
        if tokens:
            chain = TracedChain(model.chain(body.specs(), body.order).samplers)
            for _ in run.stream(text, tokens=tokens, sampler=chain, seed=body.seed):
                pass
            answer["trace"] = [_with_pieces(model, asdict(token)) for (token,) in chain.tokens]
    return answer


@torch.inference_mode()
def _next_tokens(model: ServedModel, text: str, top: int) -> list[dict[str, Any]]:
    language = cast(Language, model.run_copy.model)
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
