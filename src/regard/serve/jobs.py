"""The work of the routes other than generation; it runs outside of the engine thread."""

import base64
import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor

from regard.data.images import open_image
from regard.errors import ConfigError, DataError
from regard.explain.attention import has_attention
from regard.generate.decode import generate, pad_prompts, prefill
from regard.generate.traced_chain import TracedChain
from regard.models.base import Language
from regard.nn.state import Source
from regard.pipelines.encoded_texts import special_ids_around
from regard.pipelines.sentences import contrastive_task
from regard.pipelines.series import series_task
from regard.serve.engine_request import chat_prompt, check_token, encode_source, source_ids
from regard.serve.models import ServedModel
from regard.serve.schema import PredictBody, Sampling
from regard.training.storage.initial_weights import run_jinja_template

ROUTES = {  # of the methods of a run
    "generate": "/v1/completions",
    "chat": "/v1/chat/completions",
    "translate": "/translate",
    "predict": "/predict",
}
MAX_EXPLAINED = 128  # tokens: a map has a number for each pair of them
MAX_PIXELS = 50_000_000  # of all images of a request; a small file may have many


def tokenize(model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, with the special ids that the model reads if `add_special_tokens`."""
    if model.takes_source:
        return encode_source(model, text, add_special_tokens=add_special_tokens)
    config = cast(Any, model.run.model.config)
    before, after = special_ids_around(config, model.tokenizer) if add_special_tokens else ([], [])
    return [*before, *model.tokenizer.encode(model.run._normalize(text)), *after]


def detokenize(model: ServedModel, ids: list[int]) -> str:
    """The text of ids."""
    for token in ids:
        check_token(token, model.tokenizer.vocab_size, "tokens")
    return model.tokenizer.decode(ids)


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The special tokens and the chat template of a model."""
    tokenizer, run = model.tokenizer, model.run

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
        "chat_template": run_jinja_template(run.folder, run.config, tokenizer),
    }


@torch.inference_mode()
def embed(model: ServedModel, inputs: Sequence[str | list[int]]) -> tuple[list[list[float]], int]:
    """The L2-normalized mean of the hidden states of each text, and the number of tokens.

    For a run with `task.pool=first`, the first hidden state instead of the mean, as `run.embed`.
    """
    network, task = model.run.model, model.run.config.task
    uses_first = "embed" in model.run.methods and contrastive_task(task).pool == "first"
    if model.takes_source or not hasattr(network, "head") or hasattr(network, "fit"):
        raise ConfigError(
            f"the model {model.name!r} has no embeddings; use a decoder, an encoder or a recurrent "
            "model of text"
        )
    vectors, token_count = [], 0
    for text in inputs:
        ids = text if isinstance(text, list) else tokenize(model, text, add_special_tokens=True)
        if not ids:
            raise ConfigError("input: a text has no token; give some text")
        limit = model.context
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"input: a text has {len(ids)} tokens, and the model's context is {limit}; "
                "shorten it"
            )
        check_token(max(ids), model.tokenizer.vocab_size, "input")
        hidden = network(torch.tensor([ids], device=model.run.device))[0].float()
        vector = hidden[0] if uses_first else hidden.mean(0)
        vectors.append((vector / vector.norm().clamp_min(1e-12)).tolist())
        token_count += len(ids)
    return vectors, token_count


def translate(model: ServedModel, texts: list[str], beam: int, penalty: float) -> list[str]:
    """The translations of sentences."""
    _require_method(model, "translate")
    _check_sources(model, texts)
    translations: list[str] = model.run.translate(texts, beam=beam, length_penalty=penalty)
    return translations


def predict(model: ServedModel, body: PredictBody) -> Any:
    """The predictions for texts or images, or the next values of a series."""
    _require_method(model, "predict")
    field = {"images": "image", "captions": "image", "series": "series"}.get(
        model.run.pipeline.name, "input"
    )
    fields = [name for name in ("input", "image", "series") if getattr(body, name) is not None]
    if fields != [field]:
        raise ConfigError(
            f"{fields[0] if fields else field}: the model {model.name!r} predicts from {field!r}; "
            f"give {field!r} and nothing else"
        )
    if body.series is not None:
        return _forecast(model, body.series, body.steps)
    if body.steps is not None:
        raise ConfigError("steps: only a forecast of a series has steps; leave it out")
    predictions: list[Any]
    if body.image is not None:
        images = [body.image] if isinstance(body.image, str) else body.image
        with TemporaryDirectory() as folder:
            paths = [_write_image(Path(folder), *pair) for pair in enumerate(images)]
            _check_pixels(paths)
            predictions = model.run.predict(paths, top=body.top)
        return predictions
    body_input = cast("str | list[str] | list[list[str]]", body.input)
    inputs = [body_input] if isinstance(body_input, str) else body_input
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


def _require_method(model: ServedModel, method: str) -> None:
    """Raise if the model does not support `method`; the message does not name the run's folder."""
    methods = model.run.methods
    if method not in methods:
        routes = [ROUTES[name] for name in methods if name in ROUTES]
        raise ConfigError(
            f"model: {model.name!r} cannot {method}"
            + (f"; use {routes[0]}, or another model" if routes else "; use another model")
        )


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
        try:
            return model.run.forecast(path, steps=steps)
        except DataError as error:  # it names the file, which the client does not know
            raise ConfigError(f"series: {str(error).replace('series has', 'it has', 1)}") from None


def _write_image(folder: Path, index: int, image: str) -> Path:
    """Write an image in base64 to a file; return its path."""
    try:
        content = base64.b64decode(image.partition("base64,")[2] or image, validate=True)
    except ValueError:
        raise ConfigError("image: it must be a PNG, JPEG, WebP or GIF file in base64") from None
    suffix = ".png" if content.startswith(b"\x89PNG") else ".jpg"
    path = folder / f"image-{index}{suffix}"
    path.write_bytes(content)
    return path


def _check_pixels(paths: list[Path]) -> None:
    """Refuse images that take long to decode; a file that is no image is refused later."""
    pixels = 0
    for path in paths:
        with suppress(DataError):
            width, height = open_image(path, path.read_bytes()).size
            pixels += width * height
    if pixels > MAX_PIXELS:
        raise ConfigError(
            f"image: {pixels:,} pixels in all, and the limit is {MAX_PIXELS:,}; give fewer or "
            "smaller images"
        )


def input_ids(model: ServedModel, text: str) -> list[int]:
    """The ids that the model reads for a text: a prompt, or the source of an encoder-decoder."""
    if model.takes_source:
        return source_ids(model, text)
    return tokenize(model, text, add_special_tokens=True)


def _check_sources(model: ServedModel, texts: list[str]) -> None:
    """Refuse sources that are longer than the context of an encoder-decoder."""
    if model.takes_source:
        for text in texts:
            source_ids(model, text)


def explain(
    model: ServedModel, text: str, layer: int | None, top: int, tokens: int, body: Sampling
) -> dict[str, Any]:
    """Attention maps, the most probable next tokens, and each sampler's effect on new tokens."""
    if "file" in model.run.inputs:  # `run.explain` would open a file that the client names
        raise ConfigError(f"the model {model.name!r} reads images; /explain takes texts only")
    tokens_read = len(input_ids(model, text))
    if not tokens_read:
        raise ConfigError("text: it has no token; give some text")
    if tokens_read > MAX_EXPLAINED:
        raise ConfigError(
            f"text: it has {tokens_read} tokens, and the limit is {MAX_EXPLAINED}; shorten it"
        )
    run = model.run_copy
    answer: dict[str, Any] = {"attention": {}, "next": [], "trace": []}
    if has_attention(run.model):
        for name, attention in run.explain(text, layer=layer).items():
            answer["attention"][name] = {
                "rows": attention.rows,
                "columns": attention.columns,
                "weights": [
                    [[round(weight, 6) for weight in row] for row in head]
                    for head in attention.weights.tolist()
                ],
            }
    if model.engine is not None:
        logits, ids, source = next_logits(model, text)
        answer["next"] = _most_probable(model, logits, top)
        if tokens:
            chain = TracedChain(model.chain(body.specs(), body.order).samplers)
            language, stop = cast(Language, run.model), model.tokenizer.stop_ids
            generate(
                language,
                [ids],
                chain,
                max_new_tokens=tokens,
                stop=stop,
                seed=body.seed,
                source=source,
            )
            answer["trace"] = chain.table(model.piece)
    return answer


@torch.inference_mode()
def next_logits(
    model: ServedModel, text: str, *, chat: bool = False
) -> tuple[Tensor, list[int], Source | None]:
    """The logits after a text on the CPU, and the ids and the source that the decoder has read.

    An encoder-decoder reads the text as its source, and predicts the first token of the target.
    With `chat`, the text is the message of a user, as in /v1/chat/completions, and the first token
    of the response is predicted.
    """
    if model.engine is None:
        raise ConfigError(f"the model {model.name!r} does not generate text; use /predict")
    language, source = cast(Language, model.run_copy.model), None
    if model.takes_source:
        source = Source(*pad_prompts([source_ids(model, text)], language.device))
        ids = list(model.run._pair_task().prompt)
    else:
        prompt = chat_prompt(model, [("user", text)])[0] if chat else text
        ids = model.run._prompt(prompt) if isinstance(prompt, str) else prompt
        ids = ids[-(model.context or 2**31) :]
    logits, _ = prefill(language, [ids], len(ids), source)
    return logits[0].float().cpu(), ids, source


def _most_probable(model: ServedModel, logits: Tensor, top: int) -> list[dict[str, Any]]:
    probabilities = logits.softmax(-1)
    best = probabilities.topk(min(top, len(probabilities)))
    return [
        {"id": id, "piece": model.piece(id), "probability": probability}
        for id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
