"""/v1/chat/completions: answer a conversation."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from regard.serve.api_errors import ApiError
from regard.serve.async_engine import Continuation
from regard.serve.engine_request import PreparedRequest, chat_prompt, prepare
from regard.serve.models import ServedModel
from regard.serve.request import TokenLogprobs
from regard.serve.schema import ChatBody, Message, Sampling
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


@router.post("/v1/chat/completions")
async def chat_completions(http: Request, body: ChatBody) -> Response:
    """Answer the last message of a conversation."""
    headers = check_body(body)
    model = await service_of(http).model(http, body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    prepared = await prepare_chat(
        model,
        body,
        body.messages,
        body.max_completion_tokens or body.max_tokens,
        (body.top_logprobs or 0) if body.logprobs else None,
    )
    base = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }
    if body.stream:
        submit(http, model, [prepared])
        return event_stream(_chat_chunks(http, model, body, prepared, base), headers)
    (continuations,) = await complete(http, model, [prepared])
    return await asyncio.to_thread(
        _chat_response, model, body, prepared, continuations, base, headers
    )


def _chat_response(
    model: ServedModel,
    body: ChatBody,
    prepared: PreparedRequest,
    continuations: Sequence[Continuation],
    base: dict[str, Any],
    headers: dict[str, str],
) -> Response:
    """Make the response; called in a thread, since many log-probabilities take long."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": trim(continuation.text), "refusal": None},
            "logprobs": {
                "content": [_chat_logprob(model, token) for token in continuation.logprobs]
            }
            if body.logprobs
            else None,
            "finish_reason": openai_finish_reason(continuation.finish_reason),
        }
        for index, continuation in enumerate(continuations)
    ]
    tokens = sum(len(continuation.tokens) for continuation in continuations)
    return JSONResponse(
        {**base, "choices": choices, "usage": usage_of([prepared], tokens)}, headers=headers
    )


async def prepare_chat(
    model: ServedModel,
    body: Sampling,
    messages: Sequence[Message],
    max_new_tokens: int | None,
    logprobs: int | None,
) -> PreparedRequest:
    """The request to the engine for a conversation."""
    pairs = [(message.role, message.text()) for message in messages]
    prompt, stop_strings = await asyncio.to_thread(chat_prompt, model, pairs)
    return await asyncio.to_thread(
        prepare,
        model,
        prompt,
        body,
        max_new_tokens=max_new_tokens or 256,
        n=body.n or 1,
        logprobs=logprobs,
        stop_strings=stop_strings,
    )


def trim(text: str) -> str:
    """Remove the space that a model writes after "Assistant:"."""
    return text.removeprefix(" ")


def _chat_logprob(model: ServedModel, logprobs: TokenLogprobs) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = model.piece(token)
        raw = list(model.tokenizer.token_bytes(token))
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": raw}

    return entry(logprobs.token, logprobs.logprob) | {
        "top_logprobs": [entry(token, logprob) for token, logprob in logprobs.top]
    }


async def _chat_chunks(
    http: Request,
    model: ServedModel,
    body: ChatBody,
    prepared: PreparedRequest,
    base: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    tokens, started = 0, set()
    for index in range(prepared.request.n):
        opening = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
        yield {**base, "choices": [choice]}
    async for _, delta in deltas(http, model, [prepared]):
        tokens += len(delta.tokens)
        text = delta.text
        if text and delta.index not in started:
            text = trim(text)
            started.add(delta.index)
        logprobs = None
        if delta.logprobs and body.logprobs:
            logprobs = {"content": [_chat_logprob(model, token) for token in delta.logprobs]}
        if text or logprobs:
            choice = {
                "index": delta.index,
                "delta": {"content": text},
                "logprobs": logprobs,
                "finish_reason": None,
            }
            yield {**base, "choices": [choice]}
        if delta.finish_reason:
            choice = {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": openai_finish_reason(delta.finish_reason),
            }
            yield {**base, "choices": [choice]}
    if includes_usage(body):
        yield {**base, "choices": [], "usage": usage_of([prepared], tokens)}
