"""Whether another library opens what was written here, and computes the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import kind_of
from regard.errors import CheckpointError
from regard.models.build import count_parameters
from regard.nn.state import Source

LARGEST = 1e-3  # difference of float32 outputs of a size up to 10 that the order of sums explains
AUTO = {  # the class of transformers that opens any model of this shape and with this head
    ("decoder", "linear"): "AutoModelForCausalLM",
    ("encoder-decoder", "linear"): "AutoModelForSeq2SeqLM",
    ("images", "classify"): "AutoModelForImageClassification",
    ("encoder", "masked"): "AutoModelForMaskedLM",
    **{
        (shape, kind): f"AutoModelFor{name}"
        for shape in ("decoder", "encoder")
        for kind, name in (
            ("classify", "SequenceClassification"),
            ("tag", "TokenClassification"),
            ("span", "QuestionAnswering"),
        )
    },
    **{
        (shape, kind): "AutoModel"
        for shape in ("decoder", "encoder", "encoder-decoder", "images")
        for kind in ("none", "pooled")
    },
    ("encoder", "none"): "AutoModelForTextEncoding",  # as AutoModel, but for the encoder of T5
    ("encoder-decoder", "span"): "AutoModelForQuestionAnswering",
}
OUTPUTS = {"none": "last_hidden_state", "pooled": "pooler_output"}  # of all others: logits


def obstacle(config: Any, free: int) -> str | None:
    """Why `compare` cannot be asked about such a model, where so many bytes of memory are free."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "transformers is not installed"
    if _kind(config) not in AUTO:
        return "transformers opens no such model by itself"
    needed = 2 * 4 * count_parameters(config)  # two models in float32
    if needed > free:
        return f"it needs {needed / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB are free"
    return None


def compare(folder: Path, config: Any, load: Callable[[], nn.Module]) -> float:
    """The largest difference of the outputs for random input.

    `load` makes the model that was written to the folder.
    """
    import transformers

    shape, kind = _kind(config)
    model: Any = load().float().eval()
    with _quiet(transformers), torch.no_grad():
        try:
            opener = getattr(transformers, AUTO[shape, kind])
            theirs = opener.from_pretrained(folder, dtype=torch.float32).eval()
            given, read = _inputs(config, shape, theirs.config)
            found = _outputs(theirs(**given), kind)
        except Exception as error:  # theirs to know which
            why = str(error).strip().splitlines() or [""]
            raise CheckpointError(
                f"transformers {transformers.__version__} cannot use the exported folder, so "
                f"nothing was written:\n{type(error).__name__}: {why[0]}"
            ) from error
        wanted = model.head(read(model))
    difference = float((found - wanted).abs().max()) if found.shape == wanted.shape else torch.inf
    if not difference <= LARGEST * max(1.0, float(wanted.abs().max()) / 10):
        raise CheckpointError(
            f"transformers opens the exported folder as {type(theirs).__name__}, but its outputs "
            f"are off by {difference:.2g}; nothing was written"
        )
    return difference


def _kind(config: Any) -> tuple[str, str]:
    return getattr(config, "shape", "images"), kind_of(config.head)[0]


def _inputs(config: Any, shape: str, theirs: Any) -> tuple[dict[str, Tensor], Any]:
    """Random input for their model, and how ours takes the same."""
    generator = torch.Generator().manual_seed(0)
    if shape == "images":
        size = (1, config.channels, config.image_size, config.image_size)
        images = torch.randn(size, generator=generator)
        return {"pixel_values": images}, lambda model: model(images)
    length = min(config.context, 16)
    padding = -1 if theirs.pad_token_id is None else theirs.pad_token_id  # which they leave out

    def some(vocab_size: int) -> Tensor:
        ids = torch.randint(vocab_size, (1, length), generator=generator)
        return torch.where(ids == padding, (ids + 1) % vocab_size, ids)

    ids = some(config.vocab_size)
    if shape != "encoder-decoder":
        return {"input_ids": ids}, lambda model: model(ids)
    source = some(config.source_vocab_size or config.vocab_size)
    both = Source(source, torch.tensor([length]))
    return {"input_ids": source, "decoder_input_ids": ids}, lambda model: model(ids, source=both)


def _outputs(output: Any, kind: str) -> Tensor:
    if kind == "span":
        return torch.stack((output.start_logits, output.end_logits), -1)
    found: Tensor = getattr(output, OUTPUTS.get(kind, "logits"))
    return found


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Inside, transformers reports nothing: what is wrong shows in what it computes."""
    talk = transformers.utils.logging
    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()
