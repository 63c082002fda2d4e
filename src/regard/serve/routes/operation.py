"""Routes for operators: health, metrics, version and the list of models."""

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from regard.serve.api_errors import ApiError
from regard.serve.models import Models
from regard.serve.service import SHUTTING_DOWN, service_of

router = APIRouter()


@router.get("/health")
async def health(http: Request) -> Response:
    """Whether the engine thread works."""
    service = service_of(http)
    problem = SHUTTING_DOWN if service.draining else service.problem()
    if problem is not None:
        return JSONResponse({"status": "error", "message": problem}, 503)
    return JSONResponse({"status": "ok", "models": list(service.models.loaded)})


@router.get("/metrics")
async def show_metrics(http: Request) -> Response:
    """The counters in the text format of Prometheus."""
    service = service_of(http)
    return PlainTextResponse(
        service.metrics.text(
            service.models, service.problem() is None, service.async_engine.open_requests
        ),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of the library."""
    return {"version": metadata.version("regard")}


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """The models of the server."""
    models = service_of(http).models
    models.refresh()
    return {"object": "list", "data": [_model_card(models, name) for name in models.paths]}


@router.get("/v1/models/{name}")
async def show_model(http: Request, name: str) -> dict[str, Any]:
    """One of the models."""
    models = service_of(http).models
    models.refresh()
    if name not in models.paths:
        message = f"no model {name!r}; available: {', '.join(models.paths)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return _model_card(models, name)


def _model_card(models: Models, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "regard",
        "loaded": name in models.loaded,
    }
