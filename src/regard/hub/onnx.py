"""Write a Transformer as an ONNX file, and compare ONNX Runtime's outputs with torch's.

The inputs of an encoder are `input_ids`, `lengths` and, if it has segments, `token_type_ids`. A
decoder has a KV cache: its inputs are `input_ids` and `past_key_values.N.key` and `.value`, and it
also returns `present.N.key` and `.value`, the past of the next call; the past of the first call has
length 0. An encoder-decoder takes the ids of both sides. All return `logits`. Every length and the
number of rows may vary from call to call.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from regard.errors import CheckpointError, RegardError
from regard.models.transformer import Transformer
from regard.nn.attention import Attention
from regard.nn.state import KVCache, Source, TransformerState

TOLERANCE = 1e-4  # for float32 outputs up to 10
# Rows, time and past of the inputs that are compared; the first are traced too.
SIZES = ((2, 5, 3), (1, 7, 0), (3, 1, 8))


class _Encoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, lengths: Tensor, *segments: Tensor) -> Tensor:
        segment_ids = segments[0] if segments else None
        hidden = self.model(input_ids, lengths=lengths, segments=segment_ids)
        logits: Tensor = self.model.head(hidden)
        return logits


class _EncoderDecoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, lengths: Tensor, decoder_input_ids: Tensor) -> Tensor:
        source = Source(input_ids, lengths)
        logits: Tensor = self.model.head(self.model(decoder_input_ids, source=source))
        return logits


class _Decoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        (rows, time), length = input_ids.shape, past[0].shape[2]
        padded_past = [
            torch.cat((part, part.new_zeros(rows, part.shape[1], time, part.shape[3])), 2)
            for part in past
        ]
        indices = range(0, len(padded_past), 2)
        caches = [KVCache(*padded_past[index : index + 2]) for index in indices]
        lengths = torch.full((rows,), length, dtype=torch.int64)
        state = TransformerState(caches, lengths, length + time, length)
        logits, _ = self.model.step(input_ids, state, all_logits=True)
        return logits, [part for cache in caches for part in (cache.keys, cache.values)]


def write_onnx(model: Transformer, path: Path) -> float:
    """Write the model to `path`; return how far ONNX Runtime's outputs are from torch's.

    This is the largest difference; for outputs above 10, divided by a tenth of the largest one.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 -- torch.onnx needs it
    except ImportError as error:
        raise RegardError(
            f"ONNX files need {error.name}; install it with: pip install 'regard[onnx]'"
        ) from error
    module, names, dims = _export_module(model)
    inputs = _random_inputs(model, *SIZES[0])
    with _silence(), torch.no_grad():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            input_names=names[0],
            output_names=names[1],
            dynamic_shapes=dims,
            verbose=False,
        )
        assert program is not None
        program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    difference = 0.0
    for rows, time, past in SIZES:
        inputs = _random_inputs(model, rows, time, past)
        with torch.no_grad():
            expected = _flatten(module(*inputs))
        feed = dict(zip(names[0], (x.numpy() for x in _flatten(inputs)), strict=True))
        for actual, output in zip(session.run(None, feed), expected, strict=True):
            if not actual.size:
                continue
            deviation = (torch.from_numpy(actual) - output).abs().max().item()
            difference = max(difference, deviation / max(1.0, output.abs().max().item() / 10))
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"ONNX Runtime's outputs differ by {difference:.2g}, more than {TOLERANCE}; "
            "nothing was written"
        )
    return difference


def _export_module(model: Transformer) -> tuple[nn.Module, tuple[list[str], list[str]], Any]:
    """The module to export, the names of its inputs and outputs, and its dynamic shapes."""
    rows, time = Dim("rows", min=1, max=1 << 16), Dim("time", min=1, max=model.config.context)
    ids, lengths = {0: rows, 1: time}, {0: rows}
    if model.decoder is None:
        names = ["input_ids", "lengths"]
        if model.config.segments:
            names, dims = [*names, "token_type_ids"], (ids, lengths, (ids,))
            return _Encoder(model).eval(), (names, ["logits"]), dims
        return _Encoder(model).eval(), (names, ["logits"]), (ids, lengths)
    if model.encoder is not None:
        target = {0: rows, 1: Dim("target", min=1, max=model.config.context)}
        names = ["input_ids", "lengths", "decoder_input_ids"]
        return _EncoderDecoder(model).eval(), (names, ["logits"]), (ids, lengths, target)
    past = Dim("past", min=0, max=model.config.context)
    layers = range(len(model.decoder.layers))
    parts = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    names = ["input_ids", *(f"past_key_values.{part}" for part in parts)]
    outputs = ["logits", *(f"present.{part}" for part in parts)]
    return _Decoder(model).eval(), (names, outputs), (ids, [{0: rows, 2: past} for _ in parts])


def _random_inputs(model: Transformer, rows: int, time: int, past: int) -> tuple[Any, ...]:
    """Random inputs of the exported module, shortened if the context of the model is small."""
    generator, config = torch.Generator().manual_seed(rows), model.config
    if time + past > config.context:
        past = min(past, config.context // 2)
    time = min(time, config.context - max(1, past))  # the target of a pair has one token more

    def ids(vocab_size: int, length: int) -> Tensor:
        return torch.randint(vocab_size, (rows, length), generator=generator)

    lengths = torch.randint(1, time + 1, (rows,), generator=generator)
    if model.decoder is None:
        inputs = ids(config.vocab_size, time), lengths
        return (*inputs, ids(config.segments, time)) if config.segments else inputs
    if model.encoder is not None:
        source = ids(config.source_vocab_size or config.vocab_size, time)
        return source, lengths, ids(config.vocab_size, time + 1)
    parts = []
    for layer in model.decoder.layers:
        attention: Attention = layer.attention
        for width in (attention.head_dim, attention.value.out_features // attention.kv_heads):
            shape = (rows, attention.kv_heads, past, width)
            parts.append(torch.randn(shape, generator=generator))
    return ids(config.vocab_size, time), parts


def _flatten(values: Any) -> list[Tensor]:
    flat: list[Tensor] = torch.utils._pytree.tree_leaves(values)
    return flat


@contextmanager
def _silence() -> Iterator[None]:
    """Turn off the progress messages and warnings of torch's exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
