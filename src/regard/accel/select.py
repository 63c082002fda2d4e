"""Choose the fastest decoder and training step for a model on its device, with the reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import nn

from regard.accel.description import UnsupportedModelError, inspect_decoder
from regard.accel.kernels import kernels_unsupported_reason
from regard.accel.onednn import attach_onednn_weights, copied_bytes
from regard.accel.onednn_matmul import is_onednn_faster
from regard.accel.packed_decoder import PackedDecoder
from regard.accel.support import (
    cpu_unsupported_reason,
    packed_unsupported_reason,
    triton_unsupported_reason,
)
from regard.config import TrainConfig
from regard.errors import ConfigError
from regard.models.base import Language
from regard.models.transformer import Transformer

INT4_UNSUPPORTED = "int4 is not supported here: {}; leave it out"


@dataclass(frozen=True, slots=True)
class DecodingPath:
    """The path by which a model decodes on its device, and why the faster ones do not apply.

    triton      every layer in a few Triton kernels, or one row in one CUDA kernel
                (`TritonDecoder`)
    packed_cpu  packed weights and one workspace, in as few calls as possible (`CpuDecodeStep`)
    packed      packed weights, in plain torch (`PackedDecoder`)
    plain       the model itself
    """

    name: Literal["triton", "packed_cpu", "packed", "plain"]
    language: Language
    unsupported_reasons: Mapping[str, str] = field(default_factory=dict)  # of each faster path


def decoding_path(
    model: Language,
    *,
    int8: bool = False,
    float16: bool = False,
    int4: bool = False,
    free_memory: int = 0,
) -> DecodingPath:
    """The fastest decoder of a model on its device.

    The model's weights are packed in place: parameters keep their names and values, but become
    views of larger tensors. With `int8`, `int4` or, on a CPU, `float16`, decode steps use weights
    of that type; prefill uses them too where FBGEMM multiplies by them (int8:
    `fbgemm_linear.has_exact_int8`, float16: `has_fbgemm`), and the original weights elsewhere.
    Only the Triton path has int4: where it does not apply, `ConfigError` is raised.

    On a CPU, large float32 weights are copied to oneDNN's layout where that is faster and the
    copies take less than half of `free_memory` bytes; copying takes as long as 100 steps gain.
    """
    try:
        description = inspect_decoder(model)
    except UnsupportedModelError as error:
        if int4:
            raise ConfigError(INT4_UNSUPPORTED.format(error)) from None
        return DecodingPath("plain", model, {"packed": str(error)})
    transformer, unsupported_reasons = cast(Transformer, model), {}
    weight = transformer.embed.token.weight
    reason = kernels_unsupported_reason(weight) or triton_unsupported_reason(description)
    if reason is None:
        from regard.accel.triton_decoder import TritonDecoder

        return DecodingPath("triton", TritonDecoder(transformer, int8=int8, int4=int4))
    if int4:
        raise ConfigError(INT4_UNSUPPORTED.format(reason))
    unsupported_reasons["triton"] = reason
    if reason := packed_unsupported_reason(description):
        return DecodingPath("plain", model, {**unsupported_reasons, "packed": reason})
    decoder = PackedDecoder(transformer, int8=int8, float16=float16)
    if reason := cpu_unsupported_reason(description):
        return DecodingPath("packed", decoder, {**unsupported_reasons, "packed_cpu": reason})
    full_precision = not (int8 or float16)
    if full_precision and is_onednn_faster() and 0 < 2 * copied_bytes(transformer) < free_memory:
        attach_onednn_weights(decoder)
    return DecodingPath("packed_cpu", decoder, unsupported_reasons)


def pack(
    model: Language,
    *,
    int8: bool = False,
    float16: bool = False,
    int4: bool = False,
    free_memory: int = 0,
) -> Language:
    """The fastest decoder of a model, or the model itself; see `decoding_path`."""
    path = decoding_path(model, int8=int8, float16=float16, int4=int4, free_memory=free_memory)
    return path.language


@dataclass(frozen=True, slots=True)
class TrainingPath:
    """Whether a training step is compiled and captured as a CUDA graph, and if not, why."""

    compile: bool
    cuda_graph: bool
    unsupported_reasons: Mapping[str, str] = field(default_factory=dict)


def training_path(
    settings: TrainConfig, device: torch.device, model: nn.Module | None = None, *, ranks: int = 1
) -> TrainingPath:
    """How to run the training step of a model (None: not built yet) on a device.

    By default steps are compiled on CUDA only, where compiling pays off within about a minute.
    """
    if settings.compile == "off" or (settings.compile == "auto" and device.type != "cuda"):
        setting = f"train.compile={settings.compile} on {device.type}"
        return TrainingPath(False, False, {"compile": setting, "cuda_graph": "not compiled"})
    reason = None
    if device.type != "cuda":
        reason = f"{device.type} has no CUDA graphs"
    elif ranks > 1:
        reason = f"{ranks} ranks all-reduce gradients during a step"
    elif settings.activation_checkpointing:
        reason = "activation checkpointing resets random generators"
    elif getattr(model, "uses_packed_sequence", False):
        reason = "packed sequences need their lengths on the host"
    return TrainingPath(True, reason is None, {"cuda_graph": reason} if reason else {})
