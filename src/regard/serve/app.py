"""The HTTP application: routes behind the middleware, with errors in the form of OpenAI's API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from regard.errors import RegardError
from regard.serve.api_errors import ERRORS, ApiError, handle_error
from regard.serve.engine import EngineConfig
from regard.serve.middleware import PUBLIC_PATHS, LimitsMiddleware
from regard.serve.models import Models
from regard.serve.routes import ROUTERS
from regard.serve.service import Service


def create_app(
    paths: Sequence[Path],
    config: EngineConfig | None = None,
    *,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] | None = None,
    device: str = "auto",
    idle: float | None = None,
    models_class: type[Models] = Models,
    public_paths: tuple[str, ...] = PUBLIC_PATHS,
) -> FastAPI:
    """Create the application; its `state.service` is the service of the routes.

    Requests need the `api_key`, except to `public_paths`. Requests to host names that are not
    `allowed_hosts` are refused. A model without a request for `idle` seconds is unloaded.
    """
    service = Service(
        paths, config or EngineConfig(), device=device, idle=idle, models_class=models_class
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.async_engine.start()
        unload_task = asyncio.create_task(service.models.unload_idle())
        yield
        unload_task.cancel()
        service.close()

    app = FastAPI(
        title="regard", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(
        LimitsMiddleware,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
        count=service.metrics.count,
        public_paths=public_paths,
    )
    for error in (
        Exception,
        ApiError,
        RegardError,
        RequestValidationError,
        HTTPException,
        RecursionError,
    ):
        app.add_exception_handler(error, handle_error)
    return app
