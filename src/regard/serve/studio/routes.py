"""The routes of the studio: the page, its files and the data that it shows."""

import asyncio
import mimetypes
import secrets
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from regard.api.model_info import presets
from regard.errors import ConfigError, unknown
from regard.explain.render.figure import CONTENT_SECURITY_POLICY
from regard.generate import SAMPLER_ORDERS
from regard.serve.api_errors import ApiError
from regard.serve.middleware import MAX_BODY
from regard.serve.service import service_of
from regard.serve.studio import inspection
from regard.serve.studio.bodies import (
    SETTING,
    SETTINGS,
    AttentionBody,
    DistributionBody,
    FigureBody,
    ResumeBody,
    TrainBody,
)
from regard.serve.studio.folder import RunsFolder, check_name
from regard.serve.studio.trainer import SUFFIXES, Busy, Trainer

PAGE = Path(__file__).with_name("page")
MAX_TEXT = MAX_BODY - 64 * 1024  # bytes of a text as JSON; the other fields are small
MAX_MAPS = 16  # pages of attention maps that are stored
MAX_MAP_CHARACTERS = 64_000_000  # of all these pages; 144 heads of 512 tokens have 28 million
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
router = APIRouter()


class Studio:
    """The state that the routes of the studio share."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self.trainer = Trainer(folder)
        self.maps: OrderedDict[str, str] = OrderedDict()  # pages by an unguessable name

    def store_page(self, page: str) -> str:
        """Store a page for the frame that loads it; return its name."""
        name = secrets.token_urlsafe(18)
        self.maps[name] = page
        while len(self.maps) > MAX_MAPS or (
            len(self.maps) > 1 and sum(map(len, self.maps.values())) > MAX_MAP_CHARACTERS
        ):
            self.maps.popitem(last=False)
        return name


def studio_of(http: Request) -> Studio:
    """The studio that answers a request."""
    studio: Studio = http.app.state.studio
    return studio


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """A file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    if name not in {path.name for path in PAGE.iterdir()}:
        raise ApiError(404, f"no file {name[:80]!r}")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    kind = "text/javascript" if name.endswith(".js") else kind
    return Response((PAGE / name).read_bytes(), media_type=kind, headers=SECURITY)


@router.get("/maps/{name}", include_in_schema=False)
async def maps_page(http: Request, name: str) -> Response:
    """A page of attention maps, for a sandboxed frame."""
    content = studio_of(http).maps.get(name)
    if content is None:
        raise ApiError(404, "this page of attention maps has expired; press Show again")
    policy = f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'self'; sandbox allow-scripts"
    headers = {**SECURITY, "Content-Security-Policy": policy}
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


@router.get("/studio/runs")
async def list_runs(http: Request) -> dict[str, Any]:
    """The runs of the folder, and the state of the training process."""
    studio = studio_of(http)
    return {
        "folder": str(studio.folder.path),
        "runs": await asyncio.to_thread(studio.folder.list),
        "training": studio.trainer.state(),
    }


@router.get("/studio/choices")
async def list_choices() -> dict[str, Any]:
    """Recipes, presets, figures, sampler orders, sliders, and the limits of uploaded texts."""
    return {
        "recipes": await asyncio.to_thread(inspection.list_recipes),
        "presets": presets(),
        "figures": inspection.list_figures(),
        "orders": list(SAMPLER_ORDERS),
        "sliders": inspection.list_sliders(),
        "suffixes": SUFFIXES,
        "max_bytes": MAX_TEXT,
    }


@router.get("/studio/runs/{name}")
async def show_run(http: Request, name: str) -> dict[str, Any]:
    """The curves and samples of a run, and the state of the training process."""
    studio = studio_of(http)
    state = studio.trainer.state()
    training = state["running"] and state["name"] == name
    return {
        **await asyncio.to_thread(partial(studio.folder.progress, name, training=training)),
        "training": state,
    }


@router.get("/studio/training")
async def show_training(http: Request) -> dict[str, Any]:
    """The state of the training process."""
    return studio_of(http).trainer.state()


@router.post("/studio/train")
async def train(http: Request, body: TrainBody) -> dict[str, Any]:
    """Train a new run on a text, or by a recipe."""
    trainer = studio_of(http).trainer
    for word in body.settings:
        key, separator, value = word.partition("=")
        if not separator or not SETTING.fullmatch(key) or "\0" in value:  # no process accepts NUL
            raise ConfigError(
                f"settings: {word[:80]!r} cannot be set here; use NAME=VALUE with a name of "
                f"{', '.join(SETTINGS)}"
            )
    check_name(body.name)
    if (body.text is None) == (body.recipe is None):
        raise ConfigError("text: give a text to train on, or a recipe")
    if body.recipe is None:
        text = body.text or ""
        if not text.strip():
            raise ConfigError("text: it is empty; paste some text or choose a file")
        start = partial(trainer.train_text, body.name, text, body.suffix, body.settings)
    else:
        recipes = await asyncio.to_thread(inspection.list_recipes)
        names = [recipe["name"] for recipe in recipes]
        if body.recipe not in names:
            raise ConfigError(unknown("recipe", body.recipe, names))
        start = partial(trainer.train_recipe, body.name, body.recipe, body.settings)
    try:
        await asyncio.to_thread(start)
    except Busy as error:
        raise ApiError(409, str(error), code="busy") from error
    return trainer.state()


@router.post("/studio/stop")
async def stop(http: Request) -> dict[str, Any]:
    """Tell the training process to save and end."""
    trainer = studio_of(http).trainer
    trainer.stop()
    return trainer.state()


@router.post("/studio/resume")
async def resume(http: Request, body: ResumeBody) -> dict[str, Any]:
    """Continue a run, or extend it to more steps."""
    trainer = studio_of(http).trainer
    overrides = [] if body.steps is None else [f"train.steps={body.steps}"]
    try:
        await asyncio.to_thread(trainer.resume, body.name, overrides)
    except Busy as error:
        raise ApiError(409, str(error), code="busy") from error
    return trainer.state()


@router.post("/studio/distribution")
async def distribution(http: Request, body: DistributionBody) -> dict[str, Any]:
    """The next-token distribution, and the distribution after each sampler."""
    service = service_of(http)
    model = await service.model(http, body.model)
    return await service.run_job(http, inspection.distribution, model, body)


@router.post("/studio/attention")
async def attention(http: Request, body: AttentionBody) -> dict[str, Any]:
    """Make a page of all attention maps of a text; return its URL path."""
    service, studio = service_of(http), studio_of(http)
    model = await service.model(http, body.name)
    texts = (body.text,) if body.second_text is None else (body.text, body.second_text)
    content, unknown_parts = await service.run_job(http, inspection.attention_page, model, texts)
    return {"page": f"/maps/{studio.store_page(content)}", "unknown": unknown_parts}


@router.post("/studio/figure")
async def draw_figure(http: Request, body: FigureBody) -> dict[str, Any]:
    """A figure of the lectures."""
    service = service_of(http)
    model = None if body.name is None else await service.model(http, body.name)
    return await service.run_job(http, inspection.draw_figure, body.figure, model, body.text)


@router.get("/studio/structure")
async def show_structure(http: Request, name: str) -> dict[str, Any]:
    """The diagram and the settings of a preset, or of a run if `name` is run:NAME."""
    return await asyncio.to_thread(inspection.structure, studio_of(http).folder, name)


@router.get("/studio/diff")
async def show_differences(http: Request, first: str, second: str) -> dict[str, Any]:
    """The settings in which two presets or runs differ."""
    return await asyncio.to_thread(inspection.differences, studio_of(http).folder, first, second)
