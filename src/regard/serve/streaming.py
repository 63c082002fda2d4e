"""Continuations as one answer, or as server-sent events while they are generated."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from regard.serve.api_errors import as_api_error
from regard.serve.async_engine import AsyncEngine, Continuation, Delta
from regard.serve.engine_request import PreparedRequest
from regard.serve.models import ServedModel
from regard.serve.schema import Sampling
from regard.serve.service import service_of

MIN_LOGPROB = -9999.0  # in place of -inf, which JSON does not have
T = TypeVar("T")


async def _unless_disconnected(http: Request, work: Awaitable[T]) -> T | None:
    """The result of the work; None, and the work is cancelled, if the client leaves."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait([task, disconnected], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for other in (task, disconnected):
            other.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await disconnected


async def complete(
    http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> list[list[Continuation]] | None:
    """All continuations of several prompts; None if the client has left."""
    async_engine = service_of(http).async_engine
    submit(http, model, prepared)

    async def collect() -> list[list[Continuation]]:
        tasks = [
            asyncio.create_task(async_engine.complete(model, each.request, each.stops))
            for each in prepared
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            for each in prepared:
                async_engine.forget(each.request)

    return await _unless_disconnected(http, collect())


def submit(http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]) -> None:
    """Queue all requests or none."""
    async_engine = service_of(http).async_engine
    submitted: list[PreparedRequest] = []
    try:
        for each in prepared:
            async_engine.submit(model, each.request)
            submitted.append(each)
    except BaseException:
        for each in submitted:
            async_engine.forget(each.request)
        raise


async def deltas(
    http: Request, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several prompts as they come, with the number of the prompt."""
    async_engine = service_of(http).async_engine
    try:
        if len(prepared) == 1:
            async for delta in async_engine.deltas(model, prepared[0].request, prepared[0].stops):
                yield 0, delta
        else:
            async for pair in _interleave(async_engine, model, prepared):
                yield pair
    finally:
        for each in prepared:
            async_engine.forget(each.request)


async def _interleave(
    async_engine: AsyncEngine, model: ServedModel, prepared: Sequence[PreparedRequest]
) -> AsyncIterator[tuple[int, Delta]]:
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def read(number: int, each: PreparedRequest) -> None:
        try:
            async for delta in async_engine.deltas(model, each.request, each.stops):
                queue.put_nowait((number, delta))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(read(*pair)) for pair in enumerate(prepared)]
    unfinished = len(tasks)
    try:
        while unfinished:
            number, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                unfinished -= 1
            else:
                yield number, delta
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
    """Why a text ended, in the words of OpenAI's API."""
    return "stop" if reason == "stop" else None if reason is None else "length"


def usage_of(prepared: Sequence[PreparedRequest], tokens: int) -> dict[str, int]:
    """The number of tokens that were read and generated."""
    prompt = sum(each.prompt_tokens for each in prepared)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def includes_usage(body: Sampling) -> bool:
    """Whether the client wants an event with the number of tokens."""
    return bool((body.stream_options or {}).get("include_usage"))
