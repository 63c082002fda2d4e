"""Start the HTTP server: uvicorn with one process, one event loop and the engine thread."""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from regard.errors import ConfigError
from regard.serve.app import create_app
from regard.serve.engine import EngineConfig
from regard.serve.middleware import LOOPBACK, MAX_CONNECTIONS, DeadlineProtocol

DRAIN_SECONDS = 25  # for running requests after SIGTERM


class DrainingServer(uvicorn.Server):
    """A server whose /health returns 503 while it shuts down."""

    app: FastAPI

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new connections and finish running requests; a second signal ends at once."""
        self.app.state.service.drain(DRAIN_SECONDS)
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(
    paths: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    config: EngineConfig | None = None,
    device: str = "auto",
    idle: float | None = None,
    create: Callable[..., FastAPI] = create_app,
) -> DrainingServer:
    """Make a server, which `run_server` starts; `create` makes its application."""
    if not paths:
        raise ConfigError("give a run, or a folder with runs")
    if api_key is not None and not api_key:
        raise ConfigError("the API key is empty; give one with at least one character")
    if not is_loopback(host) and api_key is None:
        raise ConfigError(
            f"host={host} lets other machines connect, so the server needs an API key;\n"
            "give --api-key KEY, or set REGARD_API_KEY"
        )
    _check_address(host, port)
    allowed_hosts = LOOPBACK if is_loopback(host) else None
    app = create(
        [Path(path) for path in paths],
        config,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
        device=device,
        idle=idle,
    )
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=DeadlineProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=DRAIN_SECONDS + 3,  # time to send errors to the last requests
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = DrainingServer(settings)
    server.app = app
    return server


def _check_address(host: str, port: int) -> None:
    """Raise `ConfigError` if the port cannot be bound; uvicorn would exit with a traceback."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {reason};\n"
                "give another --port (0: any free one) or --host"
            ) from None


def run_server(server: DrainingServer, on_start: Callable[[str], None] | None = None) -> None:
    """Serve until a signal arrives; when the server is ready, call `on_start` with its address."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            # uvicorn has its own handlers while it serves, and raises the signal again at its end
            signal.signal(signum, lambda *_: None)
    asyncio.run(_run(server, on_start))


async def _run(server: DrainingServer, on_start: Callable[[str], None] | None) -> None:
    serve_task = asyncio.create_task(server.serve())
    while not server.started and not serve_task.done():
        await asyncio.sleep(0.01)
    if server.started:
        models = server.app.state.service.models
        if models.preload:
            models.release(await models.get(None))
        if on_start is not None:
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await serve_task
