"""The figures of the lectures, made from a run, a preset or a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.api.explanation import source_and_translation
from regard.api.run import Run, load
from regard.config import RunConfig, make
from regard.data.text_files import looks_like_path
from regard.errors import ConfigError, DataError, unknown
from regard.explain.figures import FIGURES, FigureEntry
from regard.explain.figures.figure_model import FigureModel
from regard.explain.figures.panels import FigureData
from regard.explain.render.figure import check_suffix, encode, page, save, to_svg
from regard.hub.external_checkpoint import is_external_checkpoint
from regard.models.build import (
    build_model,
    config_table,
    count_parameters,
    family_of,
    is_fitted_without_gradients,
    resolve,
)
from regard.models.presets import PRESETS
from regard.nn.state import Source
from regard.text import PairTokenizers, Tokenizer, train_tokenizer
from regard.training.setup.device import pick_device
from regard.training.storage.run_folder import RunFolder, is_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PARAMETERS = 200_000_000  # parameters of an untrained model that is built for a figure
TASK_OF_ARCHITECTURE = {"decoder": "causal", "encoder": "masked", "cbow": "cbow"}
MAX_CHARACTERS = 5_000_000  # of a text file


@dataclass(frozen=True, slots=True, repr=False)
class LectureFigure:
    """A figure of the lectures: its data, drawn as text, SVG, HTML or with matplotlib."""

    name: str
    data: FigureData

    def __repr__(self) -> str:
        return f"LectureFigure({self.name!r}: {self.data.title})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return to_svg(self.figure())

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        """The figure as text for a terminal: tables, heat maps, bars and trees."""
        from regard.explain.render.panel_text import text

        return text(self.data, width=width, colour=colour)

    def figure(self) -> "Figure":
        """The figure as a matplotlib figure."""
        from regard.explain.render.panels import draw

        return draw(self.data)

    def to_dict(self) -> dict[str, Any]:
        """The data as plain lists and dicts."""
        return {"figure": self.name, **self.data.to_dict()}

    def save(self, path: Path | str) -> None:
        """Write the figure as .svg, .png, .pdf or .html, by the suffix of `path`."""
        suffix = Path(path).suffix
        check_suffix(suffix)
        if suffix != ".html":
            save(encode(self.figure(), suffix), path)
            return
        from html import escape

        numbers = f"<details><summary>as text</summary><pre>{escape(self.text())}</pre></details>"
        save(page(self.data.title, f"{to_svg(self.figure())}\n{numbers}").encode(), path)


def figures() -> dict[str, FigureEntry]:
    """The figures that `show` makes, by name."""
    return dict(FIGURES)


def show(name: str, *inputs: Run | Path | str, **options: Any) -> LectureFigure:
    """A figure of the lectures from runs, presets and texts; see docs/figures.md.

    Each input is a run (or the path of its folder), the name of a preset, whose weights are then
    random, a text, or the path of a text file.

    >>> variance = regard.show("score-variance", dims=[64])
    >>> round(variance.data.numbers["variance at d = 64, q · k"] / 64)
    1
    """
    if name not in FIGURES:
        raise ConfigError(unknown("figure", name, FIGURES))
    models: list[Run | Path | str] = []
    texts: list[str] = []
    for item in inputs:
        if _is_model(item):
            models.append(item)
        else:
            texts.append(_read_text(item))
    return figure(name, models, texts, **options)


def figure(
    name: str, models: list[Run | Path | str], texts: list[str], **options: Any
) -> LectureFigure:
    """A figure of these models and texts; unlike in `show`, a text is never read as a path."""
    if name not in FIGURES:
        raise ConfigError(unknown("figure", name, FIGURES))
    entry = FIGURES[name]
    for option in options:
        if option not in entry.options:
            raise ConfigError(f"{name}: {unknown('option', option, entry.options)}")
        if models and option in entry.without_model:
            raise ConfigError(
                f"{name}: {option} applies only without a run or preset; leave one of them out"
            )
    inputs = _inputs(name, entry, models, texts)
    shown_texts = texts or entry.default_texts
    figure_models = [_figure_model(model, shown_texts) for model in models]
    if "model" in inputs:
        inputs["model"] = figure_models[0]
    if "models" in inputs:
        inputs["models"] = figure_models
    elif entry.models and not models:
        inputs["models"] = [
            _model_of_run(_untrained_run(key, table, shown_texts), key, trained=False)
            for key, table in entry.models.items()
        ]
    table = {key: other.compute for key, other in FIGURES.items()}
    return LectureFigure(name, make({"kind": name, **options}, table, "figure", **inputs))


def _inputs(
    name: str, entry: FigureEntry, models: list[Run | Path | str], texts: list[str]
) -> dict[str, Any]:
    """The arguments of a figure for these models and texts; raise on too few and too many."""
    arguments: dict[str, list[Any]] = {"model": models, "text": texts}
    inputs: dict[str, Any] = {}
    kinds = {"model": "run or preset", "text": "text"}
    for single, values in arguments.items():
        plural = single + "s"
        key = plural if plural in entry.inputs else single
        if key not in entry.inputs:
            if values:
                excerpt = str(values[0])[:60]
                raise ConfigError(f"{name} takes no {kinds[single]}; leave out {excerpt!r}")
            continue
        if not values:
            if entry.inputs[key]:
                raise ConfigError(
                    f"{name} needs a {kinds[single]}: regard show {name} {entry.usage}"
                )
            continue
        if key == single and len(values) > 1:
            raise ConfigError(f"{name} takes one {kinds[single]}, not {len(values)}")
        inputs[key] = list(values) if key == plural else values[0]
    return inputs


def _is_model(item: Run | Path | str) -> bool:
    """Whether this is a run, the path of one, or the name of a preset."""
    if isinstance(item, Run):
        return True
    if str(item) in PRESETS:
        return True
    path = Path(item)
    try:
        exists, folder = path.exists(), path.is_dir()
    except OSError:  # a text that is longer than a path can be
        return False
    if folder:
        return True
    if not exists and (isinstance(item, Path) or looks_like_path(str(item))):
        raise ConfigError(
            f"{item} is neither a run, nor a text file, nor a preset (regard info lists presets)"
        )
    return False


def _read_text(item: Run | Path | str) -> str:
    """A text, or the text of a file."""
    try:
        if not Path(str(item)).is_file():
            return str(item)
    except OSError:
        return str(item)
    try:
        with open(str(item), encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise DataError(f"{item} is not UTF-8 text: byte {error.start}") from None
    if len(text) > MAX_CHARACTERS:
        raise DataError(f"{item} has more than {MAX_CHARACTERS:,} characters; give a part of it")
    return text


def _figure_model(item: Run | Path | str, texts: list[str]) -> FigureModel:
    """The model of a run, or of a preset with random weights and the words of the texts."""
    if isinstance(item, Run):
        return _model_of_run(item, item.folder.path.name, trained=True)
    if str(item) in PRESETS:
        name = str(item)
        return _model_of_run(_untrained_run(name, {"preset": name}, texts), name, trained=False)
    path = Path(item)
    if not is_run(path) and not is_external_checkpoint(path):
        raise ConfigError(f"{item} is a folder, but not a run; regard train writes runs")
    return _model_of_run(load(path), path.name, trained=True)


def _model_of_run(run: Run, name: str, *, trained: bool) -> FigureModel:
    def source(text: str) -> tuple[Source, list[int]]:
        encoded, target = source_and_translation(run, text)
        return encoded, target[: len(run._pair_task().prompt)]

    tokenizers = run.tokenizers
    pairs = isinstance(tokenizers, PairTokenizers)
    return FigureModel(
        name=name,
        module=run.model,
        tokenizer=tokenizers.target if isinstance(tokenizers, PairTokenizers) else tokenizers,
        trained=trained,
        methods=run.methods,
        normalize=run._normalize,
        attention=run.explain,
        states=run.states,
        gradients=run.gradients,
        source=source if pairs else None,
    )


def _untrained_run(name: str, table: Mapping[str, Any], texts: list[str]) -> Run:
    """A run of a preset whose weights are random; its vocabulary is the words of the texts."""
    config = resolve(table)
    architecture = getattr(config, "architecture", "decoder")
    if is_fitted_without_gradients(family_of(config)) or architecture not in TASK_OF_ARCHITECTURE:
        raise ConfigError(
            f"the preset {name} cannot be shown untrained; train it, and give the run, or give a "
            "decoder or an encoder, such as tiny-decoder or lstm"
        )
    tokenizer: Tokenizer = train_tokenizer("word", texts or ["a b c"])
    config = resolve(table, vocab_size=tokenizer.vocab_size)
    parameters = count_parameters(config)
    if parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"the preset {name} has {parameters:,} parameters; to show an untrained model, give "
            f"one with at most {MAX_PARAMETERS:,}, such as tiny-decoder"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build_model(config)
    run_config = RunConfig(
        name=name, task=TASK_OF_ARCHITECTURE[architecture], model=config_table(config)
    )
    device = pick_device("cpu")
    return Run(RunFolder(name), run_config, model.to(device).eval(), tokenizer, device)
