"""/v1/completions: continue a text."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from regard.serve.api_errors import ApiError
from regard.serve.async_engine import Continuation
from regard.serve.engine_request import PreparedRequest, prepare
from regard.serve.models import ServedModel
from regard.serve.request import TokenLogprobs
from regard.serve.schema import CompletionBody, as_prompts
from regard.serve.service import check_body, service_of
from regard.serve.streaming import (
    MIN_LOGPROB,
    complete,
    deltas,
    event_stream,
    includes_usage,
    openai_finish_reason,
    submit,
    usage_of,
)

router = APIRouter()


@router.post("/v1/completions")
async def completions(http: Request, body: CompletionBody) -> Response:
    """Continue a prompt, or each of several."""
    headers = check_body(body)
    service = service_of(http)
    model = await service.model(http, body.model)
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise ApiError(400, f"best_of={best_of} must be at least n={n}", param="best_of")
    if body.stream and best_of > n:
        raise ApiError(
            400,
            f"best_of={best_of} is more than n={n}, which cannot be streamed; leave out stream",
            param="best_of",
        )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 needs echo=true", param="max_tokens")
    prompts = as_prompts(body.prompt)
    prepared = [
        await asyncio.to_thread(
            prepare,
            model,
            prompt,
            body,
            max_new_tokens=max(1, max_tokens),
            n=best_of,
            logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            prompts=len(prompts),
        )
        for prompt in prompts
    ]
    base = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }
    if body.stream:
        submit(http, model, prepared)
        return event_stream(_completion_chunks(http, model, body, prepared, n, base), headers)
    completed = await complete(http, model, prepared)
    return await asyncio.to_thread(
        _completion_response, model, body, prepared, completed, base, headers
    )


def _completion_response(
    model: ServedModel,
    body: CompletionBody,
    prepared: Sequence[PreparedRequest],
    completed: Sequence[Sequence[Continuation]],
    base: dict[str, Any],
    headers: dict[str, str],
) -> Response:
    """Make the response; called in a thread, since many log-probabilities take long."""
    n, choices, tokens = body.n or 1, [], 0
    for prompt_index, (item, continuations) in enumerate(zip(prepared, completed, strict=True)):
        if body.max_tokens == 0:  # the engine generates at least one
            continuations = [
                Continuation(finish_reason=continuation.finish_reason)
                for continuation in continuations
            ]
        tokens += sum(len(continuation.tokens) for continuation in continuations)
        if len(continuations) > n:  # best_of
            continuations = sorted(continuations, key=lambda c: -c.mean_logprob)[:n]
        for index, continuation in enumerate(continuations):
            choices.append(
                {
                    "index": prompt_index * n + index,
                    "text": (item.text if body.echo else "") + continuation.text,
                    "logprobs": _completion_logprobs(model, body, item, continuation),
                    "finish_reason": openai_finish_reason(continuation.finish_reason),
                }
            )
    return JSONResponse(
        {**base, "choices": choices, "usage": usage_of(prepared, tokens)}, headers=headers
    )


async def _completion_chunks(
    http: Request,
    model: ServedModel,
    body: CompletionBody,
    prepared: Sequence[PreparedRequest],
    n: int,
    base: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    tokens = 0
    lengths: dict[int, int] = {}  # characters of the tokens so far, by the index of the choice
    async for prompt_index, delta in deltas(http, model, prepared):
        if body.max_tokens == 0:  # the engine generates at least one
            delta.text, delta.tokens, delta.logprobs = "", [], []
        tokens += len(delta.tokens)
        item, index = prepared[prompt_index], prompt_index * n + delta.index
        text = delta.text
        echo = body.echo and index not in lengths
        if echo:
            text = item.text + text
        logprobs, length = None, lengths.get(index, 0)
        if body.logprobs is not None:
            prompt = item if echo else None
            logprobs = logprob_table(model, prompt, delta.logprobs, body.logprobs, length)
            length += sum(map(len, logprobs["tokens"]))
        lengths[index] = length
        if text or delta.finish_reason or logprobs:
            choice = {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": openai_finish_reason(delta.finish_reason),
            }
            yield {**base, "choices": [choice]}
    if includes_usage(body):
        yield {**base, "choices": [], "usage": usage_of(prepared, tokens)}


def _completion_logprobs(
    model: ServedModel, body: CompletionBody, item: PreparedRequest, continuation: Continuation
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    prompt = item if body.echo else None
    return logprob_table(model, prompt, continuation.logprobs, body.logprobs)


def logprob_table(
    model: ServedModel,
    prompt: PreparedRequest | None,
    logprobs: Sequence[TokenLogprobs],
    top: int,
    offset: int = 0,
) -> dict[str, Any]:
    """Log-probabilities in the form of /v1/completions; with `prompt`, from its first token on.

    `offset` is the length of the text before the first token.
    """
    rows: list[tuple[int, TokenLogprobs | None]] = [(entry.token, entry) for entry in logprobs]
    if prompt is not None:
        ids = prompt.request.prompt
        prompt_logprobs = prompt.request.prompt_token_logprobs
        rows = [(ids[0], None), *((entry.token, entry) for entry in prompt_logprobs), *rows]
    tokens = [model.piece(token) for token, _ in rows]
    offsets = list(accumulate(map(len, tokens), initial=offset))[: len(tokens)]
    best: list[dict[str, float] | None] = []
    for _, entry in rows:
        if entry is None:
            best.append(None)
            continue
        table: dict[str, float] = {}
        for token, logprob in entry.top[:top]:
            table.setdefault(model.piece(token), max(logprob, MIN_LOGPROB))
        best.append(table)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if entry is None else max(entry.logprob, MIN_LOGPROB) for _, entry in rows
        ],
        "top_logprobs": best if top else None,
        "text_offset": offsets,
    }
