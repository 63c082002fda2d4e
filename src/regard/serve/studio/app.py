"""The application of the studio: the routes of the server, the page and the routes of the page."""

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI

from regard.errors import ConfigError
from regard.serve.app import create_app
from regard.serve.engine import EngineConfig
from regard.serve.middleware import PUBLIC_PATHS
from regard.serve.studio.folder import FolderModels
from regard.serve.studio.routes import Studio, router

# Open without an API key, because frames and <script> cannot send one: static files, and maps under
# unguessable names.
PAGE_PATHS = (*PUBLIC_PATHS, "/", "/page/", "/maps/")


def create_studio(
    paths: Sequence[Path],
    config: EngineConfig | None = None,
    *,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] | None = None,
    device: str = "auto",
    idle: float | None = None,
) -> FastAPI:
    """Create the application for one folder of runs; its `state.studio` is the `Studio`."""
    (path,) = paths
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; give a folder of runs")
    if (path / "config.json").is_file():
        raise ConfigError(f"{path} is a run; give the folder that it is in: {path.parent}")
    app = create_app(
        paths,
        config,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
        device=device,
        idle=idle,
        models_class=FolderModels,
        public_paths=PAGE_PATHS,
    )
    models = app.state.service.models
    assert isinstance(models, FolderModels)
    app.state.studio = Studio(models.folder)
    app.include_router(router)
    return app
