"""/v1/responses: OpenAI's Responses API, text only."""

import secrets
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from regard.serve.api_errors import ApiError
from regard.serve.routes.chat import prepare_chat, trim
from regard.serve.schema import Message, ResponsesBody
from regard.serve.service import check_body, service_of
from regard.serve.streaming import (
    complete,
    deltas,
    event_stream,
    openai_finish_reason,
    submit,
    usage_of,
)

router = APIRouter()


@router.post("/v1/responses")
async def responses(http: Request, body: ResponsesBody) -> Response:
    """Answer a text or a conversation, in the form of OpenAI's Responses API."""
    headers = check_body(body)
    model = await service_of(http).model(http, body.model)
    messages = (
        [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    if body.instructions:
        messages = [Message(role="system", content=body.instructions), *messages]
    if (body.n or 1) > 1:
        raise ApiError(400, f"n={body.n} must be 1", param="n")
    if body.text is not None and body.text.format is not None:
        body.response_format = body.text.format
    prepared = await prepare_chat(model, body, messages, body.max_output_tokens, None)
    response_id = f"resp_{secrets.token_hex(12)}"
    item_id = f"msg_{secrets.token_hex(12)}"
    created = int(time.time())

    def response(text: str | None, status: str, tokens: int) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        output = {
            "type": "message",
            "id": item_id,
            "status": status,
            "role": "assistant",
            "content": [part],
        }
        usage = usage_of([prepared], tokens)
        return {
            "id": response_id,
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
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def status(reason: str | None) -> str:
        return "completed" if openai_finish_reason(reason) == "stop" else "incomplete"

    async def events() -> AsyncIterator[dict[str, Any]]:
        sequence_numbers = count()

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": kind, "sequence_number": next(sequence_numbers), **fields}

        location = {"item_id": item_id, "output_index": 0, "content_index": 0}
        empty: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        message = {"type": "message", "id": item_id, "role": "assistant"}
        yield event("response.created", response=response(None, "in_progress", 0))
        yield event(
            "response.output_item.added",
            output_index=0,
            item={**message, "status": "in_progress", "content": []},
        )
        yield event("response.content_part.added", **location, part=empty)
        text, tokens, reason, has_begun = "", 0, None, False
        async for _, delta in deltas(http, model, [prepared]):
            tokens += len(delta.tokens)
            added = delta.text if has_begun else trim(delta.text)
            has_begun = has_begun or bool(delta.text)
            text, reason = text + added, delta.finish_reason or reason
            if added:
                yield event("response.output_text.delta", **location, delta=added, logprobs=[])
        yield event("response.output_text.done", **location, text=text, logprobs=[])
        yield event("response.content_part.done", **location, part={**empty, "text": text})
        final = response(text, status(reason), tokens)
        yield event("response.output_item.done", output_index=0, item=final["output"][0])
        kind = "response.completed" if final["status"] == "completed" else "response.incomplete"
        yield event(kind, response=final)

    if body.stream:
        submit(http, model, [prepared])
        return event_stream(events(), headers, done=False)
    ((continuation,),) = await complete(http, model, [prepared])
    text, reason = trim(continuation.text), continuation.finish_reason
    return JSONResponse(response(text, status(reason), len(continuation.tokens)), headers=headers)
