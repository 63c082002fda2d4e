"""ASGI middleware: deadlines, body size limits, allowed hosts and the API key."""

import asyncio
import hmac
import json
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
BODY_SECONDS = 10.0  # for the body
SEND_BUFFER = 128 * 1024  # bytes that the kernel keeps for a client that does not read
SEND_SECONDS = 20.0  # within which a client must read MIN_READ bytes of the response
MIN_READ = 16 * 1024
MAX_BODY = 2 * 2**20  # bytes
MAX_DISCARDED = 16 * MAX_BODY  # bytes of a refused body that are read, so that the client sees why
MAX_VALUES = 300_000  # brackets, commas and colons of a body outside of its strings
MAX_HEADERS = 100
MAX_CONNECTIONS = 2000
RETRY_AFTER = 1  # seconds; sent with 429 and 503
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PUBLIC_PATHS = ("/health",)  # need no API key
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)  # of JSON


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines for sending headers and for reading the response.

    uvicorn 0.54 has none: a client that sends a byte now and then, or that never reads, would keep
    its connection.
    """

    _header_deadline: asyncio.TimerHandle | None = None
    _reader_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Limit the send buffer, and start the deadline for the headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused while anything is unsent
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        # LimitsMiddleware finds it as scope["state"]["connections"]
        self.app_state = {**self.app_state, "connections": self.connections}
        self._start_header_deadline()

    def data_received(self, data: bytes) -> None:
        """Start the deadline with a new request; cancel it when the headers are complete."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle:
            self._start_header_deadline()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_header_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._cancel_header_deadline()
        self._cancel_reader_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline of the reader."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Cancel the deadline of the reader: it has read everything."""
        self._cancel_reader_deadline()
        super().resume_writing()

    def _watch_reader(self, unread: int) -> None:
        """Drop the connection unless the reader makes progress."""
        self._reader_deadline = self.loop.call_later(SEND_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread > before - MIN_READ:
            self.transport.abort()
        else:
            self._watch_reader(unread)

    def _cancel_reader_deadline(self) -> None:
        if self._reader_deadline is not None:
            self._reader_deadline.cancel()
            self._reader_deadline = None

    def _start_header_deadline(self) -> None:
        if self._header_deadline is None:
            self._header_deadline = self.loop.call_later(HEADER_SECONDS, self._abort)

    def _cancel_header_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _abort(self) -> None:
        self._header_deadline = None
        if not self.transport.is_closing():
            self.transport.abort()


class LimitsMiddleware:
    """Refuses a wrong host, origin, API key or content type; limits the size and time of bodies."""

    def __init__(
        self,
        app: Any,
        *,
        api_key: str | None,
        allowed_hosts: tuple[str, ...] | None,
        count: Callable[[int], None],  # called with the status of every response
        public_paths: tuple[
            str, ...
        ] = PUBLIC_PATHS,  # need no API key; an entry ending in "/" includes all paths below it
    ) -> None:
        self.app, self.api_key, self.allowed_hosts, self.count = app, api_key, allowed_hosts, count
        self.public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        send = _count_responses(send, self.count)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, receive, *refusal)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive, MAX_BODY)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
            await _refuse(send, None, 408, message)
            return
        if body is None:
            await _refuse(send, receive, 413, f"the body has more than {MAX_BODY:,} bytes")
            return
        if isinstance(body, Disconnected):
            return
        if _count_values(body) > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES:,} values"
            await _refuse(send, None, 413, message)
            return
        with ExitStack() as scope["cleanup"]:  # callbacks that run after the response
            await self.app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> tuple[int, str] | None:
        if len(scope.get("state", {}).get("connections", ())) > MAX_CONNECTIONS:
            return 503, "the server has too many connections; try again later"
        if len(scope.get("headers", ())) > MAX_HEADERS:
            return 431, f"the request has more than {MAX_HEADERS} headers"
        host = headers.get(b"host", "")
        name = urlsplit(f"//{host}").hostname if _is_host(host) else None
        if self.allowed_hosts is not None and name not in self.allowed_hosts:
            return 403, f"the host name {host[:100]!r} is not allowed; use {self.allowed_hosts[0]}"
        origin = headers.get(b"origin")
        if origin is not None and (not _is_host(origin) or urlsplit(origin).netloc != host):
            return 403, "cross-origin requests are refused"
        if self.api_key is not None and not self._is_public(scope["path"]):
            scheme, _, token = headers.get(b"authorization", "").partition(" ")
            valid = hmac.compare_digest(token.encode(), self.api_key.encode())
            if scheme.lower() != "bearer" or not valid:
                return 401, "give the API key of this server: Authorization: Bearer KEY"
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

    def _is_public(self, path: str) -> bool:
        prefixes = tuple(
            entry for entry in self.public_paths if entry.endswith("/") and entry != "/"
        )
        return path in self.public_paths or path.startswith(prefixes)


def _is_host(text: str) -> bool:
    try:
        urlsplit(text if "//" in text else f"//{text}").hostname  # noqa: B018
    except ValueError:
        return False
    return True


class Disconnected:
    """Returned instead of a body if the client has disconnected."""


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


def _count_values(body: bytes) -> int:
    """The approximate number of values in a JSON body, counted without parsing it."""

    def count(text: bytes) -> int:
        return sum(map(text.count, (b"[", b"{", b",", b":")))

    return count(body) if count(body) <= MAX_VALUES else count(_STRING.sub(b"", body))


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body, which has been read, then the messages after it."""
    replayed = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal replayed
        if not replayed:
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _count_responses(send: Send, count: Callable[[int], None]) -> Send:
    """A `send` that counts responses."""

    async def counting_send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        await send(message)

    return counting_send


async def _refuse(send: Send, receive: Receive | None, status: int, message: str) -> None:
    """Answer with an error; then read the body and discard it, if `receive` is given.

    A client that is still sending its body would not see the error if the connection were closed.
    """
    code = {401: "invalid_api_key"}.get(status)
    kind = {413: "request_too_large", 503: "server_error"}.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if receive is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                await _discard_body(receive)
    await send({"type": "http.response.body", "body": b""})


async def _discard_body(receive: Receive) -> None:
    size, more = 0, True
    while more and size <= MAX_DISCARDED:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
