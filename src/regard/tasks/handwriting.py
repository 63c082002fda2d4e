"""Handwriting: predict the next point of a drawing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import StrokeBatch
from regard.errors import ConfigError, unknown
from regard.models.presets import ModelConfig
from regard.nn.mixture_density import END, PEN_STATES
from regard.nn.state import Source
from regard.tasks.base import Task

MAX_BIAS = 1e6
Points = NDArray[np.float32]  # (points, 3): dx, dy, lift


@dataclass(frozen=True, kw_only=True)
class Handwriting(Task):
    r"""-log P(drawing) of pen strokes, point by point (Graves 2013).

        P(drawing) = prod_t P(dx_t, dy_t, pen_t | points before t)

    Offsets are divided by their standard deviation in the training data. At each step the model
    reads dx, dy and the pen state (one-hot) of the previous point, which are zeros at the first
    step, and the class of the drawing (one-hot), where drawings have classes. A model with a soft
    window also reads the text of the drawing. `loss` is the negative log-likelihood of a point in
    nats, by the density of the scaled offsets: it may be negative.
    """

    data_kind: ClassVar[str] = "strokes"
    target_name: ClassVar[str] = "points"
    loss_unit: ClassVar[str] = "nats per point"
    unit: ClassVar[str] = "nats per point"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    methods: ClassVar[tuple[str, ...]] = ("draw",)
    conditional: bool = True  # condition on the class, where the drawings have classes
    components: int = 20  # number of normal distributions in the mixture
    std: float | None = None  # standard deviation of offsets; None: that of the training data
    # maximum number of points of a drawing; None: the longest of the training data
    max_points: int | None = None
    # names of the classes; empty: those of the data
    class_names: list[str] = field(default_factory=list)
    alphabet: str = ""  # characters of the texts, if the model reads them; empty: those of the data

    def __post_init__(self) -> None:
        for name in ("components", "max_points"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"task.{name}={value} must be at least 1")
        if self.std is not None and not self.std > 0:
            raise ConfigError(f"task.std={self.std} must be more than 0")

    def model_settings(self) -> dict[str, Any]:
        """The fields of a model's configuration that follow from the task."""
        return {
            "vocab_size": len(self.alphabet) + 1,  # and the end of a text
            "input_dim": 2 + PEN_STATES + len(self.class_names),
            "head": {"kind": "mixture", "components": self.components},
            "context": self.max_points,
        }

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` unless the model is causal and reads vectors."""
        super().check_model(model)
        if not hasattr(model, "input_dim"):
            raise ConfigError(
                "needs a model that reads vectors; set model.family to recurrent, convolution, "
                "transformer or soft_window"
            )

    def collate(
        self,
        examples: tuple[Sequence[Points], Sequence[int] | None, Sequence[str] | None],
        generator: torch.Generator,
    ) -> StrokeBatch:
        """Right-padded and scaled drawings; the pen state of their last point is END."""
        drawings, labels, texts = examples
        assert self.std is not None
        lengths = torch.tensor(
            [min(len(points), self.max_points or len(points)) for points in drawings]
        )
        targets = torch.zeros(len(drawings), int(lengths.max()), 3)
        for row, (points, length) in enumerate(zip(drawings, lengths.tolist(), strict=True)):
            targets[row, :length] = torch.from_numpy(points[:length])
            if length == len(points):
                targets[row, length - 1, 2] = END
        targets[..., :2] /= self.std
        first = torch.zeros(len(drawings), 1, 2 + PEN_STATES)
        inputs = torch.cat([first, self.encode(targets[:, :-1])], 1)
        classes = None if labels is None or not self.class_names else torch.tensor(labels)
        text = None if texts is None or not self.alphabet else self.encode_texts(texts)
        return StrokeBatch(self.condition(inputs, classes), targets, lengths, text)

    def encode_texts(self, texts: Sequence[str]) -> Source:
        """The ids of the characters of texts, each followed by the id of the end, right-padded."""
        if unknown_characters := {*"".join(texts)} - {*self.alphabet}:
            raise ConfigError(
                f"{''.join(sorted(unknown_characters))[:20]!r} is not in the alphabet of the "
                f"training texts, {self.alphabet!r}; write the text without it"
            )
        end = len(self.alphabet)
        rows = [torch.tensor([*map(self.alphabet.index, text), end]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Source(ids, torch.tensor([len(row) for row in rows]))

    def encode(self, points: Float[Tensor, "batch time 3"]) -> Float[Tensor, "batch time 5"]:
        """The input of a point: scaled dx and dy, and the pen state as a one-hot vector."""
        pen = F.one_hot(points[..., 2].long(), PEN_STATES)
        return torch.cat([points[..., :2], pen.to(points)], -1)

    def condition(self, inputs: Tensor, classes: Int[Tensor, " batch"] | None) -> Tensor:
        """Inputs with the class of each drawing, one-hot."""
        if not self.class_names:
            return inputs
        if classes is None:
            raise ConfigError(
                f"this model is conditioned on a class; give one of {self.class_names[:10]}"
            )
        label = F.one_hot(classes, len(self.class_names)).to(inputs)
        return torch.cat([inputs, label.unsqueeze(1).expand(-1, inputs.shape[1], -1)], -1)

    def loss(self, model: nn.Module, batch: StrokeBatch) -> Float[Tensor, ""]:
        """Summed negative log-likelihood of the points."""
        source = {} if batch.text is None else {"source": batch.text}
        x = model(batch.inputs, **source)
        loss: Tensor = model.head.loss(x, batch.targets, batch.mask)  # type: ignore[operator, union-attr]
        return loss

    def count(self, batch: StrokeBatch) -> Int[Tensor, ""]:
        """The number of points."""
        return batch.lengths.sum()

    def class_index(self, name: str | None) -> int | None:
        """The index of a class; None for a model without classes."""
        if not self.class_names:
            if name:
                raise ConfigError(f"this model is not conditioned on classes; leave out {name!r}")
            return None
        if name is None:
            raise ConfigError(
                f"this model is conditioned on a class; give one of {', '.join(self.class_names)}"
            )
        if name not in self.class_names:
            raise ConfigError(unknown("class", name, self.class_names))
        return self.class_names.index(name)

    @torch.no_grad()
    def draw(
        self,
        model: Any,
        count: int,
        *,
        label: int | None = None,
        text: str | None = None,
        bias: float = 0.0,
        seed: int | None = None,
        steps: int | None = None,
        ignore_end: bool = False,
    ) -> list[Points]:
        """Sample drawings, in the unit of the data; each ends with END or after `steps` points.

        `ignore_end` continues after END, for tests.
        """
        if not 0 <= bias <= MAX_BIAS:
            raise ConfigError(f"bias={bias} must be at least 0 and at most {MAX_BIAS:g}")
        assert self.std is not None
        assert self.max_points is not None
        steps = self.max_points if steps is None else steps
        device = next(model.parameters()).device
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        model.eval()
        classes = None if label is None else torch.full((count,), label, device=device)
        if self.alphabet and not text:
            raise ConfigError("this model is conditioned on a text; give the text to write")
        source = self.encode_texts([text] * count).to(device) if text else None
        state = model.start(count, steps, source)
        inputs = torch.zeros(count, 1, 2 + PEN_STATES, device=device)
        sampled_points, ended = [], torch.zeros(count, dtype=torch.bool, device=device)
        for _ in range(steps):
            parameters, state = model.step(self.condition(inputs, classes), state)
            point = model.head.sample(parameters[:, 0], bias, generator)
            sampled_points.append(point)
            inputs = self.encode(point.unsqueeze(1))
            ended |= point[:, 2] == END
            if ended.all() and not ignore_end:
                break
        points = torch.stack(sampled_points, 1)
        ends = (points[..., 2] == END).cpu()
        points[..., :2] *= self.std
        points[..., 2].clamp_(max=1)
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, points.shape[1])
        rows = points.float().cpu().numpy()
        return [
            row if ignore_end else row[:length]
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]
