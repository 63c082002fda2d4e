"""Check that transformers, or PEFT for an adapter, computes the same outputs as our model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import kind_of
from regard.errors import CheckpointError
from regard.models.build import count_parameters
from regard.nn.state import Source
from regard.units import format_bytes

# For float32 outputs up to 10; larger than the rounding error of another summation order.
TOLERANCE = 1e-3
AUTO_CLASSES = {  # by architecture, or "images" for a ViT, and head of a model
    ("decoder", "linear"): "AutoModelForCausalLM",
    ("encoder-decoder", "linear"): "AutoModelForSeq2SeqLM",
    ("images", "classification"): "AutoModelForImageClassification",
    ("encoder", "masked"): "AutoModelForMaskedLM",
    **{
        (architecture, kind): f"AutoModelFor{name}"
        for architecture in ("decoder", "encoder")
        for kind, name in (
            ("classification", "SequenceClassification"),
            ("tag", "TokenClassification"),
            ("span", "QuestionAnswering"),
        )
    },
    **{
        (architecture, kind): "AutoModel"
        for architecture in ("decoder", "encoder", "encoder-decoder", "images")
        for kind in ("none", "pooled")
    },
    ("encoder", "none"): "AutoModelForTextEncoding",  # AutoModel, or the encoder of a T5
    ("encoder-decoder", "span"): "AutoModelForQuestionAnswering",
}
OUTPUTS = {"none": "last_hidden_state", "pooled": "pooler_output"}  # other heads: logits


def compare_unsupported_reason(
    config: Any, free_bytes: int, *, is_adapter: bool = False
) -> str | None:
    """The reason why `compare` cannot run for this model; None if it can."""
    for name in ("transformers", "peft") if is_adapter else ("transformers",):
        try:
            import_module(name)
        except ImportError:
            return f"{name} is not installed"
    if _architecture_and_head(config) not in AUTO_CLASSES:
        return "transformers has no auto class for such a model"
    copies = 2 + is_adapter  # of the model in float32; an adapter has a base
    needed = copies * 4 * count_parameters(config)
    if needed > free_bytes:
        return f"it needs {format_bytes(needed)} of memory, {format_bytes(free_bytes)} are free"
    return None


def compare(
    folder: Path, config: Any, load: Callable[[], nn.Module], adapter: Path | None = None
) -> float:
    """The largest absolute difference between the outputs of both libraries for random input.

    `load` returns the model that was exported to `folder`; or to `folder` and `adapter`, a PEFT
    folder for the model in `folder`.
    """
    import transformers

    architecture, kind = _architecture_and_head(config)
    model: Any = load().float().eval()
    with _silence(transformers), torch.no_grad():
        try:
            auto_class = getattr(transformers, AUTO_CLASSES[architecture, kind])
            hf_model = auto_class.from_pretrained(folder, dtype=torch.float32).eval()
            if adapter is not None:
                hf_model = _with_adapter(hf_model, adapter)
            inputs, forward = _random_inputs(config, architecture, hf_model.config)
            actual = _select_output(hf_model(**inputs), kind)
        except Exception as error:  # transformers does not document which
            message = str(error).strip().splitlines() or [""]
            library = "PEFT" if adapter else f"transformers {transformers.__version__}"
            raise CheckpointError(
                f"{library} cannot use the exported folder, so nothing was written:\n"
                f"{type(error).__name__}: {message[0]}"
            ) from error
        expected = model.head(forward(model))
    same_shape = actual.shape == expected.shape
    difference = float((actual - expected).abs().max()) if same_shape else torch.inf
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max()) / 10):
        raise CheckpointError(
            f"{'PEFT' if adapter else 'transformers'} opens the exported folder as "
            f"{type(hf_model).__name__}, but its outputs differ by {difference:.2g}; nothing was "
            "written"
        )
    return difference


def _architecture_and_head(config: Any) -> tuple[str, str]:
    images = getattr(config, "input_kind", "text") == "images"
    return "images" if images else config.architecture, kind_of(config.head)[0]


def _random_inputs(config: Any, architecture: str, hf_config: Any) -> tuple[dict[str, Tensor], Any]:
    """Random arguments for the transformers model, and a function that runs our model."""
    generator = torch.Generator().manual_seed(0)
    if architecture == "images":
        images = torch.randn(1, config.channels, *config.image_sides, generator=generator)
        return {"pixel_values": images}, lambda model: model(images)
    length = min(config.context, 16)
    # transformers masks the padding id, so the random ids must not contain it
    pad_id = -1 if hf_config.pad_token_id is None else hf_config.pad_token_id

    def random_ids(vocab_size: int) -> Tensor:
        ids = torch.randint(vocab_size, (1, length), generator=generator)
        return torch.where(ids == pad_id, (ids + 1) % vocab_size, ids)

    ids = random_ids(config.vocab_size)
    if architecture != "encoder-decoder":
        return {"input_ids": ids}, lambda model: model(ids)
    source_ids = random_ids(config.source_vocab_size or config.vocab_size)
    source = Source(source_ids, torch.tensor([length]))
    inputs = {"input_ids": source_ids, "decoder_input_ids": ids}
    return inputs, lambda model: model(ids, source=source)


def _select_output(output: Any, kind: str) -> Tensor:
    """The tensor that the head here computes."""
    if kind == "span":
        return torch.stack((output.start_logits, output.end_logits), -1)
    tensor: Tensor = getattr(output, OUTPUTS.get(kind, "logits"))
    return tensor


def _with_adapter(hf_model: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on Conv1D and on tied weights
        return peft.PeftModel.from_pretrained(hf_model, str(adapter)).eval()


@contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """Turn off the log messages and progress bars of transformers."""
    hf_logging = transformers.utils.logging
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
