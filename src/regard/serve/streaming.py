"""Continuations as one response, or as server-sent events while they are generated."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from regard.serve.api_errors import as_api_error
from regard.serve.async_engine import AsyncEngine, Continuation, Delta
from regard.serve.engine_request import PreparedRequest
from regard.serve.models import ServedModel
from regard.serve.schema import Sampling
from regard.serve.service import cancel_on_disconnect, service_of

MIN_LOGPROB = -9999.0  # in place of -inf, which JSON does not have


async def complete(
    http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> list[list[Continuation]]:
    """Generate all continuations of several prompts."""
    async_engine = service_of(http).async_engine
    submit(http, model, prepared)

    async def collect() -> list[list[Continuation]]:
        tasks = [
            asyncio.create_task(async_engine.complete(model, item.request, item.stop_strings))
            for item in prepared
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    return await cancel_on_disconnect(http, collect())


def submit(http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]) -> None:
    """Queue the requests; they are cancelled when the response ends, even if one is refused."""
    async_engine = service_of(http).async_engine
    for item in prepared:
        async_engine.submit(model, item.request)
        http.scope["cleanup"].callback(async_engine.cancel, item.request)


async def deltas(
    http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several prompts as they are generated, with the index of the prompt."""
    async_engine = service_of(http).async_engine
    if len(prepared) == 1:
        (item,) = prepared
        async for delta in async_engine.deltas(model, item.request, item.stop_strings):
            yield 0, delta
    else:
        async for pair in _interleave(async_engine, model, prepared):
            yield pair


async def _interleave(
    async_engine: AsyncEngine, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> AsyncIterator[tuple[int, Delta]]:
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def read(index: int, item: PreparedRequest) -> None:
        try:
            async for delta in async_engine.deltas(model, item.request, item.stop_strings):
                queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(read(*pair)) for pair in enumerate(prepared)]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                unfinished -= 1
            else:
                yield index, delta
    finally:
        for task in tasks:
            task.cancel()


def event_stream(
    chunks: AsyncIterator[dict[str, Any]], headers: dict[str, str], *, done: bool = True
) -> StreamingResponse:
    """Server-sent events; an error after the headers is an event too."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event({"error": as_api_error(error).error})
        if done:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(
        lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
    )


def _event(chunk: dict[str, Any]) -> bytes:
    name = f"event: {chunk['type']}\n" if "type" in chunk and "sequence_number" in chunk else ""
    return f"{name}data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def openai_finish_reason(reason: str | None) -> str | None:
    """The `finish_reason` of OpenAI's API; None while a continuation is not finished."""
    return "stop" if reason == "stop" else None if reason is None else "length"


def usage_of(prepared: Sequence[PreparedRequest], tokens: int) -> dict[str, int]:
    """The `usage` object of OpenAI's API; `tokens` is the number of generated tokens."""
    prompt = sum(item.prompt_tokens for item in prepared)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def includes_usage(body: Sampling) -> bool:
    """Whether the client wants an event with the number of tokens."""
    return bool((body.stream_options or {}).get("include_usage"))
