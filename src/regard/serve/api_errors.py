"""Errors in the form of OpenAI's API."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from regard.errors import RegardError, shorten
from regard.serve.engine import QueueFull
from regard.serve.middleware import RETRY_AFTER
from regard.serve.worker import EngineStopped

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "a field is invalid",
        401: "the API key is missing or invalid",
        403: "the host or the origin is not allowed",
        404: "there is no such model",
        408: "the body did not arrive in time",
        413: "the body is too large",
        415: "the body is not JSON",
        429: "the queue is full",
        431: "there are too many headers",
        503: "the engine has failed or hangs, a model cannot be loaded, or there are too many "
        "connections",
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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        # a message may quote a lone surrogate of the body, which UTF-8 cannot encode
        message = shorten(message).encode(errors="backslashreplace").decode()
        self.error = {"message": message, "type": kind, "param": param, "code": code}


def as_api_error(error: Exception) -> ApiError:
    """The `ApiError` of an exception; unexpected exceptions have the status 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        # of a union, the member whose type fits; else the longest location
        first = max(
            error.errors(),
            key=lambda entry: (not entry["type"].endswith("_type"), len(entry["loc"])),
        )
        if first["type"] == "json_invalid":
            position, reason = first["loc"][-1], first["ctx"]["error"]
            return ApiError(400, f"the body is not JSON: {reason}, at character {position}")
        names = [str(part) for part in first["loc"] if _is_field_or_index(part)]
        param = next((name for name in names if not name.isdigit()), None)
        return ApiError(400, f"{'.'.join(names[:3]) or 'the body'}: {first['msg']}", param=param)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), kind="rate_limit_exceeded", code="queue_full")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), kind="server_error", code="engine_stopped")
    if isinstance(error, RegardError | RecursionError):
        # messages begin with the setting, or with "unknown sampler 'x'"
        match = re.match(r"(?:unknown )?(\w+)(?:[:=]| '|\.\w)", str(error))
        return ApiError(400, str(error), param=match[1] if match else None)
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")


def _is_field_or_index(part: int | str) -> bool:
    """Whether a part of pydantic's location is a field or an index, not the name of a type."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part not in ("body", "str", "int", "float", "bool", "dict")


async def handle_error(http: Request, error: Exception) -> Response:
    """Exception handler of the application: respond with the error as JSON."""
    api_error = as_api_error(error)
    headers = dict(api_error.headers)
    if api_error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER)
    return JSONResponse({"error": api_error.error}, api_error.status, headers)
