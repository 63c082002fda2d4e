"""Images and their classes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.batch import Batch, ImageBatch
from regard.data.images import (
    IDX_IMAGES,
    Images,
    Size,
    as_pixels,
    class_folders,
    file_pixels,
    from_folder,
    from_idx,
    from_npz,
    resize,
)
from regard.data.loader import RowLoader
from regard.data.tables import IMAGE_SUFFIXES
from regard.data.text_files import suffix
from regard.errors import ConfigError, DataError
from regard.models.build import config_table, resolve
from regard.models.vision import VisionConfig, VisionTransformer
from regard.pipelines.base import (
    EvalData,
    Inputs,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    best_classes,
    with_task_options,
)
from regard.pipelines.batching import (
    class_warnings,
    describe_classes,
    evenly_spaced_indices,
    rows_per_micro_batch,
)
from regard.seeds import batch_generator
from regard.tasks import TASKS, ImageClassification

DEFAULT_ROWS = 128  # of a step, where train.batch is not set
SAMPLE_IMAGES = 6


class ImagesPipeline(Pipeline):
    """Images with a class each, resized to `model.image_size`."""

    name: ClassVar[str] = "images"
    data_description: ClassVar[str] = "images and their classes: .npz, IDX, or a folder per class"
    exclusive: ClassVar[bool] = True
    predicts_from_files: ClassVar[bool] = True

    def recognizes(self, path: Path) -> bool:
        """An .npz file, a folder of MNIST's IDX files, or a folder of images for each class."""
        if not path.is_dir():
            return suffix(path) == ".npz"
        return _has_idx_files(path) or any(map(class_folders, (path, path / "train")))

    def reads_on_request(self, path: Path) -> bool:
        """False: only paths that are recognized hold images."""
        return False

    def open(self, path: Path) -> Images:
        """The images of a file or folder, with a validation or test split where it has one."""
        if not path.is_dir():
            return from_npz(path)
        return from_idx(path) if _has_idx_files(path) else from_folder(path)

    def validation_split(self, data: Images) -> Images:
        """The validation or test split, where the data has one."""
        return data if data.validation is None else data.validation

    def defaults(self, data: Images, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A small ViT with about 4 × 4 patches, on a GPU 8 × 8: their number determines the cost.

        If training takes more than ten epochs, random crops of padded images reduce overfitting.
        """
        side = min(data.side, 128 if gpu else 64)
        patch = max(2, side // (8 if gpu else 4))
        size = max(patch, side // patch * patch)
        dim, layers, heads = (192, 6, 6) if gpu else (96, 4, 3)
        steps, batch = (5000, 256) if gpu else (2000, 64)
        augment = steps * batch > 10 * len(data)
        task = "image_classification"
        return {
            "task": {"kind": task, "crop_padding": max(1, size // 16)} if augment else task,
            "model": {
                "preset": "tiny-vit",
                "image_size": size,
                "patch_size": patch,
                "dim": dim,
                "layers": layers,
                "heads": heads,
            },
            "train": {
                "steps": steps,
                "batch": batch,
                "lr": 3e-3 if gpu else 1e-2,
                "optimizer": "muon",
                "ema": 0.99,
                "schedule": {"kind": "linear", "warmup": 100},
            },
        }

    def preview(
        self, config: RunConfig, train: Images, validation: Images, tokenizers: None
    ) -> dict[str, str]:
        """Warnings about the classes."""
        names = image_task(config.task).resolve_class_names(train.class_names)
        warnings = _warnings(*(data.with_class_names(names) for data in (train, validation)))
        return {"warning": "; ".join(warnings)} if warnings else {}

    def training_data(
        self,
        config: RunConfig,
        train: Images,
        validation: Images,
        tokenizers: None,
        progress: Progress | None,
    ) -> TrainingData:
        """Random images, with the augmentation of the task."""
        settings = config.train
        rows = rows_per_micro_batch(settings, DEFAULT_ROWS, "images")
        task = image_task(config.task)
        names = task.resolve_class_names(train.class_names)
        train = train.with_class_names(names)
        model = resolve(config.model, channels=train.channels, head={"classes": len(names)})
        assert isinstance(model, VisionConfig)
        if (kind := kind_of(model.head)[0]) != "classification":
            raise ConfigError(
                f"to classify images, model.head must be 'classification', not {kind!r}"
            )
        size = height, width = model.image_sides
        if task.crop_padding >= min(size):
            raise ConfigError(
                f"task.crop_padding={task.crop_padding} must be less than image_size={min(size)}"
            )
        mean, std = (task.mean, task.std) if task.mean else train.statistics(size)
        derived = {"class_names": names, "mean": mean, "std": std}
        choice = with_task_options(config.task, derived)
        config = replace(config, task=choice, model=config_table(model))
        data = self.evaluation_data(config, validation, None)
        task = image_task(choice)
        loader = RowLoader(len(train), rows, settings.seed)
        warnings = _warnings(train, data.validation_data)

        def batch(index: int) -> Batch:
            indices = loader.examples(index)
            examples = train.read(indices, size), train.labels[indices], True
            return task.collate(examples, batch_generator(settings.seed, index))

        unchanged = train.is_square and size == (train.side, train.side)
        resize_note = "" if unchanged else f"; resized to {width} × {height}"
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: _sequential_batches(task, train, size, rows, None),
            description=[
                f"data       {train.description}{resize_note}",
                f"validation {validation.description}",
                describe_classes(names),
                *(f"warning    {line}" for line in warnings),
            ],
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Images,
        tokenizers: None,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation images; `task.class_names`, `task.mean` and `task.std` must be set."""
        task = image_task(config.task)
        images = data.with_class_names(task.class_names)
        model = resolve(config.model)
        assert isinstance(model, VisionConfig)
        if images.channels != model.channels:
            raise DataError(
                f"{images.name}: images have {images.channels} channels, but model.channels is "
                f"{model.channels}; convert the images"
            )
        if len(task.mean) != model.channels:
            raise ConfigError(
                f"task.mean={task.mean} must have a value for each of {model.channels} channels"
            )
        rows, size = max(DEFAULT_ROWS, config.train.batch or 0), model.image_sides
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=None,
            model=model,
            validation_batches=lambda limit: _sequential_batches(task, images, size, rows, limit),
            validation_data=images,
            validation_size=len(images),
            validation_targets=len(images),
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The true and the predicted class of a few validation images."""
        task = cast(ImageClassification, data.task)
        first = cast(ImageBatch, next(iter(data.validation_batches(SAMPLE_IMAGES))))
        batch = first.to(next(model.parameters()).device)
        predictions = classify(model, batch.images, task.class_names)
        return "\n".join(
            f"{task.class_names[target]} → {predicted} ({probability:.0%})"
            for target, ((predicted, probability),) in zip(
                batch.targets.tolist(), predictions, strict=True
            )
        )

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs:
        """The image files of a folder."""
        return image_files(path)

    def predict(
        self, run: TrainedModel, input: str | Path | NDArray[Any], *, top: int
    ) -> list[list[tuple[str, float]]]:
        """The most probable classes of an image file or array with their probabilities."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(
        self, run: TrainedModel, inputs: Sequence[Any], *, top: int
    ) -> list[list[list[tuple[str, float]]]]:
        """The classes of several images, `DEFAULT_ROWS` at a time."""
        model, task = cast(VisionTransformer, run.model), image_task(run.config.task)
        predictions = []
        for start in range(0, len(inputs), DEFAULT_ROWS):
            rows = [input_pixels(model, image) for image in inputs[start : start + DEFAULT_ROWS]]
            pixels = torch.from_numpy(np.concatenate(rows))
            images = task.normalize(pixels).to(next(model.parameters()).device)
            predictions += [[classes] for classes in classify(model, images, task.class_names, top)]
        return predictions


def input_pixels(model: nn.Module, image: str | Path | NDArray[Any]) -> NDArray[np.uint8]:
    """The pixels of an image file or array in the size that the model reads, a batch of one."""
    config = cast(Any, model.config)
    size = config.image_size
    sides = size if isinstance(size, int) else tuple(size)
    if isinstance(image, str | Path):
        return file_pixels(Path(image), sides, config.channels)[None]
    return resize(as_pixels(np.array(image)[None], "the image"), sides)


def image_files(folder: Path) -> Inputs:
    """The image files of a folder and its sub-folders, without hidden ones, as inputs."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give a folder of images, or each image itself")
    files = sorted(
        file
        for file in folder.rglob("*")
        if suffix(file) in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise DataError(f"{folder} holds no image ({' '.join(IMAGE_SUFFIXES)})")
    return Inputs(f"{len(files):,} images", (({"file": str(file)}, file) for file in files))


def _warnings(train: Images, validation: Images) -> list[str]:
    """Warnings about the classes of two splits, which have the same `class_names`."""
    labels = train.labels.tolist(), validation.labels.tolist()
    return class_warnings(train.class_names, *labels, "image")


def image_task(choice: Choice) -> ImageClassification:
    """The task of a run on images."""
    return cast(ImageClassification, make(choice, TASKS, "task"))


@torch.no_grad()
def classify(
    model: nn.Module, images: Tensor, names: list[str], top: int = 1
) -> list[list[tuple[str, float]]]:
    """The most probable classes of each image with their probabilities, best first."""
    model.eval()
    logits: Tensor = model.head(model(images))  # type: ignore[operator]
    return best_classes(logits, names, top)


def _has_idx_files(folder: Path) -> bool:
    return any(IDX_IMAGES.fullmatch(path.name) for path in folder.iterdir())


def _sequential_batches(
    task: ImageClassification, images: Images, size: Size, rows: int, limit: int | None
) -> Iterator[Batch]:
    """All images once, or about `limit` evenly spaced ones, since images may be sorted by class."""
    indices = evenly_spaced_indices(len(images), limit)
    for start in range(0, len(indices), rows):
        batch = indices[start : start + rows]
        yield task.collate(
            (images.read(batch, size), images.labels[batch], False), torch.Generator()
        )
