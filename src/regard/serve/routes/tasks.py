"""Tokens, embeddings, and our own routes: translation, prediction and explanation."""

import asyncio
import base64
import struct
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from regard.api.formatting import replace_non_finite
from regard.serve import jobs
from regard.serve.schema import (
    DetokenizeBody,
    EmbeddingsBody,
    ExplainBody,
    PredictBody,
    TokenizeBody,
    TranslateBody,
    as_prompts,
)
from regard.serve.service import check_body, service_of

router = APIRouter()


class FiniteJSONResponse(JSONResponse):
    """JSON in which NaN and infinity, which JSON does not have, are null."""

    def render(self, content: Any) -> bytes:
        """The content as bytes."""
        try:
            return super().render(content)
        except ValueError:
            return super().render(replace_non_finite(content))


@router.post("/tokenize")
async def tokenize(http: Request, body: TokenizeBody) -> Response:
    """The ids of a text."""
    headers = check_body(body)
    model = await service_of(http).model(http, body.model)
    ids = await asyncio.to_thread(
        jobs.tokenize, model, body.prompt, add_special_tokens=body.add_special_tokens
    )
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
    return JSONResponse(answer, headers=headers)


@router.post("/detokenize")
async def detokenize(http: Request, body: DetokenizeBody) -> Response:
    """The text of ids."""
    headers = check_body(body)
    model = await service_of(http).model(http, body.model)
    text = await asyncio.to_thread(jobs.detokenize, model, body.tokens)
    return JSONResponse({"prompt": text}, headers=headers)


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request) -> dict[str, Any]:
    """The special tokens of the first model, as lm-eval asks for them."""
    model = await service_of(http).model(http, None)
    return jobs.tokenizer_info(model)


@router.post("/v1/embeddings")
async def embeddings(http: Request, body: EmbeddingsBody) -> Response:
    """A vector for each text: the L2-normalized mean, or first, of the hidden states."""
    headers = check_body(body)
    service = service_of(http)
    model = await service.model(http, body.model)
    vectors, tokens = await service.run_job(http, jobs.embed, model, as_prompts(body.input))
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": vector
            if body.encoding_format == "float"
            else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode(),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": model.name, "usage": usage}
    return FiniteJSONResponse(answer, headers=headers)


@router.post("/translate")
async def translate(http: Request, body: TranslateBody) -> Response:
    """Translate a sentence, or each of several, by beam search."""
    headers = check_body(body)
    service = service_of(http)
    model = await service.model(http, body.model)
    texts = [body.text] if isinstance(body.text, str) else body.text
    translations = await service.run_job(
        http, jobs.translate, model, texts, body.beam, body.length_penalty
    )
    return JSONResponse({"model": model.name, "translations": translations}, headers=headers)


@router.post("/predict")
async def predict(http: Request, body: PredictBody) -> Response:
    """The prediction of the model's task for texts or images, or the forecast of a series."""
    headers = check_body(body)
    service = service_of(http)
    model = await service.model(http, body.model)
    predictions = await service.run_job(http, jobs.predict, model, body)
    return FiniteJSONResponse({"model": model.name, "predictions": predictions}, headers=headers)


@router.post("/explain")
async def explain(http: Request, body: ExplainBody) -> Response:
    """Attention maps of a text, the most probable next tokens, and the effect of each sampler."""
    headers = check_body(body)
    service = service_of(http)
    model = await service.model(http, body.model)
    explained = await service.run_job(
        http, jobs.explain, model, body.text, body.layer, body.top, body.tokens, body
    )
    return FiniteJSONResponse({"model": model.name, **explained}, headers=headers)
