"""ASGI middleware: deadlines, body size limits, allowed hosts and the API key."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
BODY_SECONDS = 10.0  # for the body
SEND_SECONDS = 30.0  # for a client to read what was sent
MAX_BODY = 2 * 2**20  # bytes
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/health",)  # without a key


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a deadline for the headers of a request.

    uvicorn 0.54 has none: a client that sends a byte now and then would keep its connection.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request have come."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle:
            self._arm()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.abort()


class LimitsMiddleware:
    """Refuses what must not reach the routes, and reads bodies within limits."""

    def __init__(
        self,
        app: Any,
        *,
        key: str | None,
        hosts: tuple[str, ...] | None,
        count: Callable[[int], None],  # gets the status of every response
        open_paths: tuple[str, ...] = OPEN_PATHS,  # without a key; "…/" with all below it
    ) -> None:
        self.app, self.key, self.hosts, self.count = app, key, hosts, count
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        send = _with_deadline(send, self.count)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive, MAX_BODY)
        except TimeoutError:
            await _refuse(send, 408, f"the body did not come within {BODY_SECONDS:.0f} seconds")
            return
        if body is None:
            message = f"the body has more than {MAX_BODY:,} bytes"
            await _refuse(send, 413, message, kind="request_too_large")
            return
        if isinstance(body, Disconnected):
            return
        with ExitStack() as scope["at_end"]:  # of callbacks, when the response was sent
            await self.app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> tuple[int, str] | None:
        host = headers.get(b"host", "")
        name = urlsplit(f"//{host}").hostname if _is_host(host) else None
        if self.hosts is not None and name not in self.hosts:
            return 403, f"the host {host[:100]!r} is not served here; use {self.hosts[0]}"
        origin = headers.get(b"origin")
        if origin is not None and (not _is_host(origin) or urlsplit(origin).netloc != host):
            return 403, "requests from pages of other sites are not answered"
        if self.key is not None and not self._is_open(scope["path"]):
            scheme, _, given = headers.get(b"authorization", "").partition(" ")
            valid = hmac.compare_digest(given.encode(), self.key.encode())
            if scheme.lower() != "bearer" or not valid:
                return 401, "give the key of this server: Authorization: Bearer KEY"
        if scope["method"] in ("POST", "PUT", "PATCH"):
            length = headers.get(b"content-length", "0")
            if not length.isdecimal() or int(length[:20]) > MAX_BODY:
                return 413, f"the body has more than {MAX_BODY:,} bytes"
            kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return 415, "the body must be JSON: Content-Type: application/json"
            if headers.get(b"content-encoding", "identity") != "identity":
                return 415, "the body must not be compressed"
        return None

    def _is_open(self, path: str) -> bool:
        below = tuple(each for each in self.open_paths if each.endswith("/") and each != "/")
        return path in self.open_paths or path.startswith(below)


def _is_host(text: str) -> bool:
    try:
        urlsplit(text if "//" in text else f"//{text}").hostname  # noqa: B018
    except ValueError:
        return False
    return True


class Disconnected:
    """The client has left."""


async def _read_body(receive: Receive, limit: int) -> "bytes | Disconnected | None":
    """The body of a request; None if it is longer than `limit`."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return Disconnected()
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what comes after it."""
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _with_deadline(send: Send, count: Callable[[int], None]) -> Send:
    """A `send` that raises if the client does not read, and counts responses."""

    async def within(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        async with asyncio.timeout(SEND_SECONDS):
            await send(message)

    return within


async def _refuse(
    send: Send, status: int, message: str, *, kind: str = "invalid_request_error"
) -> None:
    code = {401: "invalid_api_key"}.get(status)
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
