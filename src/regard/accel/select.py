"""Choose the fastest decoder and training step for a model on its device, with the reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import nn

from regard.accel.coverage import cpu_decoder_obstacle, packing_obstacle, triton_obstacle
from regard.accel.description import NotCovered, describe
from regard.accel.kernels import kernels_obstacle
from regard.accel.packed_decoder import PackedDecoder
from regard.config import TrainConfig
from regard.models.base import Language
from regard.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class DecodingPath:
    """The path by which a model decodes on its device, and why the faster ones do not apply.

    triton      every layer in a few Triton kernels (`TritonDecoder`)
    packed_cpu  packed weights and one workspace, in as few calls as possible (`CpuDecoder`)
    packed      packed weights, in plain torch (`PackedDecoder`)
    plain       the model itself
    """

    name: Literal["triton", "packed_cpu", "packed", "plain"]
    language: Language
    obstacles: Mapping[str, str] = field(default_factory=dict)  # of each faster path


def decoding_path(model: Language, *, int8: bool = False) -> DecodingPath:
    """The fastest decoder of a model on its device.

    Its weights are packed in place: parameters keep their names and values, but become views of
    larger tensors. With `int8`, decode steps use int8 weights; prompts use the original ones.
    """
    try:
        description = describe(model)
    except NotCovered as reason:
        return DecodingPath("plain", model, {"packed": str(reason)})
    transformer, obstacles = cast(Transformer, model), {}
    obstacle = kernels_obstacle(transformer.embed.token.weight) or triton_obstacle(description)
    if obstacle is None:
        from regard.accel.triton_decoder import TritonDecoder

        return DecodingPath("triton", TritonDecoder(transformer, int8=int8))
    obstacles["triton"] = obstacle
    if obstacle := packing_obstacle(description):
        return DecodingPath("plain", model, {**obstacles, "packed": obstacle})
    decoder = PackedDecoder(transformer, int8=int8)
    if obstacle := cpu_decoder_obstacle(description):
        return DecodingPath("packed", decoder, {**obstacles, "packed_cpu": obstacle})
    return DecodingPath("packed_cpu", decoder, obstacles)


def pack(model: Language, *, int8: bool = False) -> Language:
    """The fastest decoder of a model, or the model itself; see `decoding_path`."""
    return decoding_path(model, int8=int8).language


@dataclass(frozen=True, slots=True)
class TrainingPath:
    """Whether a training step is compiled and captured as a CUDA graph, and if not, why."""

    compile: bool
    cuda_graph: bool
    obstacles: Mapping[str, str] = field(default_factory=dict)


def training_path(
    settings: TrainConfig, device: torch.device, model: nn.Module | None = None, *, ranks: int = 1
) -> TrainingPath:
    """How to run the training step of a model (None: not built yet) on a device.

    By default steps are compiled on CUDA only, where it pays off within about a minute.
    """
    if settings.compile == "off" or (settings.compile == "auto" and device.type != "cuda"):
        reason = f"train.compile={settings.compile} on {device.type}"
        return TrainingPath(False, False, {"compile": reason, "cuda_graph": "not compiled"})
    obstacle = None
    if device.type != "cuda":
        obstacle = f"{device.type} has no CUDA graphs"
    elif ranks > 1:
        obstacle = f"{ranks} ranks exchange gradients during a step"
    elif settings.activation_checkpointing:
        obstacle = "activation checkpointing resets random generators"
    elif getattr(model, "packs", False):
        obstacle = "packed sequences need their lengths on the host"
    return TrainingPath(True, obstacle is None, {"cuda_graph": obstacle} if obstacle else {})
