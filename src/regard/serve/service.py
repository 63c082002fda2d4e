"""`Service`, the state that all routes share."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import Request

from regard.errors import RegardError
from regard.serve.api_errors import ApiError
from regard.serve.async_engine import AsyncEngine
from regard.serve.engine import EngineConfig, QueueFull
from regard.serve.metrics import Metrics
from regard.serve.models import Models, ServedModel
from regard.serve.schema import REFUSED, Body, Sampling

MAX_JOBS = 16  # translations, predictions and explanations that run or wait
SHUTTING_DOWN = "the server is shutting down"
T = TypeVar("T")


class Service:
    """The models, the engine thread and the job thread, which all routes share."""

    def __init__(
        self,
        paths: Sequence[Path],
        config: EngineConfig,
        *,
        device: str = "auto",
        idle: float | None = None,
        models_class: type[Models] = Models,
    ) -> None:
        self.async_engine = AsyncEngine()
        self.models = models_class(
            paths, self.async_engine.worker, config, device=device, idle=idle
        )
        self.metrics = Metrics()
        self.draining = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="regard-jobs")
        self._jobs = 0

    async def model(self, http: Request, name: str | None) -> ServedModel:
        """The model of a request; it is released after the response is sent."""
        try:
            model = await self.models.get(name)
        except KeyError:
            known = ", ".join(self.models.paths)
            message = f"no model {name!r}; available: {known}" if known else "there is no model yet"
            raise ApiError(404, message, param="model", code="model_not_found") from None
        except (RegardError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise ApiError(
                503, f"the model cannot be loaded: {error}", kind="server_error"
            ) from error
        http.scope["cleanup"].callback(self.models.release, model)
        return model

    async def run_job(self, http: Request, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the job thread; raise `QueueFull` if too many jobs wait.

        A job that has not begun is dropped if its client disconnects.
        """
        if self._jobs >= MAX_JOBS:
            raise QueueFull(f"the queue is full (at most {MAX_JOBS} jobs); try again later")
        self._jobs += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
            return await cancel_on_disconnect(http, future)
        finally:
            self._jobs -= 1

    def problem(self) -> str | None:
        """Why nothing can be generated; None if the engine works."""
        return self.async_engine.worker.problem()

    def drain(self, seconds: float) -> None:
        """Report at /health that the server is shutting down; fail requests after `seconds`."""
        self.draining = True
        self.async_engine.fail_after(seconds, SHUTTING_DOWN)

    def close(self) -> None:
        """End the threads."""
        self.async_engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


async def cancel_on_disconnect(http: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result; if the client disconnects, cancel it and raise."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait([task, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        return task.result()
    finally:
        for other in (task, disconnected):
            other.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await disconnected


def service_of(http: Request) -> Service:
    """The service of a request."""
    service: Service = http.app.state.service
    return service


def check_body(body: Body) -> dict[str, str]:
    """Refuse fields that are not supported; return a header that names the ignored ones."""
    extra = body.model_extra or {}
    for name in REFUSED:
        if extra.get(name):
            raise ApiError(
                400, f"{name} is not supported; leave it out", param=name, code="unsupported"
            )
    ignored = body.ignored_fields() if isinstance(body, Sampling) else list(extra)
    names = [name.strip() for name in ignored[:20] if name.isascii() and name.isprintable()]
    header = ", ".join(filter(None, names))[:500].strip()  # h11 refuses spaces at its ends
    return {"x-regard-ignored": header} if header else {}
