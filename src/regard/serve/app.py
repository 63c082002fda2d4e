"""The HTTP API: OpenAI's routes, and our own for translation, prediction and explanation."""

import asyncio
import base64
import contextlib
import json
import re
import secrets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from regard.errors import RegardError, shorten
from regard.serve import jobs
from regard.serve.answers import Answers, Continuation, Piece
from regard.serve.engine import EngineConfig, QueueFull
from regard.serve.guard import Guard
from regard.serve.metrics import Metrics
from regard.serve.models import Models, ServedModel
from regard.serve.prepare import Prepared, chat_prompt, prepare
from regard.serve.request import TokenScore
from regard.serve.schema import (
    REFUSED,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    ExplainBody,
    Message,
    PredictBody,
    ResponsesBody,
    Sampling,
    TokenizeBody,
    TranslateBody,
)
from regard.serve.worker import EngineStopped

MIN_LOGPROB = -9999.0  # in place of -inf, which JSON does not have
RETRY_AFTER = 1  # seconds that a client should wait when the queue is full
JOBS = 16  # translations, predictions and explanations that wait
T = TypeVar("T")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "a field is wrong",
        401: "the key is missing or wrong",
        403: "this host or origin is not served",
        404: "there is no such model",
        413: "the body is too large",
        415: "the body is not JSON",
        429: "the queue is full",
        503: "the engine does not answer",
    }.items()
}


class ApiError(Exception):
    """An error that is answered in the form of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": shorten(message), "type": kind, "param": param, "code": code}


class Server:
    """What the routes share: the models, the engine thread and a thread for other work."""

    def __init__(
        self,
        paths: Sequence[Path],
        config: EngineConfig,
        *,
        device: str = "auto",
        idle: float | None = None,
    ) -> None:
        self.answers = Answers()
        self.models = Models(paths, self.answers.worker, config, device=device, idle=idle)
        self.metrics = Metrics()
        self.draining = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="regard-jobs")
        self._jobs = 0

    async def model(self, http: Request, name: str | None) -> ServedModel:
        """The model of a request; it is released when the answer was sent."""
        try:
            model = await self.models.get(name)
        except KeyError:
            known = ", ".join(self.models.paths)
            raise ApiError(
                404, f"no model {name!r}; there are {known}", param="model", code="model_not_found"
            ) from None
        except (RegardError, OSError) as error:
            raise ApiError(
                503, f"the model cannot be loaded: {error}", kind="server_error"
            ) from error
        http.scope["at_end"].callback(self.models.release, model)
        return model

    async def job(self, function: Callable[..., T], *args: Any) -> T:
        """Run something else than generation in a thread of its own; few may wait."""
        if self._jobs >= JOBS:
            raise QueueFull(f"{JOBS} jobs wait already; try again later")
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        finally:
            self._jobs -= 1

    def problem(self) -> str | None:
        """Why nothing can be generated."""
        return self.answers.worker.problem()

    def close(self) -> None:
        """End the threads."""
        self.answers.worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def create_app(
    paths: Sequence[Path],
    config: EngineConfig | None = None,
    *,
    key: str | None = None,
    hosts: tuple[str, ...] | None = None,
    device: str = "auto",
    idle: float | None = None,
) -> FastAPI:
    """The application: `key` protects every route but /health, `hosts` are the names it answers to.

    Its state has the `server`.
    """
    server = Server(paths, config or EngineConfig(), device=device, idle=idle)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.answers.start()
        unloading = asyncio.create_task(server.models.unload_idle())
        yield
        unloading.cancel()
        server.close()

    app = FastAPI(
        title="regard", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS
    )
    app.state.server = server
    app.include_router(router)
    app.add_middleware(Guard, key=key, hosts=hosts, count=server.metrics.count)
    app.add_exception_handler(Exception, _unexpected)
    for error in (ApiError, RegardError, RequestValidationError, HTTPException, RecursionError):
        app.add_exception_handler(error, _answer_error)
    return app


router = APIRouter()


def _server(http: Request) -> Server:
    server: Server = http.app.state.server
    return server


# errors


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        names = [str(part) for part in first["loc"] if part != "body"]
        param = next((name for name in names if not name.isdigit()), None)
        return ApiError(400, f"{'.'.join(names[:3]) or 'the body'}: {first['msg']}", param=param)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), kind="rate_limit_exceeded", code="queue_full")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), kind="server_error", code="engine_stopped")
    if isinstance(error, RegardError | RecursionError):
        named = re.match(r"(\w+)[:=]", str(error))  # messages begin with the setting
        return ApiError(400, str(error), param=named[1] if named else None)
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")


async def _answer_error(http: Request, error: Exception) -> Response:
    answer = _as_api_error(error)
    headers = {"Retry-After": str(RETRY_AFTER)} if answer.status in (429, 503) else {}
    return JSONResponse({"error": answer.error}, answer.status, headers)


async def _unexpected(http: Request, error: Exception) -> Response:
    return await _answer_error(http, error)


# operation


@router.get("/health")
async def health(http: Request) -> Response:
    """Whether the engine works; it is asked, not assumed."""
    server = _server(http)
    problem = "the server is shutting down" if server.draining else server.problem()
    if problem is not None:
        return JSONResponse({"status": "error", "message": problem}, 503)
    return JSONResponse({"status": "ok", "models": list(server.models.loaded)})


@router.get("/metrics")
async def show_metrics(http: Request) -> Response:
    """The counters in the text format of Prometheus."""
    server = _server(http)
    return PlainTextResponse(
        server.metrics.text(server.models, server.problem() is None, len(server.answers)),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the library."""
    return {"version": metadata.version("regard")}


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """The models that can be asked."""
    models = _server(http).models
    return {"object": "list", "data": [_model_card(models, name) for name in models.paths]}


@router.get("/v1/models/{name}")
async def show_model(http: Request, name: str) -> dict[str, Any]:
    """One of the models."""
    models = _server(http).models
    if name not in models.paths:
        raise ApiError(404, f"no model {name!r}", param="model", code="model_not_found")
    return _model_card(models, name)


def _model_card(models: Models, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "regard",
        "loaded": name in models.loaded,
    }


# generation


def _check_body(body: Body) -> dict[str, str]:
    """Refuse fields that we cannot honour; report those that we ignore."""
    extra = body.model_extra or {}
    for name in REFUSED:
        if extra.get(name):
            raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported")
    ignored = body.ignored() if isinstance(body, Sampling) else list(extra)
    printable = [name for name in ignored[:20] if name.isascii() and name.isprintable()]
    return {"x-regard-ignored": ", ".join(printable)[:500]} if printable else {}


async def _unless_disconnected(http: Request, work: Awaitable[T]) -> T | None:
    """The result of the work; None, and the work is cancelled, if the client leaves."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    left = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for other in (task, left):
            other.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await left


async def _complete(
    http: Request, model: ServedModel, prepared: Sequence[Prepared]
) -> list[list[Continuation]] | None:
    """All continuations of several prompts; None if the client has left."""
    answers = _server(http).answers
    _submit(http, model, prepared)

    async def collect() -> list[list[Continuation]]:
        tasks = [
            asyncio.create_task(answers.complete(model, each.request, each.stops))
            for each in prepared
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            for each in prepared:
                answers.forget(each.request)

    return await _unless_disconnected(http, collect())


def _submit(http: Request, model: ServedModel, prepared: Sequence[Prepared]) -> None:
    """Queue all requests or none."""
    answers = _server(http).answers
    submitted: list[Prepared] = []
    try:
        for each in prepared:
            answers.submit(model, each.request)
            submitted.append(each)
    except BaseException:
        for each in submitted:
            answers.forget(each.request)
        raise


async def _pieces(
    http: Request, model: ServedModel, prepared: Sequence[Prepared]
) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several prompts as they come, with the number of the prompt."""
    answers = _server(http).answers
    try:
        if len(prepared) == 1:
            async for piece in answers.pieces(model, prepared[0].request, prepared[0].stops):
                yield 0, piece
        else:
            async for pair in _interleaved(answers, model, prepared):
                yield pair
    finally:
        for each in prepared:
            answers.forget(each.request)


async def _interleaved(
    answers: Answers, model: ServedModel, prepared: Sequence[Prepared]
) -> AsyncIterator[tuple[int, Piece]]:
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def read(number: int, each: Prepared) -> None:
        try:
            async for piece in answers.pieces(model, each.request, each.stops):
                queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(read(*pair)) for pair in enumerate(prepared)]
    left = len(tasks)
    try:
        while left:
            number, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield number, piece
    finally:
        for task in tasks:
            task.cancel()


def _event_stream(
    chunks: AsyncIterator[dict[str, Any]], headers: dict[str, str], *, done: bool = True
) -> StreamingResponse:
    """Server-sent events; an error after the headers is an event too."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event({"error": _as_api_error(error).error})
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


def _finish(reason: str | None) -> str | None:
    return "stop" if reason == "stop" else None if reason is None else "length"


def _usage(prepared: Sequence[Prepared], tokens: int) -> dict[str, int]:
    prompt = sum(each.prompt_tokens for each in prepared)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _includes_usage(body: Sampling) -> bool:
    return bool((body.stream_options or {}).get("include_usage"))


@router.post("/v1/completions")
async def completions(http: Request, body: CompletionBody) -> Response:
    """Continue a prompt, or each of several."""
    headers = _check_body(body)
    server = _server(http)
    model = await server.model(http, body.model)
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise ApiError(400, f"best_of={best_of} must be at least n={n}", param="best_of")
    if body.stream and best_of > n:
        raise ApiError(400, "best_of cannot be streamed", param="best_of")
    tokens = 16 if body.max_tokens is None else body.max_tokens
    if tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 needs echo", param="max_tokens")
    prompts = _as_prompts(body.prompt)
    prepared = [
        await asyncio.to_thread(
            prepare,
            model,
            prompt,
            body,
            tokens=max(1, tokens),
            n=best_of,
            logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
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
        _submit(http, model, prepared)
        return _event_stream(_completion_chunks(http, model, body, prepared, n, base), headers)
    answers = await _complete(http, model, prepared)
    if answers is None:
        return Response(status_code=499)
    choices, used = [], 0
    for number, (each, continuations) in enumerate(zip(prepared, answers, strict=True)):
        if tokens == 0:  # the engine generates at least one
            continuations = [Continuation(finish=one.finish) for one in continuations]
        used += sum(len(continuation.tokens) for continuation in continuations)
        if best_of > n:
            continuations = sorted(continuations, key=lambda c: -c.mean_logprob)[:n]
        for index, continuation in enumerate(continuations):
            choices.append(
                {
                    "index": number * n + index,
                    "text": (each.text if body.echo else "") + continuation.text,
                    "logprobs": _completion_logprobs(model, body, each, continuation),
                    "finish_reason": _finish(continuation.finish),
                }
            )
    return JSONResponse(
        {**base, "choices": choices, "usage": _usage(prepared, used)}, headers=headers
    )


async def _completion_chunks(
    http: Request,
    model: ServedModel,
    body: CompletionBody,
    prepared: Sequence[Prepared],
    n: int,
    base: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    used, begun = 0, set()
    async for number, piece in _pieces(http, model, prepared):
        if body.max_tokens == 0:  # the engine generates at least one
            piece.text, piece.tokens, piece.scores = "", [], []
        used += len(piece.tokens)
        each, index = prepared[number], number * n + piece.index
        text = piece.text
        if body.echo and index not in begun:
            text = each.text + text
        logprobs = None
        if body.logprobs is not None:
            first = body.echo and index not in begun
            logprobs = _logprob_table(model, each if first else None, piece.scores, body.logprobs)
        begun.add(index)
        if text or piece.finish or logprobs:
            choice = {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": _finish(piece.finish),
            }
            yield {**base, "choices": [choice]}
    if _includes_usage(body):
        yield {**base, "choices": [], "usage": _usage(prepared, used)}


def _as_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _completion_logprobs(
    model: ServedModel, body: CompletionBody, each: Prepared, continuation: Continuation
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    prompt = each if body.echo else None
    return _logprob_table(model, prompt, continuation.scores, body.logprobs)


def _logprob_table(
    model: ServedModel, prompt: Prepared | None, scores: Sequence[TokenScore], top: int
) -> dict[str, Any]:
    """Log-probabilities in the form of /v1/completions; with `prompt`, from its first token on."""
    rows: list[tuple[int, TokenScore | None]] = [(score.token, score) for score in scores]
    if prompt is not None:
        ids = prompt.request.prompt
        of_prompt = prompt.request.prompt_scores
        rows = [(ids[0], None), *((score.token, score) for score in of_prompt), *rows]
    tokens = [model.piece(token) for token, _ in rows]
    offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
    best: list[dict[str, float] | None] = []
    for _, score in rows:
        if score is None:
            best.append(None)
            continue
        table: dict[str, float] = {}
        for token, logprob in score.top[:top]:
            table.setdefault(model.piece(token), max(logprob, MIN_LOGPROB))
        best.append(table)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if score is None else max(score.logprob, MIN_LOGPROB) for _, score in rows
        ],
        "top_logprobs": best if top else None,
        "text_offset": offsets,
    }


@router.post("/v1/chat/completions")
async def chat_completions(http: Request, body: ChatBody) -> Response:
    """Answer the last message of a conversation."""
    headers = _check_body(body)
    model = await _server(http).model(http, body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    prepared = await _prepare_chat(
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
        _submit(http, model, [prepared])
        return _event_stream(_chat_chunks(http, model, body, prepared, base), headers)
    answers = await _complete(http, model, [prepared])
    if answers is None:
        return Response(status_code=499)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": _trim(continuation.text), "refusal": None},
            "logprobs": {"content": [_chat_logprob(model, score) for score in continuation.scores]}
            if body.logprobs
            else None,
            "finish_reason": _finish(continuation.finish),
        }
        for index, continuation in enumerate(answers[0])
    ]
    used = sum(len(continuation.tokens) for continuation in answers[0])
    return JSONResponse(
        {**base, "choices": choices, "usage": _usage([prepared], used)}, headers=headers
    )


async def _prepare_chat(
    model: ServedModel,
    body: Sampling,
    messages: Sequence[Message],
    tokens: int | None,
    logprobs: int | None,
) -> Prepared:
    pairs = [(message.role, message.text()) for message in messages]
    prompt, stops = await asyncio.to_thread(chat_prompt, model, pairs)
    return await asyncio.to_thread(
        prepare,
        model,
        prompt,
        body,
        tokens=tokens or 256,
        n=body.n or 1,
        logprobs=logprobs,
        more_stops=stops,
    )


def _trim(text: str) -> str:
    """An answer without the space between the name of the speaker and the text."""
    return text.removeprefix(" ")


def _chat_logprob(model: ServedModel, score: TokenScore) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = model.piece(token)
        raw = list(model.tokenizer.token_bytes(token))
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": raw}

    return entry(score.token, score.logprob) | {
        "top_logprobs": [entry(token, logprob) for token, logprob in score.top]
    }


async def _chat_chunks(
    http: Request,
    model: ServedModel,
    body: ChatBody,
    prepared: Prepared,
    base: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    used, begun = 0, set()
    for index in range(prepared.request.n):
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**base, "choices": [choice]}
    async for _, piece in _pieces(http, model, [prepared]):
        used += len(piece.tokens)
        text = piece.text
        if text and piece.index not in begun:
            text = _trim(text)
            begun.add(piece.index)
        logprobs = None
        if piece.scores and body.logprobs:
            logprobs = {"content": [_chat_logprob(model, score) for score in piece.scores]}
        if text or logprobs:
            choice = {
                "index": piece.index,
                "delta": {"content": text},
                "logprobs": logprobs,
                "finish_reason": None,
            }
            yield {**base, "choices": [choice]}
        if piece.finish:
            choice = {
                "index": piece.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": _finish(piece.finish),
            }
            yield {**base, "choices": [choice]}
    if _includes_usage(body):
        yield {**base, "choices": [], "usage": _usage([prepared], used)}


@router.post("/v1/responses")
async def responses(http: Request, body: ResponsesBody) -> Response:
    """Answer a text or a conversation, in the form of OpenAI's newer API."""
    headers = _check_body(body)
    model = await _server(http).model(http, body.model)
    messages = (
        [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    if body.instructions:
        messages = [Message(role="system", content=body.instructions), *messages]
    if (body.n or 1) > 1:
        raise ApiError(400, "n must be 1", param="n")
    prepared = await _prepare_chat(model, body, messages, body.max_output_tokens, None)
    identity = f"resp_{secrets.token_hex(12)}"
    item = f"msg_{secrets.token_hex(12)}"
    created = int(time.time())

    def response(text: str | None, status: str, used: int) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        output = {
            "type": "message",
            "id": item,
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
        usage = _usage([prepared], used)
        return {
            "id": identity,
            "object": "response",
            "created_at": created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model.name,
            "output": [] if text is None else [output],
            "parallel_tool_calls": False,
            "temperature": body.temperature if isinstance(body.temperature, float) else None,
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p if isinstance(body.top_p, float) else None,
            "metadata": {},
            "usage": None
            if text is None
            else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": used,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def status(finish: str | None) -> str:
        return "completed" if _finish(finish) == "stop" else "incomplete"

    async def events() -> AsyncIterator[dict[str, Any]]:
        number = 0

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **fields}

        place = {"item_id": item, "output_index": 0, "content_index": 0}
        empty: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        message = {"type": "message", "id": item, "role": "assistant"}
        yield event("response.created", response=response(None, "in_progress", 0))
        yield event(
            "response.output_item.added",
            output_index=0,
            item={**message, "status": "in_progress", "content": []},
        )
        yield event("response.content_part.added", **place, part=empty)
        text, used, finish = "", 0, None
        async for _, piece in _pieces(http, model, [prepared]):
            used += len(piece.tokens)
            added = piece.text if text else _trim(piece.text)
            text, finish = text + added, piece.finish or finish
            if added:
                yield event("response.output_text.delta", **place, delta=added, logprobs=[])
        yield event("response.output_text.done", **place, text=text, logprobs=[])
        yield event("response.content_part.done", **place, part={**empty, "text": text})
        final = response(text, status(finish), used)
        yield event("response.output_item.done", output_index=0, item=final["output"][0])
        kind = "response.completed" if final["status"] == "completed" else "response.incomplete"
        yield event(kind, response=final)

    if body.stream:
        _submit(http, model, [prepared])
        return _event_stream(events(), headers, done=False)
    answers = await _complete(http, model, [prepared])
    if answers is None:
        return Response(status_code=499)
    (continuation,) = answers[0]
    text, finish = _trim(continuation.text), continuation.finish
    return JSONResponse(response(text, status(finish), len(continuation.tokens)), headers=headers)


# text and ids


@router.post("/tokenize")
async def tokenize(http: Request, body: TokenizeBody) -> dict[str, Any]:
    """The ids of a text."""
    model = await _server(http).model(http, body.model)
    ids = await asyncio.to_thread(jobs.tokenize, model, body.prompt, body.add_special_tokens)
    return {"tokens": ids, "count": len(ids), "max_model_len": model.context}


@router.post("/detokenize")
async def detokenize(http: Request, body: DetokenizeBody) -> dict[str, Any]:
    """The text of ids."""
    model = await _server(http).model(http, body.model)
    return {"prompt": await asyncio.to_thread(jobs.detokenize, model, body.tokens)}


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request) -> dict[str, Any]:
    """The special tokens of the first model, as lm-eval asks for them."""
    model = await _server(http).model(http, None)
    return jobs.tokenizer_info(model)


# other tasks


@router.post("/v1/embeddings")
async def embeddings(http: Request, body: EmbeddingsBody) -> Response:
    """A vector for each text: the mean of the hidden states, with length 1."""
    headers = _check_body(body)
    server = _server(http)
    model = await server.model(http, body.model)
    vectors, used = await server.job(jobs.embed, model, _as_prompts(body.input))
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
    usage = {"prompt_tokens": used, "total_tokens": used}
    answer = {"object": "list", "data": data, "model": model.name, "usage": usage}
    return JSONResponse(answer, headers=headers)


@router.post("/translate")
async def translate(http: Request, body: TranslateBody) -> dict[str, Any]:
    """Translate a sentence, or each of several, by beam search."""
    server = _server(http)
    model = await server.model(http, body.model)
    texts = [body.text] if isinstance(body.text, str) else body.text
    found = await server.job(jobs.translate, model, texts, body.beam, body.length_penalty)
    return {"model": model.name, "translations": found}


@router.post("/predict")
async def predict(http: Request, body: PredictBody) -> dict[str, Any]:
    """The prediction of the model's task for a text, or for each of several."""
    server = _server(http)
    model = await server.model(http, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    return {
        "model": model.name,
        "predictions": await server.job(jobs.predict, model, texts, body.top),
    }


@router.post("/explain")
async def explain(http: Request, body: ExplainBody) -> dict[str, Any]:
    """Attention maps of a text, the likeliest next tokens, and what each sampler does."""
    server = _server(http)
    _check_body(body)
    model = await server.model(http, body.model)
    explained = await server.job(
        jobs.explain, model, body.text, body.layer, body.top, body.tokens, body
    )
    return {"model": model.name, **explained}
