"""Errors in the form of OpenAI's API."""

import re
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regard.errors import RegardError, shorten
from regard.serve.engine import QueueFull
from regard.serve.worker import EngineStopped

RETRY_AFTER = 1  # seconds that a client should wait when the queue is full
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


def as_api_error(error: Exception) -> ApiError:
    """Any exception as an answer; what is not expected has the status 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first = max(error.errors(), key=lambda each: len(each["loc"]))  # of the nearest form
        names = [str(part) for part in first["loc"] if _is_place(part)]
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


def _is_place(part: int | str) -> bool:
    """Whether a part of pydantic's location is a field or an index, not the name of a type."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part not in ("body", "str", "int", "float", "bool", "dict")


async def answer_error(http: Request, error: Exception) -> Response:
    """The handler of exceptions."""
    answer = as_api_error(error)
    headers = {"Retry-After": str(RETRY_AFTER)} if answer.status in (429, 503) else {}
    return JSONResponse({"error": answer.error}, answer.status, headers)
