"""Images and their captions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch, CaptionBatch
from regard.data.captions import Captions, caption_tables, from_folder, from_table
from regard.data.columns import Roles
from regard.data.loader import RowLoader
from regard.data.table_files import is_table
from regard.data.tables import Table
from regard.errors import ConfigError, DataError
from regard.explain.attention import attention_maps
from regard.explain.labelled_maps import cross_attention_path
from regard.explain.token_map import PatchGridImage
from regard.generate import BeamSearch, Search
from regard.models.base import Language
from regard.models.build import config_table, resolve
from regard.models.captioner import CaptionerConfig
from regard.models.presets import ModelConfig
from regard.nn.state import ImageSource
from regard.pipelines.base import (
    CAPTIONING,
    EvalData,
    Inputs,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    validation_metrics,
    with_scheduled_sampling,
    with_task_options,
)
from regard.pipelines.batching import (
    describe_data,
    evenly_spaced_indices,
    rows_per_micro_batch,
    seeded_batches,
)
from regard.pipelines.images import image_files, input_pixels
from regard.pipelines.tokenizer_cache import train_cached_tokenizer
from regard.tasks import TASKS
from regard.tasks.caption import Caption
from regard.tasks.metrics import bleu, bleu_is_defined, chrf
from regard.text import Tokenizer

DEFAULT_ROWS = 64  # of a step, where train.batch is not set
SAMPLE_IMAGES = 4
NEIGHBOUR_SIDE = 16  # side in pixels of the images that the nearest-neighbour baseline compares


class CaptionsPipeline(Pipeline):
    """Images with captions, resized to `model.image_size`."""

    name: ClassVar[str] = "captions"
    data_description: ClassVar[str] = (
        "a folder of images, with a table of their file names and captions"
    )
    tokenizer_type: ClassVar[type | None] = Tokenizer
    exclusive: ClassVar[bool] = True
    predicts_from_files: ClassVar[bool] = True
    evaluates_with_search: ClassVar[bool] = True

    def recognizes(self, path: Path) -> bool:
        """A folder of images that contains a table of their names and captions."""
        return bool(caption_tables(path))

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """A file, or a folder of tables, but not a folder of images with its table."""
        return path.is_file() or (is_table(path) and not self.recognizes(path))

    def open(self, path: Path) -> Captions:
        """The images of a folder and their captions."""
        return from_folder(path)

    def from_table(self, table: Table, roles: Roles) -> Captions:
        """The images that a table names, and their captions."""
        return from_table(table, roles)

    def lowercase(self, data: Captions) -> Captions:
        """The captions in lower case."""
        return data.lowercase()

    def input_names(self, config: RunConfig) -> tuple[str, ...]:
        """An image."""
        return ("file",)

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs:
        """The image files of a folder."""
        return image_files(path)

    def defaults(self, data: Captions, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A recurrent network with soft attention over the regions of the image."""
        size = max(16, min(data.side, 128 if gpu else 64) // 8 * 8)
        longest = max(len(text.split()) for text in data.texts())
        return {
            "task": {"kind": "caption", "crop_padding": max(1, size // 16)},
            "data": {"tokenizer": {"kind": "word", "lower": True}},
            "model": {
                "family": "recurrent_captioner",
                "dim": 256 if gpu else 128,
                "image_size": size,
                "dropout": 0.2,
                "context": max(16, 2 * longest),
            },
            "train": {
                "steps": 4000 if gpu else 1500,
                "batch": 64,
                "lr": 2e-3,
                "ema": 0.99,
                "schedule": {"kind": "linear", "warmup": 100},
            },
        }

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """A smaller learning rate for Transformers."""
        transformer = isinstance(resolve(model, vocab_size=1), CaptionerConfig)
        return {"lr": 1e-3} if transformer else {}

    def train_tokenizers(
        self, config: RunConfig, train: Captions, validation: Captions, progress: Progress | None
    ) -> Tokenizer:
        """A tokenizer trained on the captions."""
        return train_cached_tokenizer(config.data.tokenizer, train, train.texts)

    def training_data(
        self,
        config: RunConfig,
        train: Captions,
        validation: Captions,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Random images, each with one of its captions."""
        settings = config.train
        rows = rows_per_micro_batch(settings, DEFAULT_ROWS, "captions")
        task = caption_task(config.task, tokenizers)
        model: Any = resolve(
            config.model, vocab_size=tokenizers.vocab_size, channels=train.channels
        )
        task.check_model(model)
        if task.crop_padding >= model.image_size:
            raise ConfigError(
                f"task.crop_padding={task.crop_padding} must be less than "
                f"image_size={model.image_size}"
            )
        mean, std = (task.mean, task.std) if task.mean else train.statistics(model.image_size)
        choice = with_task_options(config.task, {"mean": mean, "std": std})
        config = replace(config, task=choice, model=config_table(model))
        data = self.evaluation_data(config, validation, tokenizers)
        task = cast(Caption, data.task)
        examples = _Examples(train, tokenizers, model)
        loader = RowLoader(len(examples), rows, settings.seed)
        batch = seeded_batches(settings.seed, loader, partial(examples.batch, task, training=True))
        description = describe_data(train, validation, tokenizers)
        size, grid = f"{model.image_size} × {model.image_size}", f"{model.grid} × {model.grid}"
        description[0] += f"; resized to {size}"
        description.append(f"regions    {grid} of {model.patch_size} × {model.patch_size} pixels")
        if truncated := examples.truncated + data.too_long:
            description.append(f"truncated  {truncated:,} captions, to {model.context - 1} tokens")
        return TrainingData(
            **vars(data),
            batch=with_scheduled_sampling(config, task, batch),
            example_ids=loader.example_ids,
            all_batches=lambda: examples.sequential(task, rows, None),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Captions,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation images with all their captions."""
        task = caption_task(config.task, tokenizers)
        model: Any = resolve(config.model, vocab_size=tokenizers.vocab_size)
        if data.channels != model.channels:
            raise DataError(
                f"{data.name}: images have {data.channels} channels, but model.channels is "
                f"{model.channels}; convert the images"
            )
        examples = _Examples(data, tokenizers, model)
        rows = config.train.batch or DEFAULT_ROWS
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=lambda limit: examples.sequential(task, rows, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=examples.targets,
            too_long=examples.truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The captions that a model generates for a few validation images, and their references."""
        captions: Captions = data.validation_data
        rows = np.arange(min(SAMPLE_IMAGES, len(captions)))
        task, tokenizer = cast(Caption, data.task), cast(Tokenizer, data.tokenizers)
        pixels = captions.read(rows, cast(Any, data.model).image_size)
        generated = generate_captions(model, task, tokenizer, pixels, BeamSearch(1))
        return "\n".join(
            f"→ {text}\n= {captions.captions[row][0]}"
            for row, text in zip(rows.tolist(), generated, strict=True)
        )

    def evaluate(
        self,
        data: EvalData,
        model: nn.Module,
        device: torch.device,
        *,
        search: Search,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Loss, BLEU, chrF and exact match of the captions, and the scores of a baseline.

        The baseline is the caption of the nearest training image in pixel space. Where the data has
        bounding boxes, the `pointing_game` is evaluated too.
        """
        captions: Captions = data.validation_data
        task, tokenizer = cast(Caption, data.task), cast(Tokenizer, data.tokenizers)
        size = cast(Any, data.model).image_size
        generated: list[str] = []
        for start in range(0, len(captions), DEFAULT_ROWS):
            rows = np.arange(start, min(start + DEFAULT_ROWS, len(captions)))
            generated += generate_captions(
                model, task, tokenizer, captions.read(rows, size), search
            )
            if progress is not None:
                progress(CAPTIONING, len(generated), len(captions))
        metrics: dict[str, Any] = validation_metrics(data, model, device, None, progress)
        metrics |= _score(generated, captions)
        if captions.train is not None:
            nearest = nearest_captions(captions.train, captions)
            scores = _score(nearest, captions)
            metrics |= {f"nearest_{name}": score for name, score in scores.items()}
        if captions.boxes is not None:
            metrics["pointing_game"] = pointing_game(data, model)
        return metrics

    def predict(self, run: TrainedModel, input: Any, *, top: int) -> str:
        """The caption of an image, by beam search."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[str]:
        """The captions of several images."""
        tokenizer = cast(Tokenizer, run.tokenizers)
        task, captions = caption_task(run.config.task, tokenizer), list[str]()
        for start in range(0, len(inputs), DEFAULT_ROWS):
            images = inputs[start : start + DEFAULT_ROWS]
            pixels = np.concatenate([input_pixels(run.model, image) for image in images])
            captions += generate_captions(run.model, task, tokenizer, pixels, BeamSearch())
        return captions


def caption_task(choice: Choice, tokenizer: Tokenizer) -> Caption:
    """The task of a run on captions, with the ids that begin and end them."""
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    return cast(Caption, make(choice, TASKS, "task", **ids))


def image_source(model: nn.Module, task: Caption, pixels: NDArray[np.uint8]) -> ImageSource:
    """Images as a model reads them, on its device."""
    regions = cast(Any, model.config).regions
    images = task.normalize(torch.from_numpy(pixels))
    return ImageSource.of(images.to(next(model.parameters()).device), regions)


@torch.no_grad()
def generate_captions(
    model: nn.Module,
    task: Caption,
    tokenizer: Tokenizer,
    pixels: NDArray[np.uint8],
    search: Search,
) -> list[str]:
    """The caption of each image."""
    model.eval()
    language = cast(Language, model)
    results = search(
        language,
        [task.prompt] * len(pixels),
        max_new_tokens=cast(Any, model.config).context - 1,
        stop={task.eos_id},
        source=cast(Any, image_source(model, task, pixels)),
    )
    return [tokenizer.decode(hypotheses[0].ids) for hypotheses in results]


@torch.no_grad()
def caption_attention(model: nn.Module, source: ImageSource, ids: Tensor) -> Tensor:
    """The weights of the last cross-attention over the regions, for each token."""
    path = cross_attention_path(model)
    model.eval()
    return attention_maps(model, lambda: model(ids, source=source), pattern=path, call=None)[path]


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """An image as the model reads it, and the ids of its caption from BOS to EOS."""

    source: ImageSource
    ids: list[int]
    image: PatchGridImage


def caption_image(run: TrainedModel, image: Any, caption: str | None = None) -> CaptionedImage:
    """An image with its caption, by default the caption that the model generates."""
    model, tokenizer = run.model, cast(Tokenizer, run.tokenizers)
    task, pixels = caption_task(run.config.task, tokenizer), input_pixels(model, image)
    if caption is None:
        (caption,) = generate_captions(model, task, tokenizer, pixels, BeamSearch())
    grid = cast(Any, model.config).grid
    return CaptionedImage(
        image_source(model, task, pixels),
        [task.bos_id, *tokenizer.encode(caption), task.eos_id],
        PatchGridImage(torch.from_numpy(pixels[0]), (grid, grid)),
    )


def encode_words(
    tokenizer: Tokenizer, texts: Sequence[Sequence[str]]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The ids of each text, given as its words, and the index of the last token of each word."""
    encoded = tokenizer.encode_with_offsets([" ".join(words) for words in texts])
    result = []
    for words, (ids, offsets) in zip(texts, encoded, strict=True):
        ends = np.cumsum([len(word) + 1 for word in words]) - 1  # characters
        starts = np.array(offsets, np.int64).reshape(-1, 2)[:, 0]
        result.append((np.array(ids, np.int64), np.searchsorted(starts, ends) - 1))
    return result


def pointing_game(data: EvalData, model: nn.Module) -> float:
    """The pointing game (Zhang et al. 2016): how often attention points at the named object.

    A word is a hit if the region with its largest attention weight overlaps the bounding box of the
    object that the word names; the result is the fraction of hits. The model reads the reference
    captions. The weights are the mean over heads, in the last layer; the attention of a word is
    that of its last token.
    """
    captions: Captions = data.validation_data
    task, tokenizer = cast(Caption, data.task), cast(Tokenizer, data.tokenizers)
    config = cast(Any, data.model)
    hits = words = 0
    for start in range(0, len(captions), DEFAULT_ROWS):
        rows = np.arange(start, min(start + DEFAULT_ROWS, len(captions)))
        pixels = captions.read(rows, config.image_size)
        texts = [captions.captions[row][0].split() for row in rows.tolist()]
        sentences, last_tokens = zip(*encode_words(tokenizer, texts), strict=True)
        ids, _ = task.shift(sentences, max(map(len, sentences)) + 1)
        source = image_source(model, task, pixels)
        weights = caption_attention(model, source, ids.to(source.images.device))
        best = weights.mean(1).argmax(-1).cpu()  # (batch, time)
        region_size = captions.side / config.grid  # in pixels
        for index, row in enumerate(rows):
            for word, box in cast(Any, captions.boxes)[row].items():
                region = int(best[index, last_tokens[index][word]])
                top, left = (region_size * offset for offset in divmod(region, config.grid))
                rows_overlap = box[0] < top + region_size and top < box[2]
                columns_overlap = box[1] < left + region_size and left < box[3]
                hits += rows_overlap and columns_overlap
                words += 1
    if not words:
        raise DataError("nothing to measure: no word of the captions has a bounding box")
    return hits / words


def nearest_captions(train: Captions, captions: Captions) -> list[str]:
    """For each image, the caption of the nearest training image in pixel space (the baseline)."""

    def vectors(data: Captions) -> NDArray[np.float32]:
        pixels = [
            data.read(np.arange(start, min(start + 256, len(data))), NEIGHBOUR_SIDE)
            for start in range(0, len(data), 256)
        ]
        return np.concatenate(pixels).reshape(len(data), -1).astype(np.float32)

    train_vectors, queries = vectors(train), vectors(captions)
    squares = (train_vectors**2).sum(1)
    nearest = [int((squares - 2 * train_vectors @ image).argmin()) for image in queries]
    return [train.captions[row][0] for row in nearest]


def _score(generated: Sequence[str], captions: Captions) -> dict[str, float]:
    """Exact match with one of the captions, and BLEU and chrF with all of them, ignoring case.

    BLEU is left out where it is undefined.
    """
    max_references = max(map(len, captions.captions))
    lower = [[text.lower() for text in texts] for texts in captions.captions]
    generated = [text.lower() for text in generated]
    # sacreBLEU takes a list of the first references, a list of the second references, …
    references = [[texts[min(n, len(texts) - 1)] for texts in lower] for n in range(max_references)]
    hits = [text in texts for text, texts in zip(generated, lower, strict=True)]
    scores = {"exact_match": sum(hits) / len(hits)}
    if bleu_is_defined(*references):
        scores["bleu"] = bleu(generated, *references)[0]
    return {**scores, "chrf": chrf(generated, *references)[0]}


class _Examples:
    """The captions of a dataset as ids, each with the row of its image."""

    def __init__(self, data: Captions, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self.data, self.config = data, cast(Any, model)
        self.image_rows = np.array(
            [row for row, captions in enumerate(data.captions) for _ in captions], np.int64
        )
        ids = [np.array(row, np.int64) for row in tokenizer.encode_batch(data.texts())]
        max_tokens = self.config.context - 1  # 1 for EOS
        self.truncated = sum(len(row) > max_tokens for row in ids)
        self.ids = [row[:max_tokens] for row in ids]
        self.width = max(map(len, self.ids)) + 1
        self.targets = sum(map(len, self.ids)) + len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(
        self,
        task: Caption,
        rows: NDArray[np.int64],
        generator: torch.Generator,
        *,
        training: bool = False,
    ) -> CaptionBatch:
        """A batch of these captions."""
        pixels = self.data.read(self.image_rows[rows], self.config.image_size)
        sentences = [self.ids[row] for row in rows]
        examples = pixels, sentences, self.width, self.config.regions, training
        return task.collate(examples, generator)

    def sequential(self, task: Caption, rows: int, limit: int | None) -> Iterator[Batch]:
        """All captions once, or evenly spaced ones with about `limit` tokens."""
        count = None if limit is None else max(1, limit * len(self) // self.targets)
        indices = evenly_spaced_indices(len(self), count)
        for start in range(0, len(indices), rows):
            yield self.batch(task, indices[start : start + rows], torch.Generator())
